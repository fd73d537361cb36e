"""The life of a rollout worker: take open requests, answer them, and go when asked or when nobody owns the run.

1. Requests are taken oldest first, those of the owner's epoch alone, and only while the engine has places free: one
   that could not begin at once is better left to another worker. Nor does a worker generate for more than its share of
   a step, the step's open requests divided by the workers that the run wants: else one worker would take the whole step
   and another the next, and each step would take as long as by one worker. A request that another worker lost has
   waited long enough: for that one any free place will do.
2. Requests of one policy version generate side by side; while one is scored and committed, the next generates.
3. An attempt that fails is reported with its error, and the owner issues another. After `FAILURES_IN_A_ROW` without
   an answer in between, the worker itself is taken for broken and ends with the last error.
4. A worker that is asked to drain finishes what it has and ends. So does one whose owner says that the run has ended,
   or gives no sign of life for `orphan_timeout`.
5. A warm spare does all but take requests, until it is promoted.
6. Storage that cannot be reached is tried again; an outage longer than `orphan_timeout` looks like a dead owner.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from gyre_core.cluster.claims import Failure, claims, failures, report_failure
from gyre_core.cluster.fleet import clear_flags, drain_requested, promoted, read_target
from gyre_core.cluster.heartbeat import OwnerWatch, WorkerBeat, WorkerState, worker_heart
from gyre_core.cluster.requests import read_request, request_step
from gyre_core.config.sections import RolloutConfig
from gyre_core.experience.segments import open_requests
from gyre_core.rollout.serving import ClaimedRequest, Worker, claim_request
from gyre_core.storage import LocalStorage, Storage

logger = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 3
MOST_HELD = 4
"""Requests that wait for their scores or their commit before no other is taken: scoring is then the limit."""
POLL_SECONDS = 0.1
"""Pause before storage is looked at again while there is nothing to take."""
LONGEST_POLL_SECONDS, LONGEST_POLL_SECONDS_REMOTE = 0.4, 2.0
LOOK_SECONDS = 0.5
"""Pause between two looks at the owner and at the own flags."""

OpenParts = Callable[[], Awaitable[tuple[Worker, Mapping[str, float]]]]
"""Makes the parts of the worker, and tells the seconds that each took."""
Answer = Callable[[ClaimedRequest], Awaitable[bool]]
"""Takes a claimed request to its segment; False when somebody else committed first."""


class BrokenWorkerError(RuntimeError):
    """A worker fails at everything it tries; carries the last error."""


class RolloutWorker:
    """A worker and what it has in hand; tasks find it with `RolloutWorker.of` by its name."""

    _open: ClassVar[dict[str, RolloutWorker]] = {}

    def __init__(
        self,
        name: str,
        token: str,
        storage: Storage,
        config: RolloutConfig,
        *,
        flow_run: str = "",
        standby: bool = False,
        start: Mapping[str, float] | None = None,
    ) -> None:
        """`name` is that of its slot and generation, `token` unique to this process and begins with the name.

        `start` holds the seconds that phases of the start took before this.
        """
        self.name = name
        self._token = token
        self._storage = storage
        self._config = config
        self._flow_run = flow_run
        self._standby = standby
        self._start = dict(start or {})
        self._state: WorkerState = "starting"
        self._worker: Worker | None = None
        self._held: dict[str, ClaimedRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._served = self._failures = self._failures_in_a_row = 0
        self._last_error = ""
        self._ready_at = 0.0
        self._first_claim_at: float | None = None
        self._looked = -LOOK_SECONDS
        self._longest_poll = LONGEST_POLL_SECONDS if isinstance(storage, LocalStorage) else LONGEST_POLL_SECONDS_REMOTE
        self._owner = OwnerWatch(storage)
        self._heart = worker_heart(storage, config.heartbeat_timeout, self._beat)

    @classmethod
    def of(cls, name: str) -> RolloutWorker:
        """The running worker of this process with that name."""
        return cls._open[name]

    def held(self, attempt_name: str) -> ClaimedRequest:
        """The claimed request `{request_id}.{attempt}` that this worker works on."""
        return self._held[attempt_name]

    async def run(self, open_parts: OpenParts, answer: Answer) -> str:
        """Start, work until there is a reason to go, and return it.

        Raises what `open_parts` raises, and BrokenWorkerError.
        """
        clear_flags(self._storage, self.name)
        self._heart.start()
        self._open[self.name] = self
        try:
            self._worker, seconds = await open_parts()
            self._start |= seconds
            self._state = "standby" if self._standby else "ready"
            self._ready_at = time.monotonic()
            return await self._work_on(self._worker, answer)
        except Exception as error:
            self._note_error(error)
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._open.pop(self.name, None)
            self._state = "ended"
            await asyncio.to_thread(self._heart.stop)
            if self._worker is not None:
                await self._worker.close()

    async def _work_on(self, worker: Worker, answer: Answer) -> str:
        poll = POLL_SECONDS
        while True:
            ending = await self._reason_to_go()
            if ending and not self._tasks:
                return ending
            taken = not ending and self._has_room(worker) and await self._take(worker, answer)
            self._note_first_token(worker)
            poll = POLL_SECONDS if taken else min(1.2 * poll, self._longest_poll)
            if not taken:
                await self._pause(poll)

    async def _reason_to_go(self) -> str:
        """Why the worker should finish what it has and end; empty for no reason."""
        if self._failures_in_a_row >= FAILURES_IN_A_ROW:
            raise BrokenWorkerError(f"{self._failures_in_a_row} requests failed in a row; the last: {self._last_error}")
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            await asyncio.to_thread(self._look)
            self._looked = time.monotonic()
        if self._owner.ended:
            return "the run has ended"
        if self._owner.silent_seconds > self._config.orphan_timeout:
            return f"the run's owner gave no sign of life for {self._owner.silent_seconds:.0f} s"
        return "it was asked to drain" if self._state == "draining" else ""

    def _look(self) -> None:
        self._owner.observe()
        before = self._state
        try:
            if self._state == "standby" and promoted(self._storage, self.name):
                self._state, self._ready_at = "ready", time.monotonic()
            if drain_requested(self._storage, self.name):
                self._state = "draining"
        except OSError as error:
            self._note_error(error)
        if self._state != before:
            self._heart.beat()

    def _has_room(self, worker: Worker) -> bool:
        """Whether a further request could begin at once."""
        if self._state != "ready" or sum(bool(held.completions) for held in self._held.values()) >= MOST_HELD:
            return False
        if not self._generating():
            return True
        stats = worker.engine.stats()
        # What was claimed a moment ago is not in the engine yet.
        coming = sum(held.request.sequences for held in self._held.values() if not held.begun)
        return stats.queued == 0 and 0 < stats.in_flight < self._config.sequences_in_flight - coming

    def _generating(self) -> Counter[int]:
        """Requests that are not complete, by their step."""
        return Counter(held.request.step for held in self._held.values() if not held.completions)

    async def _take(self, worker: Worker, answer: Answer) -> bool:
        """Claim the next request and begin with it; False when there is none for this worker."""
        try:
            claimed = await self._claim_next(worker)
        except OSError as error:
            self._note_error(error)
            return False
        if claimed is None:
            return False
        self._first_claim_at = self._first_claim_at or time.monotonic()
        self._held[claimed.name] = claimed
        task = asyncio.create_task(self._work(claimed, answer), name=claimed.name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.to_thread(self._heart.beat)
        return True

    async def _claim_next(self, worker: Worker) -> ClaimedRequest | None:
        queue = await asyncio.to_thread(_look_at_queue, self._storage)
        generating = self._generating()
        for request_id, attempt in queue.unclaimed:
            if attempt == 1 and generating[request_step(request_id)] >= queue.share(request_id):
                continue
            try:
                request = await asyncio.to_thread(read_request, self._storage, request_id, attempt)
            except FileNotFoundError:  # The owner closed its step meanwhile.
                continue
            except ValueError as error:  # Another release wrote it, say; the owner is told, and others can be taken.
                await self._report_failure(f"{request_id}.{attempt}", error)
                continue
            if self._owner.epoch not in (0, request.version.epoch):
                continue
            if generating and request.version != worker.engine.version:
                return None
            claimed = await claim_request(worker, request, attempt)
            if claimed is not None:
                return claimed
        return None

    async def _work(self, claimed: ClaimedRequest, answer: Answer) -> None:
        try:
            async with asyncio.timeout(self._config.timeout):
                self._served += await answer(claimed)
            self._failures_in_a_row = 0
        except Exception as error:  # noqa: BLE001 - the owner decides what follows, whatever it was
            self._failures_in_a_row += 1
            await self._report_failure(claimed.name, error)
        finally:
            self._held.pop(claimed.name, None)

    async def _report_failure(self, attempt_name: str, error: Exception) -> None:
        self._failures += 1
        self._note_error(error)
        failure = Failure(self.name, type(error).__name__, str(error) or type(error).__name__)
        try:
            await asyncio.to_thread(report_failure, self._storage, attempt_name, failure)
        except OSError as unreachable:  # The owner finds the claim without its worker.
            self._note_error(unreachable)

    def _note_error(self, error: BaseException) -> None:
        self._last_error = f"{type(error).__name__}: {error}".partition("\n")[0]
        logger.warning("worker %s: %s", self.name, self._last_error)

    def _note_first_token(self, worker: Worker) -> None:
        if "first_token" in self._start or self._first_claim_at is None:
            return
        if worker.engine.stats().busy_seconds > 0.0:
            self._start["first_token"] = time.monotonic() - self._first_claim_at

    async def _pause(self, seconds: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(seconds)

    def _beat(self) -> WorkerBeat:
        beat = WorkerBeat(
            worker=self.name,
            token=self._token,
            flow_run=self._flow_run,
            host=platform.node(),
            pid=os.getpid(),
            state=self._state,
            in_flight=tuple(self._held),
            served=self._served,
            failures=self._failures,
            last_error=self._last_error,
            start=dict(self._start),
        )
        if self._worker is None:
            return beat
        stats = self._worker.engine.stats()
        return replace(
            beat,
            version=str(self._worker.engine.version or ""),
            queued=stats.queued,
            tokens=stats.generated_tokens,
            busy_seconds=stats.busy_seconds,
            scoring=self._worker.scorer.totals(),
            ready_seconds=0.0 if self._state == "standby" else time.monotonic() - self._ready_at,
        )


@dataclass(frozen=True, slots=True)
class _Queue:
    open: Counter[int]
    """Requests without a segment, claimed ones included, by their step."""
    unclaimed: list[tuple[str, int]]
    """Their attempts that nobody has claimed, oldest request first."""
    workers: int
    """Workers that the run wants."""

    def share(self, request_id: str) -> int:
        """How many requests of this one's step a worker generates at the same time."""
        return math.ceil(self.open[request_step(request_id)] / self.workers)


def _look_at_queue(storage: Storage) -> _Queue:
    taken = claims(storage) | failures(storage)
    attempts = open_requests(storage)
    unclaimed = [(name, attempt) for name, attempt in attempts.items() if f"{name}.{attempt}" not in taken]
    return _Queue(Counter(map(request_step, attempts)), unclaimed, read_target(storage).workers)
