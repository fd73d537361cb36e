"""Checkpoints in a storage: objects first, manifest last, oldest deleted only behind newer ones.

`checkpoints/{step:08d}-{epoch:04d}/` holds `tensors.safetensors`, any number of Parquet tables, `state.json`
and `manifest.json`. A checkpoint without a manifest does not exist. A new one takes nothing away from an old one,
so that at every instant one complete checkpoint is there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from gyre_core.checkpoint.manifest import CheckpointManifest, ObjectRecord
from gyre_core.storage import OutOfSpaceError, Storage, WriteFile
from gyre_core.weights.digests import bytes_digest, file_digest

logger = logging.getLogger(__name__)

_TENSORS = "tensors.safetensors"
_STATE = "state.json"
_MANIFEST = "manifest.json"


class CorruptCheckpointError(RuntimeError):
    """A checkpoint has a manifest, but an object of it is missing or damaged."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that an exact resume needs: tensors by name, tables by name, and JSON values."""

    step: int
    epoch: int
    tensors: Mapping[str, torch.Tensor]
    tables: Mapping[str, pa.Table]
    state: Mapping[str, Any]


class CheckpointStore:
    """The `checkpoints/` folder of a run's storage."""

    def __init__(self, storage: Storage, keep: int) -> None:
        self._storage = storage
        self.keep = keep
        """How many complete checkpoints stay; may be changed."""

    def save(self, checkpoint: Checkpoint, created_at: float) -> int:
        """Commit a checkpoint, then drop all but the newest `keep`; returns its bytes.

        Raises OutOfSpaceError with nothing lost; an unfinished earlier try of the same step is replaced.
        """
        folder = f"checkpoints/{checkpoint.step:08d}-{checkpoint.epoch:04d}"
        if self._storage.exists(f"{folder}/{_MANIFEST}"):
            return sum(record.size for record in self._manifest(folder).objects.values())
        self._storage.delete_folder(folder)
        try:
            objects = self._write_objects(folder, checkpoint)
            manifest = CheckpointManifest(checkpoint.step, checkpoint.epoch, objects, created_at)
            self._storage.create(f"{folder}/{_MANIFEST}", manifest.to_json())
        except OutOfSpaceError:
            # What was written so far would only keep the disk full.
            self._storage.delete_folder(folder)
            raise
        self.retain()
        return sum(record.size for record in objects.values())

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint whose objects all validate; damaged ones are skipped with a warning.

        Raises CorruptCheckpointError when there are checkpoints and none is whole.
        """
        committed = self._committed()
        for folder in reversed(committed):
            try:
                return self._load(folder)
            except CorruptCheckpointError as error:
                logger.warning("skipping %s", error)
        if committed:
            raise CorruptCheckpointError(f"none of the {len(committed)} checkpoints in {self._storage.url} is whole")
        return None

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first; one of a later epoch may be of an earlier step."""
        return [_step_and_epoch(folder)[0] for folder in self._committed()]

    def _write_objects(self, folder: str, checkpoint: Checkpoint) -> dict[str, ObjectRecord]:
        """Write everything but the manifest."""
        objects = {
            _TENSORS: self._write(f"{folder}/{_TENSORS}", lambda path: save_file(dict(checkpoint.tensors), path))
        }
        for name, table in checkpoint.tables.items():
            objects[f"{name}.parquet"] = self._write(
                f"{folder}/{name}.parquet", lambda path, table=table: pq.write_table(table, path, compression="zstd")
            )
        state = json.dumps(checkpoint.state, sort_keys=True).encode()
        self._storage.create(f"{folder}/{_STATE}", state)
        objects[_STATE] = ObjectRecord(len(state), bytes_digest(state))
        return objects

    def _write(self, name: str, write: WriteFile) -> ObjectRecord:
        digest = ""

        def write_and_digest(path: Path) -> None:
            nonlocal digest
            write(path)
            digest = file_digest(path)

        size = self._storage.create_file(name, write_and_digest)
        return ObjectRecord(size, digest)

    def _load(self, folder: str) -> Checkpoint:
        try:
            manifest = self._manifest(folder)
        except ValueError as error:
            raise CorruptCheckpointError(f"checkpoint {folder}: {error}") from error
        tensors: dict[str, torch.Tensor] = {}
        tables: dict[str, pa.Table] = {}
        state: dict[str, Any] = {}
        for name, record in manifest.objects.items():
            try:
                with self._storage.local_file(f"{folder}/{name}") as path:
                    if path.stat().st_size != record.size or file_digest(path) != record.digest:
                        raise CorruptCheckpointError(f"checkpoint {folder}: {name} does not match its digest")
                    if name == _TENSORS:
                        tensors = load_file(path)
                    elif name == _STATE:
                        state = json.loads(path.read_bytes())
                    else:
                        tables[name.removesuffix(".parquet")] = pq.read_table(path, memory_map=False)
            except FileNotFoundError as error:
                raise CorruptCheckpointError(f"checkpoint {folder}: {name} is missing") from error
        return Checkpoint(manifest.step, manifest.epoch, tensors, tables, state)

    def _has_all_bytes(self, folder: str) -> bool:
        """Whether no object of a committed checkpoint is missing or cut short; reads none of them."""
        try:
            objects = self._manifest(folder).objects
            return all(self._storage.size(f"{folder}/{name}") == record.size for name, record in objects.items())
        except (ValueError, FileNotFoundError):
            return False

    def _manifest(self, folder: str) -> CheckpointManifest:
        return CheckpointManifest.from_json(self._storage.read(f"{folder}/{_MANIFEST}"))

    def _committed(self) -> list[str]:
        """Folders of the complete checkpoints, oldest first."""
        return [folder for folder in self._begun() if self._storage.exists(f"{folder}/{_MANIFEST}")]

    def _begun(self) -> list[str]:
        """Folders of all checkpoints, oldest first: whoever takes over may go back, so the epoch decides."""
        return sorted(self._storage.folders("checkpoints"), key=lambda folder: _step_and_epoch(folder)[::-1])

    def retain(self) -> None:
        """Delete what is older than the newest `keep` that are whole by size, unfinished ones too."""
        whole = [folder for folder in self._committed() if self._has_all_bytes(folder)]
        if not whole:
            return
        oldest_kept, folders = whole[-self.keep :][0], self._begun()
        for folder in folders[: folders.index(oldest_kept)]:
            self._storage.delete(f"{folder}/{_MANIFEST}")
            self._storage.delete_folder(folder)


def _step_and_epoch(folder: str) -> tuple[int, int]:
    step, _, epoch = folder.rpartition("/")[2].partition("-")
    return int(step), int(epoch)
