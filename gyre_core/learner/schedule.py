"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from gyre_core.config.sections import LearningConfig


def learning_rate(step: int, total_steps: int, config: LearningConfig) -> float:
    """Learning rate of RL step `step`, counted from 0, of a run of `total_steps`.

    It rises in equal parts over `warmup_steps`, reaching `lr` in the last of them, then follows `schedule` so that the
    run's last step has exactly `final_lr_fraction` of `lr` (a constant schedule stays at `lr`).
    """
    assert 0 <= step < total_steps, f"step {step} is not one of {total_steps}"
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decaying_steps = max(total_steps - 1 - config.warmup_steps, 1)
    progress = (step - config.warmup_steps) / decaying_steps
    remaining = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_fraction + (1.0 - config.final_lr_fraction) * remaining)
