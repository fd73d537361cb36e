"""Advantages of tokens from a critic's values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def token_rewards(score: float, penalties: NDArray[np.float64]) -> NDArray[np.float64]:
    """A completion's rewards by token, `[time]`: minus each token's penalty, and the score at the last token."""
    rewards = -penalties
    rewards[-1] += score
    return rewards


def generalised_advantages(
    rewards: NDArray[np.float64], values: NDArray[np.floating], last_value: float, gamma: float, decay: float
) -> NDArray[np.float64]:
    """Advantage of each token of one completion, `[time]` in and out.

    A_t is the sum over l of (gamma decay)^l delta_{t+l} with delta_t = r_t + gamma V(s_{t+1}) - V(s_t) (Schulman et
    al., 'High-dimensional continuous control using generalized advantage estimation', 2016, equation 16). `values`
    holds V(s_t) of the state before each token, `last_value` that of the state after the last one: 0 where the
    completion ended.
    """
    advantages = np.empty(len(rewards))
    advantage, following = 0.0, last_value
    # Plain floats: a loop over array elements is several times slower.
    steps = zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True)
    for index, (reward, value) in enumerate(steps, start=1):
        advantage = reward + gamma * following - value + gamma * decay * advantage
        advantages[-index] = advantage
        following = value
    return advantages
