"""The section `experience`: the pool of generated samples."""

from __future__ import annotations

from typing import Literal

from gyre_core.config.sections.base import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
)


class ExperienceConfig(Section):
    """The pool of generated samples."""

    buffer_size: PositiveInt = 4096
    """Samples that the pool holds at the most; the oldest groups leave first."""
    time_window: PositiveFloat = 3600.0
    """Age in seconds at which a sample is dropped; priority decays on the way."""
    priority_alpha: NonNegativeFloat = 0.6
    """Exponent of the priority; 0 draws evenly."""
    max_uses: PositiveInt = 1
    """How often a group may be trained on. A step draws as many groups as it asks for, so that with 2 and more those
    that are drawn again leave fresh ones behind, which grow old: for data that is dear."""
    fresh_share: Fraction = 0.5
    """Share of a draw, at the least, that was never trained on, as long as there is that much."""
    max_prompt_share: PositiveFraction = 0.25
    """Share of a minibatch, at the most, that one prompt may take (always one group)."""
    clock: Literal["steps", "seconds"] = "steps"
    """What ages run on: `steps` counts steps x `step_seconds` and repeats exactly, `seconds` counts active training
    time. Default: `steps` inline, `seconds` with workers."""
    step_seconds: PositiveFloat = 60.0
    """Seconds that one step counts for when `clock` is `steps`."""
