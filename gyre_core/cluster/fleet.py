"""What the owner wants of its rollout workers, as objects that they and the reconcilers read.

`fleet/target.json` holds how many workers the run wants. `fleet/drain/{worker}` asks a worker to finish what it has
and go, `fleet/promote/{worker}` a warm spare to take requests.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from gyre_core.storage import Storage

_TARGET = "fleet/target.json"


@dataclass(frozen=True, slots=True)
class Target:
    """How many workers a run wants: `workers` that take requests and `standby` warm spares.

    `decision` counts the decisions of the run; `reason` tells people why the last one was taken.
    """

    workers: int
    standby: int
    decision: int = 0
    reason: str = ""


def worker_name(slot: int, generation: int) -> str:
    """The name of the `generation`-th worker in a slot."""
    return f"{slot:03d}.{generation}"


def write_target(storage: Storage, target: Target) -> None:
    """Publish what the owner wants from now on."""
    storage.replace(_TARGET, json.dumps(asdict(target)).encode())


def read_target(storage: Storage) -> Target:
    """What the owner wants; raises FileNotFoundError before it said so for the first time."""
    return Target(**json.loads(storage.read(_TARGET)))


def request_drain(storage: Storage, worker: str) -> None:
    """Ask a worker to finish what it has and go; asking again is no error."""
    storage.create(f"fleet/drain/{worker}", b"")


def drain_requested(storage: Storage, worker: str) -> bool:
    """Whether the worker was asked to go."""
    return storage.exists(f"fleet/drain/{worker}")


def promote(storage: Storage, worker: str) -> None:
    """Ask a warm spare to take requests from now on; asking again is no error."""
    storage.create(f"fleet/promote/{worker}", b"")


def promoted(storage: Storage, worker: str) -> bool:
    """Whether the spare was asked to take requests."""
    return storage.exists(f"fleet/promote/{worker}")


def clear_flags(storage: Storage, worker: str) -> None:
    """Forget what was asked of an earlier worker of the same name; a worker does this before it begins."""
    storage.delete(f"fleet/drain/{worker}")
    storage.delete(f"fleet/promote/{worker}")
