"""From outcomes to scores: a failure never becomes a number, and an abstention never becomes a failure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gyre_core.rewards.values import Outcome, RewardError
from gyre_core.types import Score


def combine(weights: Mapping[str, float], outcomes: Mapping[str, Outcome]) -> Score:
    """The score of one row from each function's outcome.

    The reward is the weighted sum over the functions that did not abstain. A row fails when any function failed on
    it, and is abstained from when all abstained.
    """
    parts: dict[str, float | None] = {}
    errors: list[str] = []
    scored: list[float] = []
    for name, outcome in outcomes.items():
        parts[name] = None if isinstance(outcome, str) else outcome
        if isinstance(outcome, str):
            errors.append(outcome)
        elif outcome is not None:
            scored.append(weights[name] * outcome)
    if errors:
        return Score(parts, math.nan, "failed", "; ".join(errors))
    return Score(parts, sum(scored), "scored") if scored else Score(parts, math.nan, "abstained")


def failure_share(scores: Sequence[Score]) -> float:
    """Share of the rows that failed; 0 for no rows."""
    return sum(score.status == "failed" for score in scores) / len(scores) if scores else 0.0


def check_failure_share(scores: Sequence[Score], limit: float, step: int) -> None:
    """Raise RewardError, with the first failure's text, when more than `limit` of a step's rows failed,
    or all of them."""
    share = failure_share(scores)
    if share > limit or share == 1.0:
        first = next(score.error for score in scores if score.status == "failed")
        raise RewardError(
            f"step {step}: {share:.0%} of {len(scores)} completions could not be scored, and reward.max_failure_share "
            f"is {limit:.0%}; the first failure: {first}"
        )
