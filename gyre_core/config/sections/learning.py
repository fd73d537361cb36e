"""The sections about learning: `learning`, the policy's optimiser and loss, and `critic`, the value function of PPO."""

from __future__ import annotations

from typing import Annotated, Literal

from gyre_core.config.sections.base import (
    AsTuple,
    DecayRate,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class LearningConfig(Section):
    """The optimiser and the loss."""

    lr: PositiveFloat = 1e-6
    """Learning rate at its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Course of the learning rate after the warm-up, over all steps."""
    warmup_steps: NonNegativeInt = 0
    """RL steps over which the learning rate rises from 0."""
    final_lr_fraction: Fraction = 0.1
    """Share of `lr` that a decaying schedule ends at."""
    update_steps: PositiveInt = 1
    """Optimiser updates a step; each takes an equal share of the step's groups."""
    optimizer: Literal["adamw"] = "adamw"
    """Optimiser."""
    betas: Annotated[tuple[DecayRate, DecayRate], AsTuple] = (0.9, 0.99)
    """Decay rates of AdamW's two moments."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty towards the reference model; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL penalty in the loss (Schulman, 'Approximating KL divergence', 2020). The gradient of k1 as
    a loss is zero in expectation; k2's is the true one."""
    clip_low: Fraction = 0.2
    """The policy ratio is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.28
    """The policy ratio is clipped above 1 + clip_high (clip-higher, DAPO)."""
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    """How token losses become one number: mean over all tokens, mean over sequences of their means, or sum over
    the constant sequences x max_tokens."""
    scale_advantages: bool = True
    """Divide a group's advantages by its standard deviation (n - 1)."""
    skip_dead_groups: bool = True
    """Leave groups whose rewards are all equal out of the update; they carry no signal."""
    importance_cap: PositiveFloat = 2.0
    """Upper bound of the importance weight between the engine's policy and the learner's (truncated importance
    sampling)."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Tokens, padding included, in one forward and backward pass; a longer sequence runs alone."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
