"""Group-relative advantages: what a completion earned beyond its siblings.

Numbers of one group are `[group]`; most functions take several groups of one size as well, `[groups, group]`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDING = 1e-9
"""Rewards that differ by less than this share of the largest differ by float rounding only."""


def for_each_group(function: Callable[[NDArray[Any]], NDArray[Any]], groups: Sequence[NDArray[Any]]) -> list[Any]:
    """What `function` makes of each group, `[group]`, given all groups of one size at once, `[groups, group]`.

    Called for every group by itself, numpy takes ten times as long.
    """
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        places[len(group)].append(place)
    results: dict[int, Any] = {}
    for members in places.values():
        results.update(zip(members, function(np.stack([groups[place] for place in members])), strict=True))
    return [results[place] for place in range(len(groups))]


def group_advantages(rewards: NDArray[np.float64], scale: bool) -> NDArray[np.float32]:
    """Reward minus the mean of the group's scored rows, `[..., group]` in and out.

    NaN marks a row without a score: it stays out of the baseline and its advantage is 0. With `scale` the result is
    divided by the standard deviation of the scored rows, with n - 1 (Shao et al., 'DeepSeekMath', 2024, section
    4.1.2). A group whose scored rewards are all equal gets exactly 0 everywhere.

    Raises ValueError for a group of one completion, which has no baseline.
    """
    if rewards.shape[-1] < 2:
        raise ValueError(
            "GRPO compares the completions of a prompt with each other, so a group needs two at least; "
            "set rollout.samples_per_prompt to 2 or more"
        )
    assert not np.isinf(rewards).any(), "an infinite reward must fail where it is scored"
    scored = ~np.isnan(rewards)
    counts = scored.sum(axis=-1, keepdims=True)
    means = np.where(scored, rewards, 0.0).sum(axis=-1, keepdims=True) / np.maximum(counts, 1)
    values = np.where(scored, rewards, means)
    centred = values - means
    equal = are_equal(values)[..., None]
    if scale:
        variances = np.square(centred).sum(axis=-1, keepdims=True) / np.maximum(counts - 1, 1)
        centred /= np.sqrt(np.where(equal, 1.0, variances))
    return np.where(equal, 0.0, centred).astype(np.float32)


def leave_one_out_advantages(rewards: NDArray[np.float64]) -> NDArray[np.float32]:
    """Reward minus the mean of the group's other scored rows, `[..., group]` in and out.

    It is n / (n - 1) times the reward minus the mean of all n (Ahmadian et al., 'Back to basics: revisiting
    REINFORCE-style optimization for learning from human feedback', 2024, section 3.2). Rows without a score, equal
    rewards and a group of one are treated as in `group_advantages`.
    """
    scored = np.count_nonzero(~np.isnan(rewards), axis=-1, keepdims=True)
    return group_advantages(rewards, scale=False) * (scored / np.maximum(scored - 1, 1)).astype(np.float32)


def are_equal(rewards: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether the rewards of a group, `[..., group]` and not empty, are all equal but for rounding, so that it has no
    signal; `[...]`."""
    return np.asarray(np.ptp(rewards, axis=-1) <= _ROUNDING * np.abs(rewards).max(axis=-1))


def spreads(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard deviation (n - 1) of each group's rewards, `[..., group]` in and `[...]` out.

    Equal rewards have exactly 0, whatever rounding makes of their mean.
    """
    return np.where(are_equal(rewards), 0.0, np.std(rewards, axis=-1, ddof=1))
