"""A short trial whether a place keeps the promises of a storage."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gyre_core.storage.base import Storage


def exercise_storage(storage: Storage) -> float:
    """Try the promises that everything rests on; returns the seconds it took. What it wrote is deleted again.

    Raises RuntimeError that names a broken promise, and OSError for a place that cannot be written.
    """
    started = time.monotonic()
    storage.create("object", b"first")
    _expect_refusal(storage, lambda: storage.create("object", b"second"))
    storage.create_file("file", _write_file)
    _expect_refusal(storage, lambda: storage.create_file("file", _write_file))
    if storage.list() != ["file", "object"] or storage.read("object") != b"first":
        raise RuntimeError(f"{storage.url} does not show what was just written; choose another storage.url")
    for name in ("object", "file"):
        storage.delete(name)
    if storage.list():
        raise RuntimeError(f"{storage.url} shows what was just deleted; choose another storage.url")
    return time.monotonic() - started


def _write_file(path: Path) -> None:
    path.write_bytes(b"file")


def _expect_refusal(storage: Storage, write: Callable[[], object]) -> None:
    try:
        write()
    except FileExistsError:
        return
    raise RuntimeError(f"{storage.url} lets a second writer take a name that is taken; choose another storage.url")
