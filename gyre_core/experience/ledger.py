"""Which requests were admitted to the pool: each once ever, along the lineage of the run.

An entry `learner/{epoch}/admit-{request_id}.json` is written before the owner's index changes. A new owner starts
from the ledger in the snapshot that it restored; its predecessor's later entries belong to an abandoned branch, whose
segments are all still there (see `Pool.pin_from`), and are admitted anew. A request of a step below the watermark is
closed: what still arrives for it, from a worker that was frozen, is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from gyre_core.cluster.requests import request_step
from gyre_core.storage import Storage


class AdmissionLedger:
    """The admitted requests at or above the watermark, in memory and in storage."""

    def __init__(self, storage: Storage, epoch: int, watermark: int = 0, admitted: Iterable[str] = ()) -> None:
        self._storage = storage
        self._epoch = epoch
        self._watermark = watermark
        self._admitted = dict.fromkeys(admitted)

    @property
    def watermark(self) -> int:
        """The first step that is not closed."""
        return self._watermark

    @property
    def admitted(self) -> list[str]:
        """The admitted requests at or above the watermark, in the order of admission."""
        return list(self._admitted)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._admitted

    def settled(self, request_id: str) -> bool:
        """Whether the request was admitted, or is closed."""
        return request_id in self or request_step(request_id) < self._watermark

    def record(self, request_id: str, step: int) -> None:
        """Note durably that `step` admits the request; repeating it after a failure is no error."""
        assert not self.settled(request_id), f"request {request_id} is settled"
        entry = json.dumps({"request_id": request_id, "step": step}).encode()
        # An entry that is there was left by this owner's earlier try, which failed before it could be taken in.
        if not self._storage.exists(self._name(request_id)):
            self._storage.create(self._name(request_id), entry)
        self._admitted[request_id] = None

    def close(self, before_step: int) -> None:
        """Settle all requests of steps before `before_step`, admitted or not. The watermark never falls."""
        self._watermark = max(self._watermark, before_step)
        self._admitted = {name: None for name in self._admitted if request_step(name) >= self._watermark}

    def _name(self, request_id: str) -> str:
        return f"learner/{self._epoch:04d}/admit-{request_id}.json"
