"""The simulated world of the elastic benchmark: a pool, a learner that takes from it, workers that come and go.

Many worlds of one trace run side by side, one for each lane of a policy and a seed, in steps of a second: what happens
in a second is arithmetic on arrays of `[lanes]`, and a policy is asked lane by lane, every `INTERVAL` seconds.
The k-th start, drain and notice of a seed take equally long under every policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gyre_core.elastic.signals import Signals

POOL_SAMPLES = 1024.0
REQUEST_SAMPLES = 16
"""Samples of one request: what a worker has in flight."""
INTERVAL = 180
"""Seconds between two decisions."""
LEAST, MOST, FIRST = 4, 24, 8
"""Bounds of the number of workers, and the number at the start."""
START_SECONDS, DRAIN_SECONDS, NOTICE_SECONDS = (30.0, 120.0), (10.0, 60.0), (10.0, 20.0)
"""Bounds of how long a start, a drain, and noticing a death take."""
REVERSAL_SECONDS = 600
DAY = 86_400
AHEAD = 128
"""Seconds that events lie ahead at the most; a power of two above the longest delay."""

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


class Policy(Protocol):
    """Whoever says how many workers there should be."""

    first: int
    """Workers at the start."""

    def wanted(self, signals: Signals) -> int | None:
        """Workers from now on; None to leave them as they are."""
        ...


@dataclass(frozen=True)
class Trace:
    """What a day asks for, by minute. All `[minutes]`."""

    name: str
    demand: Floats
    """Samples per second that the learner takes when it never waits."""
    worker_rate: Floats
    """Samples per second of one worker."""
    mean_length: Floats
    """Tokens of a sample."""
    kill: Counts
    """Workers killed without notice as the minute begins."""

    @property
    def oracle(self) -> Counts:
        """The fewest workers that meet each minute's demand."""
        return np.clip(np.ceil(self.demand / self.worker_rate), LEAST, MOST).astype(np.int64)


def read_trace(file: Path) -> Trace:
    """A trace from CSV; its first column is a row a minute."""
    frame = pd.read_csv(file)
    if not np.array_equal(frame["t_s"], 60 * np.arange(len(frame))):
        raise ValueError(f"{file}: column t_s must rise from 0 in steps of 60; resample the trace to a row a minute.")
    columns = [frame[name].to_numpy(float) for name in ("demand_samples_s", "worker_samples_s", "mean_length_tokens")]
    return Trace(file.stem, *columns, frame["kill"].to_numpy(np.int64))


class Calendar:
    """Events of the coming seconds, counted by second and lane."""

    def __init__(self, lanes: int, bounds: tuple[float, float], seeds: Sequence[int], stream: int) -> None:
        self._counts = np.zeros((AHEAD, lanes), np.int64)
        self._seconds: set[int] = set()
        self._bounds = bounds
        self._random = [np.random.default_rng([seed, stream]) for seed in seeds]

    def enter(self, now: int, lane: int, count: int) -> float:
        """Let `count` events follow `now`, in seconds from the start; their delays' sum in seconds."""
        delays = self._random[lane].uniform(*self._bounds, count)
        for second in now + np.ceil(delays).astype(np.int64):
            self._counts[second % AHEAD, lane] += 1
            self._seconds.add(int(second))
        return float(delays.sum())

    def due(self, second: int) -> Counts | None:
        """Take out what happens as this second begins, by lane; None for nothing."""
        if second not in self._seconds:
            return None
        self._seconds.remove(second)
        row = self._counts[second % AHEAD]
        taken = row.copy()
        row[:] = 0
        return taken


class Meters:
    """What the lanes saw since the last decision, and since the start. All `[lanes]`."""

    def __init__(self, lanes: int) -> None:
        zeros = [np.zeros(lanes) for _ in range(6)]
        self.produced, self.consumed, self.fill, self.stall, self.busy, self.capacity = zeros
        self.total_consumed, self.total_stall, self.total_held, self.peak = (np.zeros(lanes) for _ in range(4))

    def start_interval(self) -> None:
        for meter in (self.produced, self.consumed, self.fill, self.stall, self.busy, self.capacity):
            meter[:] = 0.0


class World:
    """The lanes of one trace."""

    def __init__(self, trace: Trace, policies: Sequence[Policy], seeds: Sequence[int]) -> None:
        lanes = len(policies)
        self.trace, self.policies = trace, policies
        self.pool = np.full(lanes, POOL_SAMPLES / 2)
        self.live = np.array([policy.first for policy in policies])
        self.starting, self.draining, self.lost = (np.zeros(lanes, np.int64) for _ in range(3))
        self.starts = Calendar(lanes, START_SECONDS, seeds, 0)
        self.drains = Calendar(lanes, DRAIN_SECONDS, seeds, 1)
        self.notices = Calendar(lanes, NOTICE_SECONDS, seeds, 2)
        self.meters = Meters(lanes)
        self.start_seconds, self.start_count = np.full(lanes, 75.0), np.ones(lanes)
        self.known_rate = np.full(lanes, np.nan)
        self.actions: list[list[tuple[int, int]]] = [[] for _ in policies]
        self.minutes: list[tuple[Counts, Floats]] = []
        """Workers held, and fill, at the end of each minute."""

    @property
    def held(self) -> Counts:
        """Workers that cost: live, draining, starting, or lost and not replaced yet."""
        return self.live + self.draining + self.starting + self.lost

    def run(self) -> None:
        """Live through the trace."""
        for second in range(60 * len(self.trace.demand)):
            minute = second // 60
            if second % 60 == 0 and self.trace.kill[minute]:
                self._kill(second, int(self.trace.kill[minute]))
            self._happen(second)
            self._flow(self.trace.demand[minute], self.trace.worker_rate[minute], self.trace.mean_length[minute])
            if second % 60 == 59:
                self.minutes.append((self.held, self.pool / POOL_SAMPLES))
            if (second + 1) % INTERVAL == 0:
                self._decide(second + 1, self.trace.mean_length[minute])
                self.meters.start_interval()

    def _kill(self, second: int, count: int) -> None:
        killed = np.minimum(self.live, count)
        self.live -= killed
        self.lost += killed
        for lane in np.flatnonzero(killed):
            self.notices.enter(second, lane, killed[lane])

    def _happen(self, second: int) -> None:
        if (started := self.starts.due(second)) is not None:
            self.live += started
            self.starting -= started
        if (drained := self.drains.due(second)) is not None:
            self.draining -= drained
        if (noticed := self.notices.due(second)) is not None:
            self.lost -= noticed
            for lane in np.flatnonzero(noticed):
                self._start(second, lane, noticed[lane])

    def _start(self, now: int, lane: int, count: int) -> None:
        self.starting[lane] += count
        self.start_seconds[lane] += self.starts.enter(now, lane, count)
        self.start_count[lane] += count

    def _flow(self, demand: float, worker_rate: float, mean_length: float) -> None:
        meters, working = self.meters, self.live + self.draining
        capacity = working * worker_rate
        made = np.minimum(capacity, POOL_SAMPLES - self.pool)
        self.pool += made
        taken = np.minimum(demand, self.pool)
        self.pool -= taken
        missing = 1.0 - taken / demand
        held = self.held
        meters.produced += made * mean_length
        meters.consumed += taken * mean_length
        meters.fill += self.pool
        meters.stall += missing
        meters.busy += made / worker_rate
        meters.capacity += working
        meters.total_consumed += taken
        meters.total_stall += missing
        meters.total_held += held
        np.maximum(meters.peak, held, out=meters.peak)

    def _decide(self, now: int, mean_length: float) -> None:
        meters = self.meters
        np.divide(meters.produced, meters.busy, out=self.known_rate, where=meters.busy > 1.0)
        for lane, policy in enumerate(self.policies):
            wanted = policy.wanted(self._signals(lane, mean_length))
            have = int(self.live[lane] + self.lost[lane] + self.starting[lane])
            if wanted is None or wanted == have:
                continue
            self.actions[lane].append((now, int(np.sign(wanted - have))))
            if wanted > have:
                self._start(now, lane, wanted - have)
            else:
                self._drain(now, lane, have - wanted)

    def _drain(self, now: int, lane: int, count: int) -> None:
        count = min(count, int(self.live[lane]))
        self.live[lane] -= count
        self.draining[lane] += count
        self.drains.enter(now, lane, count)

    def _signals(self, lane: int, mean_length: float) -> Signals:
        meters = self.meters
        open_requests = int((POOL_SAMPLES - self.pool[lane]) // REQUEST_SAMPLES)
        return Signals(
            fill=meters.fill[lane] / INTERVAL / POOL_SAMPLES,
            pool_tokens=POOL_SAMPLES * mean_length,
            produced=meters.produced[lane] / INTERVAL,
            consumed=meters.consumed[lane] / INTERVAL,
            worker_rate=None if np.isnan(self.known_rate[lane]) else self.known_rate[lane],
            queued=max(0, open_requests - int(self.live[lane] + self.draining[lane])),
            learner_wait=meters.stall[lane] / INTERVAL,
            worker_idle=1.0 - meters.busy[lane] / max(meters.capacity[lane], 1.0),
            stale_share=0.0,
            loss_spread_growth=1.0,
            start_seconds=self.start_seconds[lane] / self.start_count[lane],
            live=int(self.live[lane] + self.lost[lane]),
            starting=int(self.starting[lane]),
            draining=int(self.draining[lane]),
        )


class OracleWorld(World):
    """A world whose workers are, without delay and unharmed, the fewest that each minute's demand needs."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace, [_Unasked()], [0])

    def _kill(self, second: int, count: int) -> None:
        pass

    def _happen(self, second: int) -> None:
        needed = self.trace.oracle[second // 60]
        if second and needed != self.live[0]:
            self.actions[0].append((second, int(np.sign(needed - self.live[0]))))
        self.live[:] = needed


class _Unasked:
    """Leaves the workers as they are."""

    first = FIRST

    def wanted(self, signals: Signals) -> int | None:
        return None
