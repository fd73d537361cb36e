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
    PositiveFraction,
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
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty goes: a term of the loss, or taken off the reward (with `ppo`, token by token) by its
    estimator k1."""
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
    advantage: Literal["group", "leave_one_out"] = "group"
    """Baseline of a completion under `grpo`: the mean of its group, or that of the others in it (RLOO, Ahmadian et
    al., 2024). `leave_one_out` is not divided by the standard deviation."""
    scale_advantages: bool = True
    """Divide a group's advantages by its standard deviation (n - 1)."""
    skip_dead_groups: bool = True
    """Leave groups whose rewards are all equal out of the update; they carry no signal."""
    policy_ratio: Literal["token", "sequence"] = "token"
    """What is clipped: each token's own ratio of the new policy to the old, or the geometric mean over its completion
    (GSPO, Zheng et al., 2025; clip at about 3e-4 there)."""
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus in the loss."""
    mask_truncated: bool = False
    """Leave completions that were cut off by `rollout.max_tokens` out of the loss (overlong filtering, DAPO)."""
    importance_mode: Literal["truncate", "mask"] = "truncate"
    """Correction from the engine's policy to the learner's: `truncate` caps the weight at `importance_cap`, `mask`
    leaves out tokens whose weight is outside `importance_floor` to `importance_cap`."""
    importance_cap: PositiveFloat = 2.0
    """Upper bound of the importance weight between the engine's policy and the learner's."""
    importance_floor: NonNegativeFloat = 0.5
    """Lower bound of the importance weight when `importance_mode` is `mask`."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Tokens, padding included, in one forward and backward pass; a longer sequence runs alone."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""


class CriticConfig(Section):
    """The value function of `algorithm: ppo`, and the advantages that it gives."""

    trunk: Literal["own", "shared"] = "own"
    """`own`: a model of its own, which starts as a copy of the policy or from `models.critic`; `shared`: a value head
    on the policy's hidden states."""
    lr: PositiveFloat | None = None
    """Learning rate of the critic at its peak, on the schedule of `learning`; null takes `learning.lr`."""
    value_coef: NonNegativeFloat = 0.5
    """Factor of the value loss."""
    value_clip: NonNegativeFloat = 0.2
    """A value's move from the old one counts up to this much in the loss; 0 is off."""
    gamma: PositiveFraction = 1.0
    """Discount a token."""
    gae_lambda: Fraction = 0.95
    """Decay of generalised advantage estimation (Schulman et al., 2016)."""
    whiten_advantages: bool = True
    """Bring the advantages of a step's tokens to mean 0 and standard deviation 1."""
    truncation: Literal["terminal", "bootstrap"] = "terminal"
    """A completion that `rollout.max_tokens` cut off: `terminal` takes it as finished, `bootstrap` adds the value of
    its last state."""
    warmup_steps: NonNegativeInt = 0
    """RL steps at the start in which the critic learns alone."""
