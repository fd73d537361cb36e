"""The owner's view of its workers: who lives, by the owner's own clock, and what each says of itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from gyre_core.cluster.heartbeat import WorkerBeat
from gyre_core.storage import Storage

FORGET_AFTER = 600.0
"""Seconds for which workers that are gone are remembered."""

WorkerPhase = Literal["starting", "standby", "ready", "draining", "lost", "ended"]


@dataclass(frozen=True, slots=True)
class RegisteredWorker:
    """A worker that gave a sign of life: its last words, and for how many seconds it has been silent."""

    beat: WorkerBeat
    phase: WorkerPhase
    silent_seconds: float


class Registry:
    """Reads the heartbeats of a run's workers.

    A worker is lost when its sequence number has not moved for `timeout` seconds, or for `start_grace` while it starts,
    or when somebody reports that it is gone. One that moves again is back, with nothing held against it. Of one that
    ended, or stays lost, the heartbeat is removed after FORGET_AFTER seconds.
    """

    def __init__(
        self,
        storage: Storage,
        timeout: float,
        start_grace: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._timeout = timeout
        self._start_grace = start_grace
        self._clock = clock
        self._beats: dict[str, tuple[WorkerBeat, float]] = {}
        self._gone: dict[str, float] = {}
        self._observed = clock()

    def observe(self) -> None:
        """Read all heartbeats. One that cannot be read counts as not moved."""
        now = self._clock()
        # A pause of the observer itself (it was stopped, its storage was away) is held against nobody.
        pause = now - self._observed
        if pause > self._timeout / 2:
            self._beats = {name: (beat, moved + pause) for name, (beat, moved) in self._beats.items()}
        for name in self._storage.list("workers"):
            try:
                beat = WorkerBeat.from_json(self._storage.read(name))
            except (FileNotFoundError, ValueError):
                continue
            known = self._beats.get(beat.worker)
            if known is None or (beat.token, beat.sequence) != (known[0].token, known[0].sequence):
                self._beats[beat.worker] = beat, now
                if known is not None and beat.token != known[0].token:
                    self._gone.pop(beat.worker, None)
        self._observed = now
        for worker in self.workers:
            if worker.phase in ("lost", "ended") and worker.silent_seconds > FORGET_AFTER:
                self._storage.delete(f"workers/{worker.beat.worker}.json")
                del self._beats[worker.beat.worker]
                self._gone.pop(worker.beat.worker, None)

    def report_gone(self, names: Iterable[str]) -> None:
        """Take these workers for lost from now on, unless they go on giving signs of life."""
        for name in names:
            if name in self._beats:
                self._gone.setdefault(name, self._clock())

    @property
    def workers(self) -> list[RegisteredWorker]:
        """All workers, by name, as they were when `observe` last looked."""
        return [self._judge(beat, self._observed - moved) for _, (beat, moved) in sorted(self._beats.items())]

    def find(self, name: str) -> RegisteredWorker | None:
        """The worker of this name; None when it never gave a sign of life."""
        found = self._beats.get(name)
        return self._judge(found[0], self._observed - found[1]) if found else None

    def count(self, phases: Iterable[WorkerPhase]) -> int:
        """Workers in any of these phases."""
        wanted = set(phases)
        return sum(worker.phase in wanted for worker in self.workers)

    def _judge(self, beat: WorkerBeat, silent: float) -> RegisteredWorker:
        limit = self._start_grace if beat.state == "starting" else self._timeout
        # A heartbeat that was written before the end may be read after the report of it.
        gone = self._observed - silent < self._gone.get(beat.worker, -math.inf) + self._timeout / 2
        phase: WorkerPhase = "lost" if beat.state != "ended" and (gone or silent > limit) else beat.state
        return RegisteredWorker(beat, phase, silent)
