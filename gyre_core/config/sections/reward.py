"""The section `reward`: how completions are scored."""

from __future__ import annotations

from typing import Annotated

from gyre_core.config.sections.base import AsTuple, Fraction, NonNegativeInt, Number, PositiveFloat, Section, Text


class RewardFunctionConfig(Section):
    """One reward function, and its weight in the sum."""

    path: Text
    """Import path `package.module:function`, or `FILE.py:function` relative to the configuration file, or a
    built-in: `exact_match`, `partial_match`."""
    weight: Number = 1.0
    """Factor of this function's value in the reward."""


class RewardConfig(Section):
    """How completions are scored."""

    functions: Annotated[tuple[RewardFunctionConfig, ...], AsTuple] = (RewardFunctionConfig(path="partial_match"),)
    """Reward functions in TRL's signature; the reward is their weighted sum. Default: `partial_match`, or none
    besides `models.reward`."""
    timeout: PositiveFloat = 60.0
    """Seconds for one call of a reward function; then its process is killed and its rows fail."""
    retries: NonNegativeInt = 1
    """How often a failed row is scored again before it is dropped."""
    max_failure_share: Fraction = 0.5
    """Share of failed rows in a step above which the run stops."""
