"""Groups as flat token arrays: what the loss needs at every completion token, in the order of `packing`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gyre_core.algorithms.grpo import TokenInputs
from gyre_core.algorithms.losses import aggregation_weights, importance_weights
from gyre_core.config.sections import LearningConfig
from gyre_core.policy.packing import PromptCompletions
from gyre_core.types import Minibatch, TrainingGroup


@dataclass(frozen=True, slots=True)
class GroupOldPolicy:
    """The policy at the start of the step on one group; all `[tokens]`, its completions one after the other."""

    log_probabilities: NDArray[np.float32]
    importance: NDArray[np.float32]
    supported: NDArray[np.bool_]
    """False for tokens that the learner's own truncation leaves out; they are not trained on."""


@dataclass(frozen=True, slots=True)
class OldPolicy:
    """The policy at the start of a step, on each of the step's groups."""

    groups: Mapping[str, GroupOldPolicy]
    """By group id."""
    metrics: Mapping[str, float]
    """How far the learner's policy is from the engine's; empty where it was not measured."""


@dataclass(frozen=True, slots=True)
class MinibatchInputs:
    """A minibatch for the learner."""

    sequences: list[PromptCompletions]
    trained: NDArray[np.bool_]
    """`[completion tokens]`: whether the token takes part in the loss."""
    tokens: TokenInputs
    """`[completion tokens]`; the factors of tokens that are not trained on are 0."""


def prompt_completions(groups: Iterable[TrainingGroup]) -> list[PromptCompletions]:
    """The groups' prompts with their completions."""
    return [(group.prompt_ids, group.completions) for group in groups]


def engine_as_old_policy(groups: Sequence[TrainingGroup]) -> OldPolicy:
    """The old policy where the engine sampled with the learner's own weights, untruncated: the engine's."""
    return OldPolicy(
        {
            group.group_id: GroupOldPolicy(behaviour, np.ones_like(behaviour), np.ones(behaviour.shape, dtype=np.bool_))
            for group in groups
            for behaviour in (np.concatenate(group.behaviour),)
        },
        metrics={},
    )


def corrected_old_policy(
    groups: Sequence[TrainingGroup], log_probabilities: torch.Tensor, truncated: torch.Tensor | None, cap: float
) -> OldPolicy:
    """The old policy as the learner scored it, with importance weights against the engine's.

    `log_probabilities` and `truncated` are `[tokens]` of all groups, one after the other; `truncated` is None where
    sampling is not truncated.
    """
    engine = torch.from_numpy(np.concatenate([part for group in groups for part in group.behaviour]))
    learner = log_probabilities if truncated is None else truncated
    weights, supported = importance_weights(learner, engine, cap)
    uncapped, _ = importance_weights(learner, engine, torch.inf)
    metrics = {"sampling/masked_share": 1.0 - float(supported.float().mean())}
    if supported.any():
        difference = (learner - engine)[supported].abs()
        metrics |= {
            "sampling/importance_sampling_ratio/mean": float(weights[supported].mean()),
            "sampling/importance_sampling_ratio/min": float(weights[supported].min()),
            "sampling/importance_sampling_ratio/max": float(uncapped[supported].max()),
            "sampling/sampling_logp_difference/mean": float(difference.mean()),
            "sampling/sampling_logp_difference/max": float(difference.max()),
        }
    ends = np.cumsum([sum(len(part) for part in group.completions) for group in groups])[:-1]
    columns = (np.split(column.numpy(), ends) for column in (log_probabilities, weights, supported))
    parts = zip(groups, *columns, strict=True)
    return OldPolicy({group.group_id: GroupOldPolicy(*values) for group, *values in parts}, metrics)


def minibatch_inputs(
    minibatch: Minibatch, old: OldPolicy, config: LearningConfig, max_tokens: int, device: torch.device
) -> MinibatchInputs:
    """Put a minibatch's groups together; raises ValueError when a KL penalty lacks its reference."""
    groups = minibatch.groups
    olds = [old.groups[group.group_id] for group in groups]
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([len(completion) for completion in completions])
    trained = np.concatenate([part.supported for part in olds])
    sequences = torch.from_numpy(np.repeat(np.arange(len(completions)), lengths))
    factors = torch.zeros(len(trained))
    kept = torch.from_numpy(trained)
    factors[kept] = aggregation_weights(sequences[kept], len(completions), config.loss_aggregation, max_tokens)
    draw_weights = np.repeat([group.weight for group in groups], [len(part.supported) for part in olds])
    reference = _reference(groups, minibatch.kl_coef)

    def per_token(values: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(device)

    tokens = TokenInputs(
        old=per_token(np.concatenate([part.log_probabilities for part in olds])),
        importance=per_token(np.concatenate([part.importance for part in olds])),
        advantages=per_token(np.repeat(np.concatenate([group.advantages for group in groups]), lengths)),
        reference=None if reference is None else per_token(reference),
        factors=factors.to(device) * per_token(draw_weights),
    )
    return MinibatchInputs(prompt_completions(groups), trained, tokens)


def _reference(groups: Sequence[TrainingGroup], kl_coef: float) -> NDArray[np.float32] | None:
    parts: list[NDArray[np.float32]] = []
    for group in groups:
        if group.reference is None:
            if kl_coef > 0.0:
                raise ValueError(
                    f"group {group.group_id} carries no reference log-probabilities, but the KL coefficient is "
                    f"{kl_coef:g}; generate with learning.kl_coef above 0"
                )
            return None
        parts.extend(group.reference)
    return np.concatenate(parts)
