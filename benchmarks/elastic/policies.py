"""Who decides in the elastic benchmark: Gyre's own scaler, fixed numbers, and the law of Kubernetes' autoscaler."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from elastic.world import FIRST, INTERVAL, LEAST, MOST, POOL_SAMPLES, Policy

from gyre_core.config import GyreConfig
from gyre_core.elastic.scaler import Law, Scaler
from gyre_core.elastic.signals import Signals

COOLING = 300.0
WITHOUT_HYSTERESIS = Law(dead_band=0.0, growth_ticks=1, stabilisation_ticks=1)


class Fixed:
    """Always the same number."""

    def __init__(self, count: int) -> None:
        self.first = count

    def wanted(self, signals: Signals) -> int | None:
        """As it is."""
        return None


def configuration(cooling: float = COOLING) -> GyreConfig:
    """The defaults, with the bounds of the simulated world."""
    rollout = {"min_worker": LEAST, "max_worker": MOST, "worker_count": FIRST}
    elastic = {"enabled": True, "scale_interval": INTERVAL, "scale_cooling": cooling}
    return GyreConfig.model_validate({"rollout": rollout, "elastic": elastic})


def fill_band() -> tuple[float, float]:
    """The thresholds of fill that the scaler keeps to."""
    elastic = configuration().elastic
    return elastic.pool_low_threshold, elastic.pool_high_threshold


class Gyre:
    """The production scaler."""

    first = FIRST

    def __init__(self, law: Law, cooling: float) -> None:
        self._scaler = Scaler(configuration(cooling), law)

    def wanted(self, signals: Signals) -> int | None:
        """What the scaler says."""
        return self._scaler.decide(signals, INTERVAL).wanted


class HorizontalPodAutoscaler:
    """Kubernetes' law: `ceil(replicas x metric / target)`, nothing within the tolerance, the largest of the
    recommendations of a while before going down.

    Its metric must rise with the load, and fill falls with it. So the metric is emptiness, `1 - fill`: the ratio is 1
    at the target fill of 0.5, 2 at an empty pool, 0 at a full one. `inverse` takes the inverse of the fill instead, so
    that the ratio is 0.5 at a full pool and has no bound at an empty one. Of the readings it sees fill alone.
    """

    first = FIRST
    target_fill, tolerance, stabilisation = 0.5, 0.1, 300.0

    def __init__(self, inverse: bool = False) -> None:
        self._inverse = inverse
        self._recent: deque[int] = deque(maxlen=1 + math.floor(self.stabilisation / INTERVAL))

    def wanted(self, signals: Signals) -> int | None:
        """The recommendation, stabilised on the way down."""
        have = signals.live + signals.starting
        assert signals.fill is not None
        ratio = (1.0 - signals.fill) / (1.0 - self.target_fill)
        if self._inverse:
            ratio = self.target_fill / max(signals.fill, 1.0 / POOL_SAMPLES)
        count = have if abs(ratio - 1.0) <= self.tolerance else math.ceil(have * ratio)
        self._recent.append(min(max(count, LEAST), MOST))
        return min(have, max(self._recent)) if self._recent[-1] < have else self._recent[-1]


def make_policy(name: str) -> Callable[[], Policy]:
    """How to make the policy of that name for one lane."""
    if name == "gyre":
        return lambda: Gyre(Law(), COOLING)
    if name == "gyre-without-hysteresis":
        return lambda: Gyre(WITHOUT_HYSTERESIS, 0.0)
    if name == "hpa":
        return HorizontalPodAutoscaler
    if name == "hpa-inverse":
        return lambda: HorizontalPodAutoscaler(inverse=True)
    kind, _, count = name.partition(":")
    if kind == "fixed" and count.isdecimal() and int(count) > 0:
        return lambda: Fixed(int(count))
    names = "gyre, gyre-without-hysteresis, hpa, hpa-inverse, oracle and fixed:N"
    raise ValueError(f"--policy {name} is none of {names}; name one of these.")
