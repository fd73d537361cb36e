"""The owner's side of the queue: which of its requests are answered, and who works on the others.

A lease is a claim whose worker is alive and says that it works on it. It ends when

- the worker is lost, has ended, or its name belongs to another process by now;
- the worker was never heard of, `timeout` seconds after the claim was first seen;
- the worker lives and has not named the attempt for as long: it gave it up without a word.

Whatever ends a lease, and every failure that a worker reports, is answered by announcing the next attempt, unless the
segment came after all. After `attempts` of them the request has failed; a retried step has as many again. Times are the
owner's own, counted from when it first saw a thing, so that nobody's clock has to agree with another's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from gyre_core.cluster.claims import Failure, claimant, claims, failures, read_failure
from gyre_core.cluster.registry import Registry
from gyre_core.cluster.requests import announce_next, announced
from gyre_core.cluster.waiting import Awaited
from gyre_core.experience.segments import segment_exists, segment_ids
from gyre_core.rewards.values import RewardError
from gyre_core.storage import Storage, unwatched
from gyre_core.types import RolloutRequest

logger = logging.getLogger(__name__)

FATAL_KINDS = (RewardError.__name__,)
"""Failures that another attempt would only repeat."""


class RequestFailedError(RuntimeError):
    """A request was tried as often as allowed; carries the last failure."""


@dataclass(slots=True)
class _Lease:
    attempt: int
    first: int
    """The attempt from which the allowed ones are counted."""
    claimed_at: float | None = None
    """When the owner first saw the claim."""
    named_at: float = 0.0
    """When its worker last named it."""
    claimant: str = ""


class Dispatcher:
    """Follows the requests that it is told to, until they are answered or forgotten.

    `tick` reads storage and is called again and again; any method may be called from any thread.
    """

    def __init__(
        self,
        storage: Storage,
        registry: Registry,
        *,
        timeout: float,
        attempts: int,
        require_owned: Callable[[], None] = unwatched,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`require_owned` raises when the run has another owner, whose requests these are now."""
        self._storage = storage
        self._registry = registry
        self._timeout = timeout
        self._attempts = attempts
        self._require_owned = require_owned
        self._clock = clock
        self._requests: dict[str, RolloutRequest] = {}
        self._leases: dict[str, _Lease] = {}
        self._failed: dict[str, Failure] = {}
        self._lock = threading.RLock()
        self.reissued = 0
        """Attempts that were announced in place of lost or failed ones."""
        self.queued = 0
        """Requests that nobody has claimed."""

    @property
    def open(self) -> list[str]:
        """The followed requests that are not answered, oldest first."""
        return sorted(self._leases)

    def follow(self, requests: Iterable[RolloutRequest]) -> None:
        """Begin to follow announced requests; ones that failed get new attempts, and all others may be named again."""
        with self._lock:
            attempts = announced(self._storage)
            done = set(segment_ids(self._storage))
            self._require_owned()
            for request in requests:
                name = request.request_id
                if name in done:
                    self._leases.pop(name, None)
                    self._failed.pop(name, None)
                elif name in self._failed:
                    attempt = announce_next(self._storage, request, attempts[name] + 1, self._require_owned)
                    self._leases[name] = _Lease(attempt, attempt)
                    del self._failed[name]
                elif name not in self._leases:
                    self._leases[name] = _Lease(attempts[name], attempts[name])
                # Last, as one that is known and has no lease counts as answered.
                self._requests[name] = request

    def forget(self, request_ids: Iterable[str]) -> None:
        """Follow these requests no longer."""
        with self._lock:
            for request_id in request_ids:
                for known in (self._requests, self._leases, self._failed):
                    known.pop(request_id, None)

    def answered(self, request_ids: Iterable[str]) -> list[str]:
        """Those of the followed requests that have a segment."""
        return [name for name in request_ids if name in self._requests and name not in self._leases]

    def raise_failure(self, request_ids: Collection[str]) -> None:
        """Raise what made one of these requests fail for good: RewardError or RequestFailedError."""
        for request_id in request_ids:
            failure = self._failed.get(request_id)
            if failure is not None:
                error = RewardError if failure.kind in FATAL_KINDS else RequestFailedError
                told = failure.message if failure.kind in FATAL_KINDS else f"{failure.kind}: {failure.message}"
                raise error(f"request {request_id}, worker {failure.worker}: {told}")

    def whom(self, request_ids: Iterable[str]) -> list[Awaited]:
        """Who is waited for: the workers that hold these requests, or all of them where nobody does."""
        with self._lock:
            leases = [self._leases[name] for name in request_ids if name in self._leases]
        holders = {lease.claimant.partition(" ")[0] for lease in leases}
        workers = self._registry.workers
        named = [worker for worker in workers if worker.beat.worker in holders] or workers
        found = [
            Awaited(
                f"worker {worker.beat.worker} ({worker.phase}, last heartbeat {worker.silent_seconds:.0f} s ago)",
                worker.beat.last_error,
            )
            for worker in named
        ]
        return found or [Awaited("rollout workers, none of which has appeared; see `gyre status` and the work pool")]

    def tick(self) -> None:
        """Look at workers, segments, claims and failures once, and announce anew what was lost."""
        self._registry.observe()
        # Outside the lock, for which the event loop waits when a step is done.
        taken, given_up, answered = claims(self._storage), failures(self._storage), set(segment_ids(self._storage))
        with self._lock:
            self._look(taken, given_up, answered)

    def _look(self, taken: Collection[str], given_up: Collection[str], answered: Collection[str]) -> None:
        for name in self._leases.keys() & answered:
            del self._leases[name]
            self._failed.pop(name, None)
        self.queued = 0
        for request_id, lease in list(self._leases.items()):
            if request_id in self._failed:
                continue
            attempt_name = f"{request_id}.{lease.attempt}"
            if attempt_name in given_up:
                self._answer_failure(request_id, lease, read_failure(self._storage, attempt_name))
            elif attempt_name in taken:
                if (reason := self._broken(attempt_name, lease)) is not None:
                    worker = lease.claimant.partition(" ")[0]
                    self._answer_failure(request_id, lease, Failure(worker, "LostWorker", reason))
            else:
                self.queued += 1

    def _broken(self, attempt_name: str, lease: _Lease) -> str | None:
        """Why the claim is no lease any more; None while it is one."""
        now = self._clock()
        if lease.claimed_at is None:
            lease.claimant = claimant(self._storage, attempt_name)
            lease.claimed_at = lease.named_at = now
        name = lease.claimant.partition(" ")[0]
        worker = self._registry.find(name)
        if worker is not None and worker.beat.token == lease.claimant:
            if worker.phase in ("lost", "ended"):
                return f"worker {name} is {worker.phase}"
            if attempt_name in worker.beat.in_flight:
                lease.named_at = now
            if now - lease.named_at > self._timeout:
                return f"worker {name} lives and does not work on it"
            return None
        if now - lease.claimed_at > self._timeout:
            return f"worker {name} gave no sign of life" if worker is None else f"worker {name} is another process now"
        return None

    def _answer_failure(self, request_id: str, lease: _Lease, failure: Failure) -> None:
        if segment_exists(self._storage, request_id):
            return  # The next tick finds it.
        if failure.kind in FATAL_KINDS or lease.attempt - lease.first + 1 >= self._attempts:
            self._failed[request_id] = failure
            return
        logger.warning(
            "request %s, attempt %d: %s: %s; it is given to another worker",
            request_id,
            lease.attempt,
            failure.kind,
            failure.message.partition("\n")[0],
        )
        attempt = announce_next(self._storage, self._requests[request_id], lease.attempt + 1, self._require_owned)
        self._leases[request_id] = _Lease(attempt, lease.first)
        self.reissued += 1
