"""Which groups are worth drawing, and how to draw by that.

The priority of a group is `signal^alpha × exp(-age / τ)`, with
`signal = (spread + policy change) × (1 + scaled reward) + floor`:

- spread: mean distance of its rows' advantages from their mean;
- policy change: mean |log-ratio| of the learner's policy to the one that sampled, 0 until it is known;
- scaled reward: the group's mean reward, from 0 for the lowest in the pool to 1 for the highest.

Prioritised replay is Schaul et al., 2016 (equation 1, with the same small floor); plain priority is known to hurt in
reinforcement learning of language models, and the decay by age is what mends it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

SIGNAL_FLOOR = 0.01
"""Keeps every live group drawable."""


def mean_deviations(advantages: NDArray[np.float32]) -> Values:
    """Mean distance of the rows' advantages from their group's mean, `[groups, group]` in and `[groups]` out."""
    return np.abs(advantages - advantages.mean(axis=1, keepdims=True)).mean(axis=1)


def signals(spread: Values, policy_change: Values, mean_reward: Values) -> Values:
    """The signal of each group, `[groups]`; the same for rewards on any positive scale and offset."""
    low, high = (mean_reward.min(), mean_reward.max()) if len(mean_reward) else (0.0, 0.0)
    scaled = (mean_reward - low) / (high - low) if high > low else np.zeros_like(mean_reward)
    return (spread + policy_change) * (1.0 + scaled) + SIGNAL_FLOOR


def sample_without_replacement(priorities: Values, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Positions of `count` distinct items, in the order drawn; fewer when fewer have a positive priority.

    Each next item is drawn in proportion to its priority among those left. Drawing from the cumulative sum and
    ignoring repeats does just that; between rounds what is chosen leaves the sum, so that a few heavy items cannot
    make the rejections endless.
    """
    left = priorities.astype(np.float64)
    count = min(count, int(np.count_nonzero(left > 0)))
    chosen = np.empty(0, dtype=np.int64)
    while len(chosen) < count:
        cumulative = np.cumsum(left)
        points = rng.random(2 * (count - len(chosen))) * cumulative[-1]
        points = np.minimum(points, np.nextafter(cumulative[-1], 0.0))
        drawn = np.searchsorted(cumulative, points, side="right")
        _, first = np.unique(drawn, return_index=True)
        fresh = drawn[np.sort(first)][: count - len(chosen)]
        left[fresh] = 0.0
        chosen = np.concatenate([chosen, fresh])
    return chosen


def importance_weights(weighting: Values) -> Values:
    """Weights that undo the preference for `weighting` in the mean of a draw, scaled to at most 1, `[drawn]`.

    Schaul et al., 2016, section 3.4, with full correction. Given signal^alpha and not the whole priority, they leave
    the decay by age in force: old groups are meant to count less. Kept apart from the policy ratio.
    """
    return weighting.min() / weighting if len(weighting) else weighting.copy()


def effective_sampling_rate(weights: Values) -> float:
    """Effective sample size of a draw over its size, (Σw)² / (n Σw²) (Kish, 1965); 1 for equal weights or none."""
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())) if len(weights) else 1.0
