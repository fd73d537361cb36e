"""How many rollout workers a run should have.

The law
-------
It is asked every `elastic.scale_interval` seconds, sees the readings of that interval (`Signals`) and answers with a
number of workers between `rollout.min_worker` and `rollout.max_worker`. `Law` holds its constants.

1. **Demand.** What the learner would take if it never waited is `consumed / (1 - learner_wait)`. The estimate moves
   half of the way to each reading, and all of the way to one that is more than a fifth away: noise is averaged, a step
   is followed. An interval in which the learner took nothing says nothing.
2. **Rate.** What one worker makes while it is busy is the median over the workers, followed in the same way.
3. **Fill.** The reading is an average over the interval; the fill at its end is half of `produced - consumed` further.
   The fill ahead is where it will be when a worker that is asked for at the next decision makes its first token, with
   the workers that are starting added to `produced` and those that are draining taken off.
4. **Need** is `(demand x margin + correction) / rate` workers. The correction brings the fill within `horizon` to its
   target in the upper part of the band between `pool_low_threshold` and `pool_high_threshold`. The target goes down by
   the stale share of the pool: samples that wait for too long were made too early.
5. **Up.** At once when the fill, or the fill ahead, is below `pool_low_threshold`, or when the learner waited for
   samples; else when two needs in a row exceed what is there by more than the dead band, and then to the smaller of
   them. What is there are the workers that are live or starting: a pending start counts. Never by more than
   `max_growth` of what is there, nor by more workers than there are queued requests.
6. **Start cost.** A start costs `start_seconds` of a worker. The last worker must be needed for as large a share of
   `payback` as that; a fraction of a worker below it is left to the pool.
7. **Down.** When the largest need of the stabilisation window is below what is there by more than the dead band, to
   that need; not while any of the grounds to go up at once holds. Never by more than `max_shrink` of what is there.
8. **Cooling.** After a change nothing changes for `scale_cooling` seconds, save growth at once. What is left is kept
   as a duration, so that a restart neither forgets nor prolongs it.
9. **Smoothness.** While the spread of the losses grows beyond `max_spread_growth`, the number of workers does not grow:
   more samples do not mend a training that falls apart.
10. **On-policy.** At `rollout.max_lag` 0 generation and update take turns, the fill has no meaning, and the learner
    always waits. Then 3 and the correction fall away, nothing happens at once, and the number goes up only while the
    learner waits more than the workers idle, and down only while it waits less: generation takes as long as the update.
11. **Missing signals hold.** With any reading absent, nothing changes, and the estimates stay.
12. **Replacing** a dead worker is no change: the dead one's replacement is starting, and counts.
13. **The learner is the limit** when for `overflow_ticks` decisions in a row the pool was above `pool_high_threshold`
    (on-policy: the workers idled more than the learner waited) although no fewer workers are allowed. Then it says so.

The bounds come last and hold whatever the signals say. Everything is a function of the readings and of the little
state that `Scaler.state` gives: no clock, no randomness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gyre_core.config import GyreConfig
from gyre_core.elastic.signals import Signals

READINGS = (
    "produced",
    "consumed",
    "worker_rate",
    "queued",
    "learner_wait",
    "worker_idle",
    "stale_share",
    "loss_spread_growth",
    "start_seconds",
)
POOL_READINGS = ("fill", "pool_tokens")
POSITIVE_READINGS = ("worker_rate", "pool_tokens")


@dataclass(frozen=True, slots=True)
class Law:
    """The constants of the law. Those of time are seconds, or decisions where they say so."""

    margin: float = 1.05
    """Demand is met with this much to spare: what a minute's demand strays from its mean."""
    follow: float = 0.5
    """Part of the way that an estimate moves to a reading."""
    jump: float = 0.2
    """Distance of a reading, as a share of the estimate, from which the estimate moves all of the way."""
    least_running: float = 0.05
    """The learner's running share counts as this much at the least, or the demand would be nothing but noise."""
    target: float = 0.8
    """Where in the band of fill the target lies: 0 is the low threshold, 1 the high one."""
    horizon: float = 4.0
    """Decisions within which the fill is brought to its target."""
    dead_band: float = 0.1
    """Share of what is there by which the need must differ."""
    growth_ticks: int = 2
    """Decisions in a row that must ask for growth that is not urgent."""
    stabilisation_ticks: int = 3
    """Decisions whose largest need holds against going down."""
    max_growth: float = 2.0
    """Largest growth at once, as a share of what is there."""
    max_shrink: float = 1 / 3
    """Largest shrinking at once, as a share of what is there."""
    payback: float = 1800.0
    """Seconds within which a started worker must have earned its start."""
    max_wait: float = 0.01
    """Learner's wait, as a share of the interval, from which it counts as waiting."""
    max_spread_growth: float = 2.0
    """Growth of the losses' spread beyond which workers are not added; windows of 20 noisy losses differ by half."""
    overflow_ticks: int = 5
    """Decisions in a row with an overflowing pool after which the learner is called the limit."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the law says at one time."""

    wanted: int
    """Workers from now on, starting ones included."""
    direction: Literal["up", "down", "hold"]
    reasons: tuple[str, ...]
    """Why, one sentence each; never empty."""
    numbers: Mapping[str, float]
    """What it was computed from, by name."""
    learner_is_limit: bool
    """Whether the pool has overflowed for long with the fewest workers that are allowed."""


@dataclass(frozen=True, slots=True)
class _View:
    """What the readings come to."""

    have: int
    demand: float
    """Tokens per second that the learner would take."""
    rate: float
    """Tokens per second of a busy worker."""
    need: float
    """Workers, as a fraction."""
    urgent: str
    """Why growth cannot wait; empty when it can."""
    may_grow: bool
    may_shrink: bool
    overflows: bool
    pool: dict[str, float]
    """Fill, fill ahead, and target; empty on-policy."""


class Scaler:
    """The law with what it remembers between decisions."""

    def __init__(self, config: GyreConfig, law: Law | None = None) -> None:
        self._elastic = config.elastic
        self._least, self._most = config.rollout.min_worker, config.rollout.max_worker
        self._on_policy = config.rollout.max_lag == 0
        self._law = law or Law()
        self._cooling = 0.0
        self._demand: float | None = None
        self._rate: float | None = None
        self._needs: list[float] = []
        self._overflows = 0

    def decide(self, signals: Signals, seconds_since_last: float) -> Decision:
        """The number of workers wanted, given the readings since the last decision, `seconds_since_last` ago.

        Of the first decision, and of the first after a restart, it is the seconds since the run went on.
        """
        self._cooling = max(0.0, self._cooling - max(0.0, seconds_since_last))
        have = signals.live + signals.starting
        numbers: dict[str, float] = {"live": signals.live, "starting": signals.starting, "draining": signals.draining}
        readings, absent = self._read(signals)
        if absent:
            wanted, reasons = have, [f"No change without the signal {name}." for name in absent]
        else:
            view = self._see(signals, readings)
            self._remember(view)
            wanted, reasons = self._change(view, readings)
            numbers |= view.pool | {"need": view.need, "demand": view.demand, "rate": view.rate}
        numbers |= readings | {"cooling": self._cooling}
        wanted, reasons = self._within_bounds(wanted, reasons)
        if wanted != have:
            self._cooling = self._elastic.scale_cooling
        limit = self._overflows >= self._law.overflow_ticks and wanted == self._least
        if limit:
            reasons.append(
                f"The learner is the limit: samples have been waiting for it for {self._overflows} decisions, with the "
                f"fewest workers allowed ({self._least})."
            )
        direction = "up" if wanted > have else "down" if wanted < have else "hold"
        return Decision(wanted, direction, tuple(reasons), numbers, limit)

    def state(self) -> dict[str, Any]:
        """What the next decision depends on, as JSON values; `cooling` is the remaining seconds."""
        return {
            "cooling": self._cooling,
            "demand": self._demand,
            "rate": self._rate,
            "needs": list(self._needs),
            "overflows": self._overflows,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._cooling, self._demand, self._rate = state["cooling"], state["demand"], state["rate"]
        self._needs, self._overflows = list(state["needs"]), state["overflows"]

    def _read(self, signals: Signals) -> tuple[dict[str, float], list[str]]:
        """The readings that the law needs, and the names of those that are missing or make no sense."""
        names = READINGS if self._on_policy else (*READINGS, *POOL_READINGS)
        values: dict[str, float | None] = {name: getattr(signals, name) for name in names}
        readings = {
            name: value
            for name, value in values.items()
            if value is not None and math.isfinite(value) and (value > 0 or name not in POSITIVE_READINGS)
        }
        absent = [name for name in names if name not in readings]
        if not absent and readings["consumed"] <= 0 and self._demand is None:
            absent = ["consumed"]
        return readings, absent

    def _see(self, signals: Signals, readings: Mapping[str, float]) -> _View:
        """Demand, rate, fill and need (1 to 4), and what they allow (5, 7, 10)."""
        law, wait, idle = self._law, readings["learner_wait"], readings["worker_idle"]
        have = signals.live + signals.starting
        rate = self._followed(self._rate, readings["worker_rate"])
        demand = self._demand
        if readings["consumed"] > 0:
            demand = self._followed(demand, readings["consumed"] / max(1.0 - wait, law.least_running))
        assert demand is not None, "an interval without consumption is a missing signal before the first with one"
        if self._on_policy:
            need = demand * law.margin / rate
            return _View(have, demand, rate, need, "", wait > idle, wait < idle, wait < idle, {})
        pool = self._pool(signals, readings, demand, rate)
        missing_tokens = (pool["target_fill"] - pool["fill_now"]) * readings["pool_tokens"]
        need = (demand * law.margin + missing_tokens / (law.horizon * self._elastic.scale_interval)) / rate
        urgent = self._urgency(pool, wait)
        overflows = pool["fill_now"] > self._elastic.pool_high_threshold
        return _View(have, demand, rate, need, urgent, True, not urgent, overflows, pool)

    def _pool(self, signals: Signals, readings: Mapping[str, float], demand: float, rate: float) -> dict[str, float]:
        """The fill at the end of the interval, the fill ahead, and the target (3, 4)."""
        elastic, tokens = self._elastic, readings["pool_tokens"]
        balance = (readings["produced"] - readings["consumed"]) * elastic.scale_interval
        now = min(max(readings["fill"] + balance / 2 / tokens, 0.0), max(readings["fill"], 1.0))
        coming = readings["produced"] + (signals.starting - signals.draining) * rate - demand
        ahead = now + coming * (elastic.scale_interval + readings["start_seconds"]) / tokens
        low, high = elastic.pool_low_threshold, elastic.pool_high_threshold
        target = (low + self._law.target * (high - low)) * (1.0 - readings["stale_share"])
        return {"fill_now": now, "fill_ahead": ahead, "target_fill": target}

    def _urgency(self, pool: Mapping[str, float], wait: float) -> str:
        """Why growth cannot wait for a second decision; empty when it can."""
        low = self._elastic.pool_low_threshold
        if pool["fill_now"] < low:
            return f"the pool's fill is {pool['fill_now']:.2f}, below {low:g}"
        if wait > self._law.max_wait:
            return f"the learner waited for samples {wait:.1%} of the time"
        if pool["fill_ahead"] < low:
            return f"the pool's fill, {pool['fill_now']:.2f} now, will be below {low:g} before later help can come"
        return ""

    def _remember(self, view: _View) -> None:
        kept = max(self._law.growth_ticks, self._law.stabilisation_ticks)
        self._demand, self._rate = view.demand, view.rate
        self._needs = [*self._needs, view.need][-kept:]
        self._overflows = self._overflows + 1 if view.overflows and view.have <= self._least else 0

    def _followed(self, estimate: float | None, reading: float) -> float:
        """The estimate after a reading (1)."""
        if estimate is None or abs(reading - estimate) > self._law.jump * estimate:
            return reading
        return estimate + self._law.follow * (reading - estimate)

    def _change(self, view: _View, readings: Mapping[str, float]) -> tuple[int, list[str]]:
        """The number wanted before the bounds, and why (5 to 10)."""
        law, have = self._law, view.have
        band = law.dead_band * have
        recent, window = self._needs[-law.growth_ticks :], self._needs[-law.stabilisation_ticks :]
        lasting_need = min(recent) if len(recent) == law.growth_ticks else -math.inf
        largest_need = max(window) if len(window) == law.stabilisation_ticks else math.inf
        found = (
            f"The learner would take {view.demand:.0f} tokens/s and a worker makes {view.rate:.0f}: "
            f"{view.need:.1f} workers are needed, and {have} are there."
        )
        if view.urgent and view.need > have:
            wanted, reasons = self._grow(have, view.need, readings)
            return wanted, [f"Growth cannot wait: {view.urgent}.", found, *reasons]
        if lasting_need > have + band and view.may_grow:
            wanted, reasons = self._grow(have, lasting_need, readings)
        elif largest_need < have - band and view.may_shrink:
            wanted, reasons = self._shrink(have, largest_need, readings)
        else:
            return have, [found, self._why_held(view, band)]
        if wanted != have and self._cooling > 0:
            return have, [found, f"No change for {self._cooling:.0f} s more after the last one."]
        return wanted, [found, *reasons]

    def _why_held(self, view: _View, band: float) -> str:
        """Why a need changes nothing."""
        if abs(view.need - view.have) <= band:
            return f"No change: the need is within the dead band of {band:.1f} workers."
        if view.need > view.have:
            if not view.may_grow:
                return "No change: the workers idle as much as the learner waits, or more."
            return f"No change: the need must last for {self._law.growth_ticks} decisions to go up."
        if not view.may_shrink:
            return f"No change: {view.urgent or 'the learner waits as much as the workers idle, or more'}."
        return f"No change: the need must stay below for {self._law.stabilisation_ticks} decisions to go down."

    def _grow(self, have: int, need: float, readings: Mapping[str, float]) -> tuple[int, list[str]]:
        """Up to a need, as far as that is allowed and worth its start (5, 6, 9)."""
        growth = readings["loss_spread_growth"]
        if growth > self._law.max_spread_growth:
            return have, [f"No growth while the spread of the losses is {growth:.1f} times what it was."]
        wanted, reasons = max(self._whole(need, readings["start_seconds"]), have), list[str]()
        if wanted == have:
            reasons.append("The pool bridges what is lacking: a start would not earn its cost.")
        most = max(1, math.floor(self._law.max_growth * have))
        if wanted > have + most:
            wanted = have + most
            reasons.append(f"One decision adds {most} at the most.")
        queued = int(readings["queued"])
        if wanted > have + queued:
            wanted = have + queued
            reasons.append(f"New workers would find {queued} queued requests.")
        return wanted, reasons

    def _shrink(self, have: int, need: float, readings: Mapping[str, float]) -> tuple[int, list[str]]:
        """Down to a need, as far as that is allowed (6, 7)."""
        wanted = min(self._whole(need, readings["start_seconds"]), have)
        most = max(1, math.floor(self._law.max_shrink * have))
        if wanted < have - most:
            return have - most, [f"One decision takes away {most} at the most."]
        return wanted, []

    def _whole(self, need: float, start_seconds: float) -> int:
        """The need in whole workers; the last one is left out when its start costs more than its share (6)."""
        return math.ceil(need - min(start_seconds / self._law.payback, 1.0))

    def _within_bounds(self, wanted: int, reasons: list[str]) -> tuple[int, list[str]]:
        bounded = min(max(wanted, self._least), self._most)
        if bounded == wanted:
            return wanted, reasons
        setting = "min_worker" if bounded > wanted else "max_worker"
        return bounded, [*reasons, f"rollout.{setting} is {bounded}."]
