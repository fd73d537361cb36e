"""Which process owns a run: the one that claimed the newest epoch, `learner/epochs/{epoch}`.

Storage cannot refuse the writes of an owner that was superseded without noticing. So owners write under their epoch,
readers ignore epochs that are not on the lineage, and an owner calls `require_current` before it publishes.
"""

from __future__ import annotations

import json
import uuid

from gyre_core.storage import Storage

_FOLDER = "learner/epochs"


class SupersededError(RuntimeError):
    """Another process has taken over the run; this one must stop without publishing anything more."""


def claim_epoch(storage: Storage, owner: str, after: int = 0, *, new: bool = False) -> int:
    """Take over the run: claim the next epoch, counted from 1. `owner` names this process to people.

    `after` is an epoch that is known from elsewhere, of a checkpoint whose run's storage was lost or is another one.
    Raises SupersededError for a `new` run in which another process has claimed one already.
    """
    # The token tells two owners of the same name apart, which would otherwise share an epoch.
    claim = json.dumps({"owner": owner, "token": uuid.uuid4().hex}).encode()
    newest = current_epoch(storage)
    if new and newest:
        require_current(storage, 0)
    epoch = max(newest, after) + 1
    while True:
        try:
            storage.create(_name(epoch), claim)
        except FileExistsError:
            if new:
                require_current(storage, 0)
            epoch += 1
        else:
            return epoch


def current_epoch(storage: Storage) -> int:
    """The newest epoch that was claimed; 0 before the first."""
    return max((int(name.rpartition("/")[2]) for name in storage.list(_FOLDER)), default=0)


def require_current(storage: Storage, epoch: int) -> None:
    """Raise SupersededError, naming the new owner, when `epoch` is no longer the newest."""
    newest = current_epoch(storage)
    if newest != epoch:
        owner = json.loads(storage.read(_name(newest)))["owner"] if newest else "nobody"
        mine = f"epoch {epoch} of this run" if epoch else "this run, not yet begun,"
        raise SupersededError(f"{mine} was superseded by epoch {newest}, owned by {owner}")


def _name(epoch: int) -> str:
    return f"{_FOLDER}/{epoch:04d}"
