"""Checkpoints in one store or in two: objects first, manifest last, old ones deleted only behind newer ones.

`checkpoints/{step:08d}-{epoch:04d}/` holds `tensors.safetensors`, any number of Parquet tables, `state.json`, an
increment perhaps `tensors.delta`, and `manifest.json`. A checkpoint without a manifest does not exist. A new one takes
nothing away from an old one, so that at every instant one complete checkpoint is there.

All is written to the primary store; `warm.py` carries it on to the warm one. What is read is taken object by object
from the warm store where it validates there, else from the primary.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from gyre_core.checkpoint.manifest import (
    CheckpointFacts,
    CheckpointManifest,
    ObjectRecord,
    checkpoint_order,
    is_checkpoint_name,
)
from gyre_core.checkpoint.retention import Retention
from gyre_core.storage import OutOfSpaceError, Storage, WriteFile, unwatched
from gyre_core.weights.digests import bytes_digest, file_digest

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
_TENSORS = "tensors.safetensors"
_DELTA = "tensors.delta"
_STATE = "state.json"


class CorruptCheckpointError(RuntimeError):
    """A checkpoint has a manifest, but an object of it is missing or damaged, or what it gives is not what it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(CheckpointFacts):
    """Everything that an exact resume needs: tensors by name, tables by name, and JSON values.

    `delta` is what turns the tensors of an increment's base into its own, where it has one.
    """

    tensors: Mapping[str, torch.Tensor]
    tables: Mapping[str, pa.Table]
    state: Mapping[str, Any]
    delta: bytes = b""


@dataclass(slots=True)
class _Contents:
    """The objects of a checkpoint as they are read."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    tables: dict[str, pa.Table] = field(default_factory=dict[str, pa.Table])
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    delta: bytes = b""

    def read(self, name: str, path: Path) -> None:
        """Take in the object `name`, which lies at `path`."""
        if name == _TENSORS:
            self.tensors = load_file(path)
        elif name == _STATE:
            self.state = json.loads(path.read_bytes())
        elif name == _DELTA:
            self.delta = path.read_bytes()
        else:
            self.tables[name.removesuffix(".parquet")] = pq.read_table(path, memory_map=False)


class CheckpointStore:
    """The `checkpoints/` folder of a storage, and its copy in a warm one."""

    def __init__(self, storage: Storage, retention: Retention, warm: Storage | None = None) -> None:
        self._storage = storage
        self._retention = retention
        self._stores = (storage,) if warm is None else (warm, storage)
        self.sparing = False
        """Whether only the newest checkpoint stays beside those that are kept for themselves, as space is short."""
        self.exact_from: int | None = None
        """The step of the oldest checkpoint from which a run goes on exactly, for whose sake the pool keeps segments,
        as the last `retain` found it. Those that are kept for their score or their step alone do not count."""
        self.require_owned: Callable[[], None] = unwatched
        """Raises when another process owns the run by now: what that one needs is not this one's to judge."""

    def save(self, checkpoint: Checkpoint, created_at: float) -> CheckpointManifest:
        """Commit a checkpoint, then drop those that need not stay; returns its manifest.

        Raises OutOfSpaceError with nothing lost; an unfinished earlier try of the same step is replaced.
        """
        if self._storage.exists(f"{FOLDER}/{checkpoint.name}/{MANIFEST}"):
            manifest = _read_manifest(self._storage, checkpoint.name)
        else:
            manifest = self._commit(checkpoint, created_at)
        self.retain()
        return manifest

    def _commit(self, checkpoint: Checkpoint, created_at: float) -> CheckpointManifest:
        folder = f"{FOLDER}/{checkpoint.name}"
        self._storage.delete_folder(folder)
        try:
            objects = self._write_objects(folder, checkpoint)
            manifest = CheckpointManifest(**checkpoint.facts(), objects=objects, created_at=created_at)
            self._storage.create(f"{folder}/{MANIFEST}", manifest.to_json())
        except OutOfSpaceError:
            # What was written so far would only keep the disk full.
            self._storage.delete_folder(folder)
            raise
        return manifest

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint whose objects all validate, in either store; damaged ones are skipped with a warning.

        Raises CorruptCheckpointError when there are checkpoints and none is whole.
        """
        return self._newest(self.names())

    def newest_full(self) -> Checkpoint | None:
        """The same of full checkpoints alone."""
        return self._newest([name for name in self.names() if self._is_full(name)])

    def load(self, name: str) -> Checkpoint:
        """A checkpoint by its name, every object checked; raises CorruptCheckpointError when any is not to be had."""
        manifest = self.manifest(name)
        contents = _Contents()
        for item, record in manifest.objects.items():
            self._with_object(name, item, record, lambda path, item=item: contents.read(item, path))
        return Checkpoint(
            **manifest.facts(),
            tensors=contents.tensors,
            tables=contents.tables,
            state=contents.state,
            delta=contents.delta,
        )

    def is_whole(self, name: str) -> bool:
        """Whether every object of a checkpoint validates in one of the stores."""
        try:
            for item, record in self.manifest(name).objects.items():
                self._with_object(name, item, record, lambda _: None)
        except CorruptCheckpointError:
            return False
        return True

    def manifest(self, name: str) -> CheckpointManifest:
        """The manifest of a checkpoint, from the store that has it; raises CorruptCheckpointError."""
        reasons: list[str] = []
        for store in self._stores:
            try:
                return _read_manifest(store, name)
            except (OSError, ValueError) as error:
                reasons.append(f"{store.url}: {error}")
        raise CorruptCheckpointError(f"checkpoint {name}: {'; '.join(reasons)}")

    def names(self) -> list[str]:
        """Names of the committed checkpoints in either store, oldest first; one of a later epoch is newer.

        Raises OSError when no store answers: that a run has none is another matter.
        """
        found: set[str] = set()
        errors: list[OSError] = []
        for store in self._stores:
            try:
                found.update(committed_checkpoints(store))
            except OSError as error:
                logger.warning("the checkpoints in %s cannot be listed: %s", store.url, error)
                errors.append(error)
        if len(errors) == len(self._stores):
            raise errors[-1]
        return sorted(found, key=checkpoint_order)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first; one of a later epoch may be of an earlier step."""
        return [checkpoint_order(name)[1] for name in self.names()]

    def copy_to(self, name: str, target: Storage) -> None:
        """Commit a checkpoint of this store to another one; raises CorruptCheckpointError when it is not whole."""
        manifest = self.manifest(name)
        if target.exists(f"{FOLDER}/{name}/{MANIFEST}"):
            return
        # Left by a copy that did not get to its end.
        target.delete_folder(f"{FOLDER}/{name}")
        for item, record in manifest.objects.items():
            self._with_object(
                name,
                item,
                record,
                lambda path, item=item: target.create_file(
                    f"{FOLDER}/{name}/{item}", lambda copy: shutil.copyfile(path, copy)
                ),
            )
        target.create(f"{FOLDER}/{name}/{MANIFEST}", manifest.to_json())

    def can_build_on(self, name: str) -> bool:
        """Whether the primary store has all bytes of a full checkpoint, so that an increment may build on it."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            manifest = _read_manifest(self._storage, name)
            return manifest.base is None and has_all_bytes(self._storage, manifest)
        return False

    def problems(self, name: str) -> dict[str, list[str]]:
        """What is wrong with a checkpoint in each store, by the store's URL; an empty list says that it is whole."""
        return {store.url: list(_problems(store, name)) for store in self._stores}

    def _newest(self, names: Sequence[str]) -> Checkpoint | None:
        for name in reversed(names):
            try:
                return self.load(name)
            except CorruptCheckpointError as error:
                logger.warning("skipping %s", error)
        if names:
            raise CorruptCheckpointError(f"none of the {len(names)} checkpoints in {self._storage.url} is whole")
        return None

    def _is_full(self, name: str) -> bool:
        try:
            return self.manifest(name).base is None
        except CorruptCheckpointError:
            return False

    def _write_objects(self, folder: str, checkpoint: Checkpoint) -> dict[str, ObjectRecord]:
        """Write everything but the manifest."""
        objects = {
            _TENSORS: self._write(f"{folder}/{_TENSORS}", lambda path: save_file(dict(checkpoint.tensors), path))
        }
        for name, table in checkpoint.tables.items():
            objects[f"{name}.parquet"] = self._write(
                f"{folder}/{name}.parquet", lambda path, table=table: pq.write_table(table, path, compression="zstd")
            )
        small = {_STATE: json.dumps(checkpoint.state, sort_keys=True).encode()}
        for name, data in (small | ({_DELTA: checkpoint.delta} if checkpoint.delta else {})).items():
            self._storage.create(f"{folder}/{name}", data)
            objects[name] = ObjectRecord(len(data), bytes_digest(data))
        return objects

    def _write(self, name: str, write: WriteFile) -> ObjectRecord:
        digest = ""

        def write_and_digest(path: Path) -> None:
            nonlocal digest
            write(path)
            digest = file_digest(path)

        size = self._storage.create_file(name, write_and_digest)
        return ObjectRecord(size, digest)

    def _with_object(self, name: str, item: str, record: ObjectRecord, use: Callable[[Path], object]) -> None:
        """Use the first store's object that validates; raises CorruptCheckpointError when none does."""
        reasons: list[str] = []
        for store in self._stores:
            try:
                with store.local_file(f"{FOLDER}/{name}/{item}") as path:
                    if is_intact(path, record):
                        use(path)
                        return
                reasons.append(f"{item} does not match its digest in {store.url}")
            except FileNotFoundError:
                reasons.append(f"{item} is missing in {store.url}")
            except OSError as error:
                reasons.append(f"{item} cannot be read in {store.url}: {error}")
        raise CorruptCheckpointError(f"checkpoint {name}: {'; '.join(reasons)}")

    def _whole(self) -> list[CheckpointManifest]:
        """The manifests of the primary's checkpoints of which no object is missing or cut short; reads none of them."""
        found = whole_manifests(self._storage)
        names = {manifest.name for manifest in found}
        return [manifest for manifest in found if manifest.base is None or manifest.base in names]

    def retain(self) -> None:
        """Delete what need not stay and is older than all of the newest, unfinished ones too.

        Raises what `require_owned` does, with nothing deleted.
        """
        manifests = self._whole()
        # In this order: who takes over after this check goes on from one of these, and from none that goes.
        self.require_owned()
        retention = replace(self._retention, keep=1) if self.sparing else self._retention
        kept, oldest, recent = retention.kept(manifests), retention.oldest(manifests), retention.recent(manifests)
        self.exact_from = min((manifest.step for manifest in manifests if manifest.name in recent), default=None)
        for name in begun_checkpoints(self._storage):
            if name not in kept and checkpoint_order(name) < oldest:
                delete_checkpoint(self._storage, name)


def whole_manifests(store: Storage) -> list[CheckpointManifest]:
    """The manifests in a store of checkpoints that have all their bytes there, oldest first."""
    found: list[CheckpointManifest] = []
    for name in committed_checkpoints(store):
        with contextlib.suppress(ValueError, FileNotFoundError):
            manifest = _read_manifest(store, name)
            if has_all_bytes(store, manifest):
                found.append(manifest)
    return found


def has_all_bytes(store: Storage, manifest: CheckpointManifest) -> bool:
    """Whether no object of a committed checkpoint is missing or cut short in a store; reads none of them."""
    folder = f"{FOLDER}/{manifest.name}"
    try:
        return all(store.size(f"{folder}/{item}") == record.size for item, record in manifest.objects.items())
    except FileNotFoundError:
        return False


def is_intact(path: Path, record: ObjectRecord) -> bool:
    """Whether a file is the object that was recorded."""
    return path.stat().st_size == record.size and file_digest(path) == record.digest


def begun_checkpoints(store: Storage) -> list[str]:
    """Names of all checkpoints of which anything is there, oldest first; other folders are nobody's business."""
    names = (folder.rpartition("/")[2] for folder in store.folders(FOLDER))
    return sorted(filter(is_checkpoint_name, names), key=checkpoint_order)


def delete_checkpoint(store: Storage, name: str) -> None:
    """Remove a checkpoint, its manifest first, so that no reader finds a torn one."""
    store.delete(f"{FOLDER}/{name}/{MANIFEST}")
    store.delete_folder(f"{FOLDER}/{name}")


def _problems(store: Storage, name: str) -> Iterator[str]:
    """What of a checkpoint is not as it should be in one store."""
    try:
        manifest = _read_manifest(store, name)
    except FileNotFoundError:
        yield "not there"
        return
    except (OSError, ValueError) as error:
        yield f"its manifest cannot be read: {error}"
        return
    for item, record in manifest.objects.items():
        try:
            with store.local_file(f"{FOLDER}/{name}/{item}") as path:
                if not is_intact(path, record):
                    yield f"{item} does not match its digest"
        except FileNotFoundError:
            yield f"{item} is missing"
        except OSError as error:
            yield f"{item} cannot be read: {error}"


def committed_checkpoints(store: Storage) -> list[str]:
    """Names of the complete checkpoints in a store, oldest first."""
    return [name for name in begun_checkpoints(store) if store.exists(f"{FOLDER}/{name}/{MANIFEST}")]


def _read_manifest(store: Storage, name: str) -> CheckpointManifest:
    return CheckpointManifest.from_json(store.read(f"{FOLDER}/{name}/{MANIFEST}"))
