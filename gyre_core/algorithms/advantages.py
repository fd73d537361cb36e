"""Group-relative advantages: what a completion earned beyond its siblings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDING = 1e-9
"""Rewards that differ by less than this share of the largest differ by float rounding only."""


def group_advantages(rewards: NDArray[np.float64], scale: bool) -> NDArray[np.float32]:
    """Reward minus the mean of the group's scored rows, `[group]` in and out.

    NaN marks a row without a score: it stays out of the baseline and its advantage is 0. With `scale` the result is
    divided by the standard deviation of the scored rows, with n - 1 (Shao et al., 'DeepSeekMath', 2024, section
    4.1.2). A group whose scored rewards are all equal gets exactly 0 everywhere.

    Raises ValueError for a group of one completion, which has no baseline.
    """
    if rewards.size < 2:
        raise ValueError(
            "GRPO compares the completions of a prompt with each other, so a group needs two at least; "
            "set rollout.samples_per_prompt to 2 or more"
        )
    assert not np.isinf(rewards).any(), "an infinite reward must fail where it is scored"
    advantages = np.zeros(rewards.shape, dtype=np.float64)
    scored = ~np.isnan(rewards)
    values = rewards[scored]
    if values.size > 1 and not are_equal(values):
        centred = values - values.mean()
        advantages[scored] = centred / values.std(ddof=1) if scale else centred
    return advantages.astype(np.float32)


def leave_one_out_advantages(rewards: NDArray[np.float64]) -> NDArray[np.float32]:
    """Reward minus the mean of the group's other scored rows, `[group]` in and out.

    It is n / (n - 1) times the reward minus the mean of all n (Ahmadian et al., 'Back to basics: revisiting
    REINFORCE-style optimization for learning from human feedback', 2024, section 3.2). Rows without a score, equal
    rewards and a group of one are treated as in `group_advantages`.
    """
    scored = np.count_nonzero(~np.isnan(rewards))
    return group_advantages(rewards, scale=False) * np.float32(scored / max(scored - 1, 1))


def are_equal(rewards: NDArray[np.float64]) -> bool:
    """Whether the rewards, `[group]` and not empty, are all equal but for rounding, so that the group has no signal."""
    return bool(np.ptp(rewards) <= _ROUNDING * np.abs(rewards).max())
