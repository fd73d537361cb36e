"""The chain of published policy versions: how weights reach whoever generates.

`policy/{version}/weights.safetensors` is written first, `policy/{version}/manifest.json` last, by exclusive
create; a version exists once its manifest does. The manifest names the parent version and the digest of every
tensor, and a reader checks them all before it uses one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from safetensors.torch import load_file, save_file

from gyre_core.storage import Storage
from gyre_core.types import PolicyVersion
from gyre_core.weights.digests import tensor_digest, tensor_digests

FORMAT = 1
HELD_BYTES = 1 << 29
"""Size up to which the newest version's weights stay in memory, for the engine of this process."""


class CorruptVersionError(RuntimeError):
    """A published version's weights are not what its manifest promises."""


@dataclass(frozen=True, slots=True)
class VersionManifest:
    """What is known of a published version.

    `kind` is how its weights are stored (`full`: whole), `digests` are xxh3-128 by tensor name, `size` is bytes.
    """

    version: PolicyVersion
    parent: PolicyVersion | None
    kind: str
    digests: Mapping[str, str]
    size: int

    def to_json(self) -> bytes:
        """The manifest as stored."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> VersionManifest:
        """Read `to_json`; raises ValueError for a format that this release does not know."""
        fields = json.loads(data)
        if fields.pop("format") != FORMAT:
            raise ValueError("this policy version was written by another release of Gyre; use that release to read it")
        version, parent = fields.pop("version"), fields.pop("parent")
        return cls(PolicyVersion(**version), PolicyVersion(**parent) if parent else None, **fields)


class VersionChain:
    """Policy versions in the `policy/` folder of a run's storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._held: tuple[PolicyVersion, Mapping[str, torch.Tensor]] | None = None

    def publish(
        self, version: PolicyVersion, parent: PolicyVersion | None, weights: Mapping[str, torch.Tensor]
    ) -> VersionManifest:
        """Make a version visible, whole; repeating the same publication is no error.

        Raises RuntimeError when the version was already published with other weights.
        """
        digests = tensor_digests(weights)
        if self.exists(version):
            manifest = self.manifest(version)
            if manifest.digests != digests:
                raise RuntimeError(f"policy version {version} is already published with other weights")
            return manifest
        name = self._weights_name(version)
        # Without a manifest the file is this owner's own unfinished publication: versions carry their epoch.
        self._storage.delete(name)
        tensors = {key: tensor.detach().contiguous() for key, tensor in weights.items()}
        size = self._storage.create_file(name, lambda path: save_file(tensors, path))
        manifest = VersionManifest(version, parent, "full", digests, size)
        self._storage.create(self._manifest_name(version), manifest.to_json())
        if size <= HELD_BYTES:
            self._held = version, {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
        return manifest

    def load(self, version: PolicyVersion) -> Mapping[str, torch.Tensor]:
        """The version's weights, every digest checked; a small one that was just published here is not read again.

        Raises FileNotFoundError for a version that is not there and CorruptVersionError for a damaged one.
        """
        held = self._held
        if held is not None and held[0] == version and self.exists(version):
            return held[1]
        manifest = self.manifest(version)
        with self._storage.local_file(self._weights_name(version)) as path:
            try:
                weights = load_file(path)
            except Exception as error:  # safetensors raises its own types for any damage
                raise CorruptVersionError(f"policy version {version}: {path} cannot be read: {error}") from error
        if weights.keys() != manifest.digests.keys():
            raise CorruptVersionError(f"policy version {version}: its tensors are not those of its manifest")
        for name, tensor in weights.items():
            if tensor_digest(tensor) != manifest.digests[name]:
                raise CorruptVersionError(f"policy version {version}: tensor {name} does not match its digest")
        return weights

    def manifest(self, version: PolicyVersion) -> VersionManifest:
        """The version's manifest; raises FileNotFoundError."""
        return VersionManifest.from_json(self._storage.read(self._manifest_name(version)))

    def exists(self, version: PolicyVersion) -> bool:
        """Whether the version is published."""
        return self._storage.exists(self._manifest_name(version))

    def versions(self) -> list[PolicyVersion]:
        """All published versions, oldest first."""
        return [version for version in self._begun() if self.exists(version)]

    def retain(self, keep: int) -> None:
        """Delete all but the newest `keep` versions, with older ones that were never finished."""
        assert keep >= 1
        kept = self.versions()[-keep:]
        for version in self._begun():
            if kept and version < kept[0]:
                self.withdraw(version)

    def withdraw(self, version: PolicyVersion) -> None:
        """Delete a version, published or not; one that is not there is no error.

        The manifest goes first, so that no reader finds a torn one.
        """
        self._storage.delete(self._manifest_name(version))
        self._storage.delete_folder(f"policy/{version}")

    def _begun(self) -> list[PolicyVersion]:
        """All versions of which anything is there, oldest first."""
        names = [folder.removeprefix("policy/").partition("-") for folder in self._storage.folders("policy")]
        return sorted(PolicyVersion(int(epoch), int(number)) for epoch, _, number in names)

    @staticmethod
    def _weights_name(version: PolicyVersion) -> str:
        return f"policy/{version}/weights.safetensors"

    @staticmethod
    def _manifest_name(version: PolicyVersion) -> str:
        return f"policy/{version}/manifest.json"
