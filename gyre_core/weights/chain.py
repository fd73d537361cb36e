"""The chain of published policy versions: how weights reach whoever generates.

A version is stored whole (`policy/{version}/weights.safetensors`) or as the difference from its parent
(`policy/{version}/delta.bin`, see `delta.py`); `policy/{version}/manifest.json` follows last, by exclusive create, and
a version exists once its manifest does. A reader goes back from the version that it wants to the first one that it
holds or that is stored whole, applies the differences in order, and checks every digest before it uses a tensor.

A version is stored whole when there is no parent at hand, when it is small, when its difference is not much smaller,
and when the differences since the last whole one have become as many bytes as that, or many. A whole version and those
behind it go when none of them is kept.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice

import torch
from safetensors.torch import load_file, save_file

from gyre_core.storage import Storage
from gyre_core.types import PolicyVersion
from gyre_core.weights.codec import DeltaError
from gyre_core.weights.delta import WeightState, apply_weights, encode_weights
from gyre_core.weights.flat import HELD_BYTES, HELD_STATES, FlatWeights

FORMAT = 2
LEAST_DELTA_BYTES = 1 << 22
"""Size of the weights below which a version is always stored whole."""
LONGEST_CHAIN = 64
"""Differences that may follow a whole version."""
MANIFESTS_KNOWN = 4 * LONGEST_CHAIN
"""Manifests that stay in memory."""
LEAST_GAIN = 2
"""A version whose difference is not so many times smaller than the whole is stored whole."""
PAUSE = 16
"""Versions that are stored whole, untried, after a difference was too large."""


class CorruptVersionError(RuntimeError):
    """A published version's weights are not what its manifest promises."""


@dataclass(frozen=True, slots=True)
class VersionManifest:
    """What is known of a published version.

    `kind` is how its weights are stored: `full` or `delta`. `size` is bytes of the stored object, `digest` the
    fingerprint of its tensors. `chain` and `chain_size` count the differences since the last full version, with their
    bytes; both are 0 for a full one.
    """

    version: PolicyVersion
    parent: PolicyVersion | None
    kind: str
    digest: str
    size: int
    chain: int = 0
    chain_size: int = 0

    def to_json(self) -> bytes:
        """The manifest as stored."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> VersionManifest:
        """Read `to_json`; raises ValueError for a format that this release does not know, and for anything else."""
        try:
            fields = json.loads(data)
            if fields.pop("format") != FORMAT:
                raise ValueError(
                    "this policy version was written by another release of Gyre; use that release to read it"
                )
            version, parent = fields.pop("version"), fields.pop("parent")
            manifest = cls(PolicyVersion(**version), PolicyVersion(**parent) if parent else None, **fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not the manifest of a policy version: {error!r}") from error
        if manifest.kind not in ("full", "delta") or (manifest.kind == "delta" and manifest.parent is None):
            raise ValueError(f"a policy version of kind {manifest.kind!r} with parent {manifest.parent}")
        return manifest


class VersionChain:
    """Policy versions in the `policy/` folder of a run's storage; `publish` and `load` may run side by side."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._held: dict[PolicyVersion, WeightState] = {}
        self._manifests: dict[PolicyVersion, VersionManifest] = {}
        self._untried = 0
        self._lock = threading.Lock()

    def publish(self, version: PolicyVersion, parent: PolicyVersion | None, weights: FlatWeights) -> VersionManifest:
        """Make a version visible; repeating the same publication is no error. The weights are kept, not copied.

        Raises RuntimeError when the version was already published with other weights, and ValueError that names a
        tensor which is new, gone, or another than in the parent, if that is at hand.
        """
        state = WeightState.of(weights, torch.get_num_threads())
        if self.exists(version):
            manifest = self.manifest(version)
            if manifest.digest != state.fingerprint.hex():
                raise RuntimeError(f"policy version {version} is already published with other weights")
            return manifest
        # Without a manifest the files are this owner's own unfinished publication: versions carry their epoch.
        for name in (self._weights_name(version), self._delta_name(version)):
            self._storage.delete(name)
        whole = VersionManifest(version, parent, "full", state.fingerprint.hex(), 0)
        manifest = self._write_delta(whole, state) or self._write_whole(whole, state)
        self._storage.create(self._manifest_name(version), manifest.to_json())
        self._know(manifest)
        self._hold(version, state)
        return manifest

    def load(self, version: PolicyVersion) -> Mapping[str, torch.Tensor]:
        """The version's weights, every digest checked; what this object published or loaded just now is at hand.

        The tensors are not to be changed. Raises FileNotFoundError for a version that is not there, and
        CorruptVersionError for one that is damaged or is based on one that is.
        """
        if version in self._held and not self.exists(version):
            raise FileNotFoundError(f"policy version {version} was withdrawn")
        state: WeightState | None = None
        for manifest in reversed(list(self._path(version))):
            if manifest.version in self._held:
                state = self._held[manifest.version]
            else:
                state = self._read_whole(manifest) if manifest.kind == "full" else self._read_delta(manifest, state)
        assert state is not None, "a path ends at a state that is held or whole"
        self._hold(version, state)
        return state.weights.tensors()

    def manifest(self, version: PolicyVersion) -> VersionManifest:
        """The version's manifest; raises FileNotFoundError, and CorruptVersionError for one that is damaged."""
        try:
            manifest = VersionManifest.from_json(self._storage.read(self._manifest_name(version)))
        except ValueError as error:
            raise CorruptVersionError(f"policy version {version}: {error}") from error
        if manifest.version != version:
            raise CorruptVersionError(f"policy version {version}: its manifest is that of {manifest.version}")
        return manifest

    def exists(self, version: PolicyVersion) -> bool:
        """Whether the version is published."""
        return self._storage.exists(self._manifest_name(version))

    def versions(self) -> list[PolicyVersion]:
        """All published versions, oldest first."""
        return [version for version in self._begun() if self.exists(version)]

    def retain(self, keep: int) -> None:
        """Delete all but the newest `keep` versions and those that they are based on, and what was never finished."""
        assert keep >= 1
        begun = self._begun()
        # No more are asked for than are kept: a long chain on S3 would take a request for each of its versions.
        kept = list(islice(filter(self.exists, reversed(begun)), keep))
        if not kept:
            return
        oldest = min(self._base_of(version) for version in kept)
        for version in begun:
            if version < oldest:
                self.withdraw(version)

    def withdraw(self, version: PolicyVersion) -> None:
        """Delete a version, published or not; one that is not there is no error.

        The manifest goes first, so that no reader finds a torn one.
        """
        self._storage.delete(self._manifest_name(version))
        self._storage.delete_folder(f"policy/{version}")
        self._manifests.pop(version, None)

    def _write_whole(self, manifest: VersionManifest, state: WeightState) -> VersionManifest:
        tensors = state.weights.tensors()
        size = self._storage.create_file(self._weights_name(manifest.version), lambda path: save_file(tensors, path))
        return replace(manifest, size=size)

    def _write_delta(self, manifest: VersionManifest, state: WeightState) -> VersionManifest | None:
        """Store the version as a difference; None when it is to be stored whole."""
        parent = self._held.get(manifest.parent) if manifest.parent else None
        if parent is None or manifest.parent is None:
            return None
        parent.weights.check_same_tensors(state.weights)
        if state.weights.nbytes < LEAST_DELTA_BYTES:
            return None
        before = self._known_manifest(manifest.parent)
        if self._untried:
            self._untried -= 1
            return None
        if before.chain >= LONGEST_CHAIN:
            return None
        delta = encode_weights(parent, state, torch.get_num_threads())
        if len(delta) * LEAST_GAIN > state.weights.nbytes:
            self._untried = PAUSE
            return None
        if before.chain_size + len(delta) > state.weights.nbytes:
            return None
        self._storage.create(self._delta_name(manifest.version), delta)
        return replace(
            manifest,
            kind="delta",
            size=len(delta),
            chain=before.chain + 1,
            chain_size=before.chain_size + len(delta),
        )

    def _read_whole(self, manifest: VersionManifest) -> WeightState:
        with self._storage.local_file(self._weights_name(manifest.version)) as path:
            try:
                tensors = load_file(path)
            except Exception as error:  # safetensors raises its own types for any damage
                raise CorruptVersionError(
                    f"policy version {manifest.version}: {path} cannot be read: {error}"
                ) from error
        return self._checked(manifest, WeightState.of(FlatWeights.of(tensors), torch.get_num_threads()))

    def _read_delta(self, manifest: VersionManifest, parent: WeightState | None) -> WeightState:
        assert parent is not None, "a path begins at a whole version"
        try:
            delta = self._storage.read(self._delta_name(manifest.version))
            state = apply_weights(parent, delta, torch.get_num_threads())
        except DeltaError as error:
            raise CorruptVersionError(f"policy version {manifest.version}: {error}") from error
        return self._checked(manifest, state)

    def _checked(self, manifest: VersionManifest, state: WeightState) -> WeightState:
        if state.fingerprint.hex() != manifest.digest:
            raise CorruptVersionError(f"policy version {manifest.version}: its tensors do not match their digest")
        return state

    def _hold(self, version: PolicyVersion, state: WeightState) -> None:
        """Keep a state for what comes next, and others, the latest first, within HELD_BYTES and HELD_STATES."""
        with self._lock:
            self._held.pop(version, None)
            self._held[version] = state
            size = sum(held.weights.nbytes for held in self._held.values())
            for old in list(self._held)[:-1]:
                if size <= HELD_BYTES and len(self._held) <= HELD_STATES:
                    break
                size -= self._held.pop(old).weights.nbytes

    def _path(self, version: PolicyVersion, held: bool = True) -> Iterator[VersionManifest]:
        """The manifests from a version back to one that is whole, or with `held`, is in memory."""
        wanted: PolicyVersion | None = version
        for _ in range(LONGEST_CHAIN + 1):
            assert wanted is not None, "a difference has a parent"
            manifest = self._known_manifest(wanted)
            yield manifest
            if manifest.kind == "full" or (held and wanted in self._held):
                return
            wanted = manifest.parent
        raise CorruptVersionError(f"policy version {version}: more than {LONGEST_CHAIN} differences lead to it")

    def _base_of(self, version: PolicyVersion) -> PolicyVersion:
        """The whole version that this one is based on."""
        return [manifest.version for manifest in self._path(version, held=False)][-1]

    def _known_manifest(self, version: PolicyVersion) -> VersionManifest:
        """The manifest, which never changes, read once."""
        if version not in self._manifests:
            self._know(self.manifest(version))
        return self._manifests[version]

    def _know(self, manifest: VersionManifest) -> None:
        while len(self._manifests) >= MANIFESTS_KNOWN:
            self._manifests.pop(next(iter(self._manifests)))
        self._manifests[manifest.version] = manifest

    def _begun(self) -> list[PolicyVersion]:
        """All versions of which anything is there, oldest first."""
        names = [folder.removeprefix("policy/").partition("-") for folder in self._storage.folders("policy")]
        return sorted(PolicyVersion(int(epoch), int(number)) for epoch, _, number in names)

    @staticmethod
    def _weights_name(version: PolicyVersion) -> str:
        return f"policy/{version}/weights.safetensors"

    @staticmethod
    def _delta_name(version: PolicyVersion) -> str:
        return f"policy/{version}/delta.bin"

    @staticmethod
    def _manifest_name(version: PolicyVersion) -> str:
        return f"policy/{version}/manifest.json"
