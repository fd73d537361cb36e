"""What becomes of rewards between scoring and the advantages: outliers, normalisation, length, scale. Pure numpy.

The order is that of the steps below, each off by default. The weighted sum of the reward functions is the raw reward.

1. Observe: the raw rewards of a call join the running statistics of their source (the value of the row's column
   `source_column`; rows without it share one source). Rows without a score are neither observed nor shaped.
2. `clip_deviations`: a reward further from the running mean of its source than so many standard deviations is moved
   there, once the source has `CLIP_MIN_COUNT` rewards: before, the statistics mean too little to call one an outlier.
3. `normalize`: with the statistics so far, however few: (reward − mean) / deviation, or reward / deviation. A source
   whose rewards are all equal so far is not divided.
4. `length_penalty`, `overlong_penalty`: taken off, in the units that step 3 leaves.
5. `spread_target`: all times one factor, target over the running spread within groups, from 0.1 to 10. The spread
   forgets: each call weighs `SPREAD_MEMORY` of the one after it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_core.config.sections import ShapingConfig
from gyre_core.types import RolloutGroup

CLIP_MIN_COUNT = 64
"""Rewards of a source that must have been seen before outliers are moved."""
DEVIATION_FLOOR = 1e-6
"""Standard deviation below which rewards count as all equal."""
SPREAD_MEMORY = 0.9
"""Weight of a call's spread relative to the next call's."""
FACTOR_BOUNDS = (0.1, 10.0)
"""Smallest and largest factor of the dynamic scaling."""

Rewards = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """Count, mean and sum of squared distances from the mean of values seen so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation (n - 1); 0 for fewer than two values, and for values that are equal but for rounding."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return deviation if deviation >= DEVIATION_FLOOR else 0.0

    def merge(self, values: Rewards) -> RunningStatistics:
        """The statistics with `values` added (Chan, Golub and LeVeque, 'Algorithms for computing the sample
        variance', 1983, eq. 2.1)."""
        if not len(values):
            return self
        count = self.count + len(values)
        mean = float(values.mean())
        distance = mean - self.mean
        squares = float(np.square(values - mean).sum()) + distance**2 * self.count * len(values) / count
        return RunningStatistics(count, self.mean + distance * len(values) / count, self.squares + squares)


class RewardShaper:
    """Shapes the rewards of one call after another, a request's groups each, and keeps the running statistics.

    `max_tokens` is the length at which the penalties on length are full.
    """

    def __init__(self, config: ShapingConfig, max_tokens: int) -> None:
        self._config = config
        self._max_tokens = max_tokens
        self._changes = config.normalize != "off" or any(
            (config.clip_deviations, config.spread_target, config.overlong_buffer, config.length_penalty)
        )
        self._sources: dict[str, RunningStatistics] = {}
        self._spread_sum = 0.0
        self._spread_weight = 0.0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._factor = 1.0

    def shape(self, groups: Sequence[RolloutGroup]) -> list[Rewards]:
        """Take in the groups' raw rewards and return the shaped ones, `[group]` each; NaN for rows without a score.

        With every step off the raw ones are returned, and no statistics kept.
        """
        raw = [_raw_rewards(group) for group in groups]
        if not self._changes:
            return raw
        sources = [str(group.prompt.columns.get(self._config.source_column)) for group in groups]
        self._observe(sources, raw)
        clipped = [self._clip(self._sources[source], rewards) for source, rewards in zip(sources, raw, strict=True)]
        shaped = [
            self._normalize(self._sources[source], rewards) for source, rewards in zip(sources, clipped, strict=True)
        ]
        penalties = [
            np.where(np.isfinite(rewards), self.penalties(group), np.nan)
            for group, rewards in zip(groups, raw, strict=True)
        ]
        shaped = [rewards - penalty for rewards, penalty in zip(shaped, penalties, strict=True)]
        self._factor = self._find_factor(shaped)
        shaped = [self._factor * rewards for rewards in shaped]
        for before, after, penalty, final in zip(raw, clipped, penalties, shaped, strict=True):
            scored = np.isfinite(before)
            self._sums["scored"] += int(scored.sum())
            self._sums["outliers"] += int((before[scored] != after[scored]).sum())
            self._sums["penalties"] += float(penalty[scored].sum())
            self._sums["shaped"] += float(final[scored].sum())
        return shaped

    def metrics(self) -> dict[str, float]:
        """What the calls since the last one of this did, by metric name; only what is switched on."""
        config, sums = self._config, self._sums
        self._sums = defaultdict(float)
        metrics: dict[str, float] = {}
        if not sums["scored"]:
            return metrics
        if config.clip_deviations:
            metrics["reward/outlier_share"] = sums["outliers"] / sums["scored"]
        if config.length_penalty or config.overlong_buffer:
            metrics["reward/length_penalty"] = sums["penalties"] / sums["scored"]
        if config.spread_target:
            metrics["reward/scale"] = self._factor
        if metrics or config.normalize != "off":
            metrics["reward/shaped_mean"] = sums["shaped"] / sums["scored"]
        return metrics

    def state(self) -> dict[str, Any]:
        """All that later calls and the next metrics depend on, as JSON values."""
        return {
            "sources": {source: list(astuple(statistics)) for source, statistics in self._sources.items()},
            "spread": [self._spread_sum, self._spread_weight],
            "sums": dict(self._sums),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._sources = {source: RunningStatistics(*fields) for source, fields in state["sources"].items()}
        self._spread_sum, self._spread_weight = state["spread"]
        self._sums = defaultdict(float, state.get("sums", {}))

    def _observe(self, sources: Sequence[str], raw: Sequence[Rewards]) -> None:
        for source in dict.fromkeys(sources):
            values = np.concatenate([rewards for name, rewards in zip(sources, raw, strict=True) if name == source])
            before = self._sources.get(source, RunningStatistics())
            self._sources[source] = before.merge(values[np.isfinite(values)])

    def _clip(self, statistics: RunningStatistics, rewards: Rewards) -> Rewards:
        if not self._config.clip_deviations or statistics.count < CLIP_MIN_COUNT:
            return rewards
        reach = self._config.clip_deviations * statistics.deviation
        return np.clip(rewards, statistics.mean - reach, statistics.mean + reach)

    def _normalize(self, statistics: RunningStatistics, rewards: Rewards) -> Rewards:
        if self._config.normalize == "off":
            return rewards
        centre = statistics.mean if self._config.normalize == "standardize" else 0.0
        return (rewards - centre) / (statistics.deviation or 1.0)

    def penalties(self, group: RolloutGroup) -> Rewards:
        """What each completion loses for its length; the second part is eq. 13 of DAPO (Yu et al., 2025)."""
        config = self._config
        lengths = np.array([len(rollout.completion.token_ids) for rollout in group.rollouts], dtype=np.float64)
        penalties = config.length_penalty * lengths / self._max_tokens
        if config.overlong_buffer:
            over = (lengths - (self._max_tokens - config.overlong_buffer)) / config.overlong_buffer
            penalties += config.overlong_penalty * np.clip(over, 0.0, 1.0)
        return penalties

    def _find_factor(self, groups: Sequence[Rewards]) -> float:
        """The factor of the dynamic scaling, after the groups have joined the running spread (pooled, n - 1)."""
        if not self._config.spread_target:
            return 1.0
        scored = [rewards[np.isfinite(rewards)] for rewards in groups]
        squares = sum(float(np.square(rewards - rewards.mean()).sum()) for rewards in scored if len(rewards) > 1)
        self._spread_sum = SPREAD_MEMORY * self._spread_sum + squares
        self._spread_weight = SPREAD_MEMORY * self._spread_weight + sum(max(len(rewards) - 1, 0) for rewards in scored)
        spread = math.sqrt(self._spread_sum / self._spread_weight) if self._spread_weight else 0.0
        if spread < DEVIATION_FLOOR:
            return 1.0
        return float(np.clip(self._config.spread_target / spread, *FACTOR_BOUNDS))


def _raw_rewards(group: RolloutGroup) -> Rewards:
    scores = [rollout.score for rollout in group.rollouts]
    return np.array([score.reward if score.status == "scored" else np.nan for score in scores], dtype=np.float64)
