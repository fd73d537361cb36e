"""Who works on which attempt of a request: the first to create `claims/{request_id}.{attempt}`."""

from __future__ import annotations

from gyre_core.storage import Storage


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
