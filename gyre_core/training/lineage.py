"""Which checkpoints a run may go on from: those of its lineage.

An owner notes which checkpoint it begins from before it does anything else. What earlier owners wrote beyond that one
belongs to a branch that was given up: the segments that it refers to may have been made anew since. Such a checkpoint
can come late, from an owner that was frozen while it wrote it. Notes of owners that nobody went on from do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gyre_core.checkpoint.manifest import checkpoint_order
from gyre_core.storage import Storage


def note_beginning(storage: Storage, epoch: int, checkpoint: str | None) -> None:
    """Note the name of the checkpoint that the owner of `epoch` begins from; None for none."""
    storage.create(_name(epoch), (checkpoint or "").encode())


def on_lineage(storage: Storage, checkpoints: Iterable[str]) -> list[str]:
    """Those of the checkpoints, by name, that are not on a branch that was given up, in their order."""
    given_up: list[tuple[tuple[int, int], tuple[int, int]]] = []
    newest = (math.inf, math.inf)
    for epoch in sorted(_noted(storage), reverse=True):
        if (epoch, 0) > newest:
            continue
        name = storage.read(_name(epoch)).decode()
        begun = checkpoint_order(name) if name else (0, 0)
        given_up.append((begun, (epoch, 0)))
        newest = begun
    return [name for name in checkpoints if not any(start < checkpoint_order(name) < end for start, end in given_up)]


def _noted(storage: Storage) -> list[int]:
    epochs = (folder.rpartition("/")[2] for folder in storage.folders("learner"))
    return [int(epoch) for epoch in epochs if epoch.isdecimal() and storage.exists(_name(int(epoch)))]


def _name(epoch: int) -> str:
    return f"learner/{epoch:04d}/begins-from"
