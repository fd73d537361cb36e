"""Who works on which attempt of a request: the first to create `claims/{request_id}.{attempt}`.

A worker that cannot answer its attempt says why in `failures/{request_id}.{attempt}`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from gyre_core.storage import Storage


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker gave up an attempt; `kind` is the error's class."""

    worker: str
    kind: str
    message: str


def claim(storage: Storage, request_id: str, attempt: int, claimant_token: str) -> bool:
    """Take the attempt; False when somebody else has it.

    `claimant_token` is unique to one process: whoever repeats its own claim has it still.
    """
    assert claimant_token, "without a token a rival's claim looks like one's own"
    try:
        storage.create(f"claims/{request_id}.{attempt}", claimant_token.encode())
    except FileExistsError:
        return False
    return True


def claims(storage: Storage) -> set[str]:
    """All claimed attempts, as `{request_id}.{attempt}`."""
    return {name.removeprefix("claims/") for name in storage.list("claims")}


def claimant(storage: Storage, attempt_name: str) -> str:
    """The token of whoever claimed the attempt `{request_id}.{attempt}`; raises FileNotFoundError."""
    return storage.read(f"claims/{attempt_name}").decode()


def report_failure(storage: Storage, attempt_name: str, failure: Failure) -> None:
    """Say why the attempt was given up; the first report of an attempt stands."""
    name = f"failures/{attempt_name}"
    if not storage.exists(name):
        storage.create(name, json.dumps(asdict(failure)).encode())


def failures(storage: Storage) -> set[str]:
    """All attempts that were given up, as `{request_id}.{attempt}`."""
    return {name.removeprefix("failures/") for name in storage.list("failures")}


def read_failure(storage: Storage, attempt_name: str) -> Failure:
    """Why the attempt was given up; raises FileNotFoundError."""
    return Failure(**json.loads(storage.read(f"failures/{attempt_name}")))
