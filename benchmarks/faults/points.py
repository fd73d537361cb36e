"""The points at which a run is killed or frozen: events of the real functions, told apart by patterns.

A tap wraps storage, engine, learner, optimiser, metrics, summary and export of its own process. Whatever they do
becomes an event, such as `running after create data/claims/00000001-0000.1`: the phase (`opening` a new run,
`recovering`, `running`), the moment, the operation, and the object in the run's storage (`data`) or in the warm copy
(`warm`). The moment `half` is in the middle of a write, which is left half done; `placing` is when a file of the run
folder that is written is about to take the place of the old one, just before the last look at who owns the run. While a
full checkpoint or a whole policy version takes the place of a chain of increments or differences, `rebase` stands
behind the phase.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from gyre_core.checkpoint.store import CheckpointStore
from gyre_core.engines.transformers_engine import TransformersEngine
from gyre_core.learner.local import LocalLearner
from gyre_core.monitor import metrics, report
from gyre_core.storage import LocalStorage, WriteFile, put_file, unwatched
from gyre_core.training import export
from gyre_core.training.run_folder import replacing
from gyre_core.types import Completion
from gyre_core.weights.chain import VersionChain


@dataclass(frozen=True)
class Point:
    """Where a run is killed: at events that the pattern matches from their beginning on."""

    name: str
    pattern: str
    increments_only: bool = False
    """Whether a run with full checkpoints and whole policy versions alone never comes there."""


OPENING, RECOVERING, RANDOM = "while a run is opened", "during recovery", "at a random time"
POINTS = (
    Point(OPENING, "opening "),
    Point("mid-generation", "running after completion"),
    Point("after claim", "running after create data/claims/"),
    Point("segment half written", "running half create data/pool/"),
    Point(
        "between segment and acknowledgement",
        r"running (after create data/pool/|before create data/learner/\d+/admit-)",
    ),
    Point("between consume log and optimiser", r"running (after create data/learner/\d+/consume-|before updates)"),
    Point("between optimiser steps", "running after optimiser"),
    Point("mid-publish", r"running (half create_file data/policy/\S+/weights|\w+ create data/policy/\S+/manifest)"),
    Point("mid-delta", r"running (rebase )?\w+ create data/policy/\S+/delta", increments_only=True),
    Point("metrics line half written", "running half append"),
    Point("metrics.jsonl about to be replaced", "running placing metrics"),
    Point("summary or export about to be replaced", "running placing (summary|export)"),
    Point("checkpoint object half written", r"running half \w+ data/checkpoints/\S+/(?!manifest)"),
    Point(
        "between checkpoint's objects and manifest",
        r"running (rebase )?(before|half) create data/checkpoints/\S+/manifest",
    ),
    Point(
        "mid-rebase",
        r"running rebase (\w+ create_file data/(checkpoints/\S+/tensors|policy/\S+/weights)|\w+ delete)",
        increments_only=True,
    ),
    Point("between primary and warm store", r"running \w+ (create|create_file|delete|delete_folder) warm/", True),
    Point("while old objects are deleted", r"running \w+ (delete|delete_folder) data/"),
    Point(RECOVERING, "recovering "),
)
"""Beside them a run is killed at a random time."""


class _ThawedError(Exception):
    """A process that was frozen in the middle of a write goes on, and writes anew."""


class Tap:
    """Sees the events of this process, and strikes it at the `call`-th (from 1) that the point `name` matches."""

    def __init__(self, phase: str, name: str | None, call: int, told: Path, fault: signal.Signals) -> None:
        """`told` is the file that says at which event the process was struck, by SIGKILL or SIGSTOP."""
        self.phase = phase
        self.counts: Counter[str] = Counter()
        """Events of each point so far."""
        self._name, self._call, self._told, self._fault = name, call, told, fault
        self._lock = threading.Lock()
        self._thread = threading.local()

    def reach(self, event: str) -> None:
        """Tell an event, and be struck if it is the one."""
        if self.due(event):
            self.strike()

    def due(self, event: str) -> bool:
        """Tell an event; whether it is the one at which the process is to be struck."""
        rebase = "rebase " if getattr(self._thread, "rebase", False) else ""
        whole = f"{self.phase} {rebase}{event}"
        with self._lock:
            matching = {point.name for point in POINTS if re.match(point.pattern, whole)}
            self.counts.update(matching)
            found = self._name in matching and self.counts[self._name] == self._call
            if found:
                self._told.write_text(whole)
            return found

    @contextlib.contextmanager
    def rebasing(self, rebase: bool) -> Generator[None]:
        """Mark the events of this thread as parts of a rebase, if it is one."""
        self._thread.rebase = rebase
        try:
            yield
        finally:
            self._thread.rebase = False

    def strike(self) -> None:
        """End this process as `kill -9` does, or freeze it; it goes on here when it is thawed."""
        signal.pthread_kill(threading.get_ident(), self._fault)  # This thread at once, and the others with it.

    def install(self) -> None:
        """Wrap the real functions, for the rest of this process."""
        _tap_writes(self)
        _tap_replacements(self)
        _tap_reads_and_deletes(self)
        _tap_rebases(self)
        _tap_work(self)


def _place(storage: LocalStorage, name: str) -> str:
    warm = any(part.endswith("-warm") for part in storage.root.parts)
    return f"{'warm' if warm else 'data'}/{name}"


def _tap_writes(tap: Tap) -> None:
    real_create_file = LocalStorage.create_file

    def halved(write: WriteFile) -> WriteFile:
        def write_half(path: Path) -> None:
            write(path)
            os.truncate(path, path.stat().st_size // 2)
            tap.strike()
            raise _ThawedError

        return write_half

    def leave_half(storage: LocalStorage, name: str, write: WriteFile) -> None:
        with contextlib.suppress(_ThawedError):
            real_create_file(storage, name, halved(write))

    def writing(operation: str) -> Callable[[LocalStorage, str, bytes], None]:
        real = getattr(LocalStorage, operation)

        def call(storage: LocalStorage, name: str, data: bytes) -> None:
            event = f"{operation} {_place(storage, name)}"
            tap.reach(f"before {event}")
            if tap.due(f"half {event}"):
                leave_half(storage, name, lambda path: path.write_bytes(data))
            real(storage, name, data)
            tap.reach(f"after {event}")

        return call

    def create_file(storage: LocalStorage, name: str, write: WriteFile) -> int:
        event = f"create_file {_place(storage, name)}"
        tap.reach(f"before {event}")
        if tap.due(f"half {event}"):
            leave_half(storage, name, write)
        size = real_create_file(storage, name, write)
        tap.reach(f"after {event}")
        return size

    real_append = metrics._append

    def append(file: FileIO, path: Path, data: bytes) -> None:
        if tap.due("half append"):
            real_append(file, path, data[: len(data) // 2])
            tap.strike()
            data = data[len(data) // 2 :]
        real_append(file, path, data)

    LocalStorage.create, LocalStorage.replace = writing("create"), writing("replace")
    LocalStorage.create_file, metrics._append = create_file, append


def _tap_replacements(tap: Tap) -> None:
    def placing(name: str, last_look: Callable[[], None]) -> Callable[[], None]:
        def look() -> None:
            tap.reach(f"placing {name}")
            last_look()

        return look

    def put(target: Path, data: bytes, last_look: Callable[[], None] = unwatched) -> FileIO:
        return put_file(target, data, placing(target.name, last_look))

    @contextlib.contextmanager
    def replace(target: Path, require_owned: Callable[[], None] = unwatched) -> Generator[Path]:
        with replacing(target, placing(target.name, require_owned)) as unfinished:
            yield unfinished

    metrics.put_file = report.put_file = put
    export.replacing = replace


def _tap_reads_and_deletes(tap: Tap) -> None:
    real_delete_folder = LocalStorage.delete_folder

    def calling(operation: str) -> Callable[[LocalStorage, str], Any]:
        real = getattr(LocalStorage, operation)

        def call(storage: LocalStorage, name: str) -> Any:
            event = f"{operation} {_place(storage, name)}"
            tap.reach(f"before {event}")
            result = real(storage, name)
            tap.reach(f"after {event}")
            return result

        return call

    def delete_folder(storage: LocalStorage, folder: str) -> None:
        path, event = storage.root / folder, f"delete_folder {_place(storage, folder)}"
        tap.reach(f"before {event}")
        if path.exists() and tap.due(f"half {event}"):
            entries = sorted(path.iterdir())
            for entry in entries[: len(entries) // 2]:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            tap.strike()
        real_delete_folder(storage, folder)
        tap.reach(f"after {event}")

    for operation in ("read", "local_file", "delete"):
        setattr(LocalStorage, operation, calling(operation))
    LocalStorage.delete_folder = delete_folder


def _tap_rebases(tap: Tap) -> None:
    real_save, real_publish = CheckpointStore.save, VersionChain.publish

    def save(store: CheckpointStore, checkpoint: Any, created_at: float) -> Any:
        chained = any(store.manifest(name).base is not None for name in store.names())
        with tap.rebasing(checkpoint.base is None and chained):
            return real_save(store, checkpoint, created_at)

    def publish(chain: VersionChain, version: Any, parent: Any, weights: Any) -> Any:
        chained = parent is not None and chain.exists(parent) and chain.manifest(parent).kind == "delta"
        with tap.rebasing(chained):
            return real_publish(chain, version, parent, weights)

    CheckpointStore.save, VersionChain.publish = save, publish


def _tap_work(tap: Tap) -> None:
    real_generate, real_take_step = TransformersEngine.generate, LocalLearner.take_step

    async def generate(engine: TransformersEngine, *arguments: Any) -> AsyncGenerator[Completion]:
        async with contextlib.aclosing(real_generate(engine, *arguments)) as completions:
            async for completion in completions:
                tap.reach("after completion")
                yield completion

    def take_step(learner: LocalLearner, *arguments: Any, **options: Any) -> Any:
        tap.reach("before updates")
        return real_take_step(learner, *arguments, **options)

    TransformersEngine.generate, LocalLearner.take_step = generate, take_step
    register_optimizer_step_post_hook(lambda *_: tap.reach("after optimiser"))
