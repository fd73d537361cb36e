"""Signs of life, both ways: `workers/{name}.json` of each worker and `learner/heartbeat.json` of the run's owner.

A sign of life is a sequence number that moves. Whoever looks judges by its own clock since when the number has stood
still, so that clocks which differ or jump make nobody dead. The numbers are written by a thread of their own, which
neither generation nor scoring can hold up.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gyre_core.storage import Storage

logger = logging.getLogger(__name__)

OWNER = "learner/heartbeat.json"
BEATS_PER_TIMEOUT = 5
"""A heartbeat is written this often in the time after which one is missed."""

WorkerState = Literal["starting", "standby", "ready", "draining", "ended"]


@dataclass(frozen=True, slots=True)
class WorkerBeat:
    """What a worker says of itself. Counters run since it started; times are seconds."""

    worker: str
    token: str
    """Unique to its process; its claims carry it too."""
    flow_run: str
    host: str
    pid: int
    state: WorkerState
    version: str = ""
    """The policy version that its engine holds."""
    in_flight: tuple[str, ...] = ()
    """Claimed attempts, `{request_id}.{attempt}`, that it works on."""
    queued: int = 0
    """Sequences that wait for a place in its engine."""
    tokens: int = 0
    """Completion tokens generated."""
    busy_seconds: float = 0.0
    """Time with a sequence in the engine."""
    ready_seconds: float = 0.0
    """Time since it could take requests; a spare's begins with its promotion."""
    scoring: Mapping[str, float] = field(default_factory=dict[str, float])
    """Rows that it failed to score, and calls that took too long, by metric name."""
    served: int = 0
    failures: int = 0
    last_error: str = ""
    start: Mapping[str, float] = field(default_factory=dict[str, float])
    """Duration of each phase of its start."""
    sequence: int = 0

    @property
    def came_up(self) -> bool:
        """Whether it could ever take requests, or wait as a warm spare."""
        return self.ready_seconds > 0.0 or "weights" in self.start

    @classmethod
    def from_json(cls, data: bytes) -> WorkerBeat:
        """Read what a worker wrote; raises ValueError for anything else."""
        try:
            fields: dict[str, Any] = json.loads(data)
            fields["in_flight"] = tuple(fields["in_flight"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a worker's heartbeat: {error!r}") from error


@dataclass(frozen=True, slots=True)
class OwnerBeat:
    """What the owner says of itself; `ended` once its workers are not needed any more."""

    epoch: int
    step: int
    ended: bool
    sequence: int = 0


class Heart:
    """Writes an object again and again, with a number that grows, until it is stopped.

    A write that fails is told once, and tried again with the next beat.
    """

    def __init__(self, storage: Storage, name: str, timeout: float, read: Callable[[], Mapping[str, Any]]) -> None:
        """`timeout` is the time, in seconds, after which a beat is missed; `read` gives what to write."""
        self._storage = storage
        self._name = name
        self._pause = timeout / BEATS_PER_TIMEOUT
        self._patience = max(1.0, 10 * self._pause)
        self._read = read
        self._sequence = 0
        self._failing = False
        self._writing = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first beat, whose errors are raised, and begin with the others."""
        self._write()
        self._thread.start()

    def beat(self) -> None:
        """Write a beat now, because something changed; errors are told as those of the thread."""
        try:
            self._write()
        except OSError as error:
            if not self._failing:
                logger.warning("the heartbeat %s cannot be written: %s", self._name, error)
            self._failing = True

    def stop(self) -> None:
        """Write the last beat and end; a write that hangs is left behind."""
        self._stopped.set()
        self._thread.join(timeout=self._patience)
        self.beat()

    def _run(self) -> None:
        while not self._stopped.wait(self._pause):
            self.beat()

    def _write(self) -> None:
        if not self._writing.acquire(timeout=self._patience):
            raise TimeoutError(f"an earlier write hangs for {self._patience:.0f} s")
        try:
            self._sequence += 1
            data = json.dumps({**self._read(), "sequence": self._sequence}).encode()
            self._storage.replace(self._name, data)
            self._failing = False
        finally:
            self._writing.release()


def worker_heart(storage: Storage, timeout: float, read: Callable[[], WorkerBeat]) -> Heart:
    """The heart of a worker, named in what it says."""
    return Heart(storage, f"workers/{read().worker}.json", timeout, lambda: asdict(read()))


def owner_heart(storage: Storage, timeout: float, read: Callable[[], OwnerBeat]) -> Heart:
    """The heart of a run's owner."""
    return Heart(storage, OWNER, timeout, lambda: asdict(read()))


class OwnerWatch:
    """A worker's view of the run's owner."""

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._clock = clock
        self._seen: OwnerBeat | None = None
        self._moved = clock()

    def observe(self) -> None:
        """Read the owner's heartbeat; one of an epoch older than what was seen is a zombie's, and ignored.

        One that cannot be read is as good as one that stands still.
        """
        try:
            beat = OwnerBeat(**json.loads(self._storage.read(OWNER)))
        except (OSError, ValueError, TypeError):
            return
        seen = self._seen
        if seen is None or beat.epoch > seen.epoch or (beat.epoch == seen.epoch and beat.sequence != seen.sequence):
            self._seen, self._moved = beat, self._clock()

    @property
    def silent_seconds(self) -> float:
        """How long the owner has given no sign of life, by this process's clock."""
        return self._clock() - self._moved

    @property
    def epoch(self) -> int:
        """The owner's epoch; 0 before it gave a sign of life."""
        return self._seen.epoch if self._seen else 0

    @property
    def ended(self) -> bool:
        """Whether the owner said that it needs no workers any more."""
        return self._seen is not None and self._seen.ended
