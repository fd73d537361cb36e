"""Which rows may be trained on; the others are dropped by a counted reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from gyre_core.types import Rollout, RolloutGroup

DropReason = Literal[
    "reward_failed",
    "reward_abstained",
    "reward_not_finite",
    "empty_completion",
    "length_mismatch",
    "log_probability_not_finite",
    "log_probability_positive",
    "group_too_small",
]

LOG_PROBABILITY_TOLERANCE = 1e-4
"""A log-probability may exceed 0 by this much, as rounding."""
SMALLEST_GROUP = 2
"""Where a completion is judged against its siblings, a group of one carries no signal."""


@dataclass(frozen=True, slots=True)
class CleanResult:
    """Groups with their clean rows only, and how many rows were dropped for which reason."""

    groups: tuple[RolloutGroup, ...]
    dropped: Mapping[str, int]


def clean(groups: Sequence[RolloutGroup], smallest_group: int = SMALLEST_GROUP) -> CleanResult:
    """Drop the rows that cannot be trained on, then the groups with fewer than `smallest_group` rows left.

    Rows in and rows out plus rows dropped always add up; the order stays.
    """
    if _all_clean(groups, smallest_group):
        return CleanResult(tuple(groups), {})
    kept: list[RolloutGroup] = []
    dropped: Counter[str] = Counter()
    for group in groups:
        reasons = [drop_reason(rollout) for rollout in group.rollouts]
        dropped.update(reason for reason in reasons if reason is not None)
        rollouts = tuple(row for row, reason in zip(group.rollouts, reasons, strict=True) if reason is None)
        if len(rollouts) >= smallest_group:
            kept.append(group if len(rollouts) == len(group.rollouts) else replace(group, rollouts=rollouts))
        elif rollouts:
            dropped["group_too_small"] += len(rollouts)
    return CleanResult(tuple(kept), dict(dropped))


def _all_clean(groups: Sequence[RolloutGroup], smallest_group: int) -> bool:
    """Whether nothing is to be dropped, which is the rule: all rows at once, in a tenth of the time."""
    rows = [rollout for group in groups for rollout in group.rollouts]
    values = [row.completion.log_probabilities for row in rows]
    values += [row.reference_log_probabilities for row in rows if row.reference_log_probabilities is not None]
    lengths = [len(row.completion.token_ids) for row in rows]
    lengths += [len(row.completion.token_ids) for row in rows if row.reference_log_probabilities is not None]
    if not rows or min(lengths) == 0 or lengths != list(map(len, values)):
        return False
    if not all(row.score.status == "scored" and math.isfinite(row.score.reward) for row in rows):
        return False
    joined = np.concatenate(values)
    in_range = bool(np.isfinite(joined).all()) and float(joined.max()) <= LOG_PROBABILITY_TOLERANCE
    return in_range and min(len(group.rollouts) for group in groups) >= smallest_group


def drop_reason(rollout: Rollout) -> DropReason | None:
    """Why the row cannot be trained on; None for a clean one."""
    score, completion = rollout.score, rollout.completion
    if score.status == "failed":
        return "reward_failed"
    if score.status == "abstained":
        return "reward_abstained"
    if not math.isfinite(score.reward):
        return "reward_not_finite"
    if len(completion.token_ids) == 0:
        return "empty_completion"
    for values in (completion.log_probabilities, rollout.reference_log_probabilities):
        if values is None:
            continue
        if len(values) != len(completion.token_ids):
            return "length_mismatch"
        largest = float(values.max())
        if not (math.isfinite(largest) and math.isfinite(values.min())):
            return "log_probability_not_finite"
        if largest > LOG_PROBABILITY_TOLERANCE:
            return "log_probability_positive"
    return None
