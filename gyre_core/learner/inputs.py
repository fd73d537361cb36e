"""Groups as flat token arrays: what the losses need at every completion token, in the order of `packing`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from gyre_core.algorithms.aggregation import aggregation_weights
from gyre_core.algorithms.importance import importance_weights, within_bounds
from gyre_core.algorithms.policy_loss import TokenInputs
from gyre_core.algorithms.values import ValueInputs
from gyre_core.config.sections import LearningConfig
from gyre_core.policy.packing import PromptCompletions
from gyre_core.types import Minibatch, TrainingGroup


@dataclass(frozen=True, slots=True)
class GroupOldPolicy:
    """The policy at the start of the step on one group; all `[tokens]`, its completions one after the other."""

    log_probabilities: NDArray[np.float32]
    importance: NDArray[np.float32]
    trained: NDArray[np.bool_]
    """False for tokens that the losses leave out: those outside the learner's own truncation, outside the bounds of
    `importance_mode` `mask`, or of a completion that `mask_truncated` leaves out."""


@dataclass(frozen=True, slots=True)
class GroupValues:
    """The critic at the start of the step on one group; all `[tokens]`."""

    old: NDArray[np.float32]
    returns: NDArray[np.float32]
    advantages: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OldPolicy:
    """The policy at the start of a step, and with PPO the critic, on each of the step's groups."""

    groups: Mapping[str, GroupOldPolicy]
    """By group id."""
    metrics: Mapping[str, float]
    """How far the learner's policy is from the engine's, where it was measured, and how good the critic is."""
    values: Mapping[str, GroupValues] = field(default_factory=dict[str, GroupValues])
    """By group id; empty without a critic."""


@dataclass(frozen=True, slots=True)
class MinibatchInputs:
    """A minibatch for the learner."""

    sequences: list[PromptCompletions]
    trained: NDArray[np.bool_]
    """`[completion tokens]`: whether the token takes part in the losses."""
    tokens: TokenInputs
    """`[completion tokens]`; the factors of tokens that are not trained on are 0."""
    values: ValueInputs | None
    """The same for the critic; None without one."""


def prompt_completions(groups: Iterable[TrainingGroup]) -> list[PromptCompletions]:
    """The groups' prompts with their completions."""
    return [(group.prompt_ids, group.completions) for group in groups]


def engine_as_old_policy(groups: Sequence[TrainingGroup], config: LearningConfig) -> OldPolicy:
    """The old policy where the engine sampled with the learner's own weights, untruncated: the engine's."""
    if not groups:
        return OldPolicy({}, metrics={})
    behaviour = _behaviour(groups)
    trained = _completions_trained(groups, config)
    return OldPolicy(_old_policies(groups, behaviour, np.ones_like(behaviour), trained), metrics={})


def corrected_old_policy(
    groups: Sequence[TrainingGroup],
    log_probabilities: torch.Tensor,
    truncated: torch.Tensor | None,
    config: LearningConfig,
) -> OldPolicy:
    """The old policy as the learner scored it, with importance weights against the engine's.

    `log_probabilities` and `truncated` are `[tokens]` of all groups, one after the other; `truncated` is None where
    sampling is not truncated.
    """
    engine = torch.from_numpy(_behaviour(groups))
    learner = log_probabilities if truncated is None else truncated
    uncapped, supported = importance_weights(learner, engine)
    if config.importance_mode == "mask":
        counted = supported & within_bounds(uncapped, config.importance_floor, config.importance_cap)
        weights = torch.where(counted, uncapped, 0.0)
    else:
        counted, weights = supported, uncapped.clamp(max=config.importance_cap)
    metrics = {"sampling/masked_share": 1.0 - float(counted.float().mean())}
    if counted.any():
        metrics |= {
            "sampling/importance_sampling_ratio/mean": float(weights[counted].mean()),
            "sampling/importance_sampling_ratio/min": float(weights[counted].min()),
        }
    if supported.any():
        difference = (learner - engine)[supported].abs()
        metrics |= {
            "sampling/importance_sampling_ratio/max": float(uncapped[supported].max()),
            "sampling/sampling_logp_difference/mean": float(difference.mean()),
            "sampling/sampling_logp_difference/max": float(difference.max()),
        }
    trained = counted.numpy() & _completions_trained(groups, config)
    return OldPolicy(_old_policies(groups, log_probabilities.numpy(), weights.numpy(), trained), metrics)


def split_by_group(column: NDArray[np.generic], groups: Sequence[TrainingGroup]) -> list[NDArray[np.generic]]:
    """Each group's part of a flat column, `[tokens]`."""
    return np.split(column, np.cumsum([sum(len(part) for part in group.completions) for group in groups])[:-1])


def minibatch_inputs(
    minibatch: Minibatch, old: OldPolicy, config: LearningConfig, max_tokens: int, device: torch.device
) -> MinibatchInputs:
    """Put a minibatch's groups together; raises ValueError when a KL penalty lacks its reference."""
    groups = minibatch.groups
    olds = [old.groups[group.group_id] for group in groups]
    values = [old.values[group.group_id] for group in groups] if old.values else []
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([len(completion) for completion in completions])
    trained = np.concatenate([part.trained for part in olds])
    sequences = torch.from_numpy(np.repeat(np.arange(len(completions)), lengths))
    factors = torch.zeros(len(trained))
    kept = torch.from_numpy(trained)
    factors[kept] = aggregation_weights(sequences[kept], len(completions), config.loss_aggregation, max_tokens)
    draw_weights = np.repeat([group.weight for group in groups], [len(part.trained) for part in olds])

    def per_token(parts: Iterable[NDArray[np.floating]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(list(parts)).astype(np.float32)).to(device)

    factors = factors.to(device) * per_token([draw_weights])
    if values:
        advantages = per_token(part.advantages for part in values)
    else:
        advantages = per_token([np.repeat(np.concatenate([group.advantages for group in groups]), lengths)])
    tokens = TokenInputs(
        old=per_token(part.log_probabilities for part in olds),
        importance=per_token(part.importance for part in olds),
        advantages=advantages,
        reference=per_token(reference) if (reference := references(groups, minibatch.kl_coef)) else None,
        factors=factors,
        sequences=sequences.to(device),
    )
    value_inputs = (
        ValueInputs(per_token(part.old for part in values), per_token(part.returns for part in values), factors)
        if values
        else None
    )
    return MinibatchInputs(prompt_completions(groups), trained, tokens, value_inputs)


def references(groups: Sequence[TrainingGroup], kl_coef: float) -> list[NDArray[np.float32]] | None:
    """The reference's log-probabilities of all completions; None where they are missing and no penalty needs them.

    Raises ValueError where one does.
    """
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
    return parts


def _behaviour(groups: Sequence[TrainingGroup]) -> NDArray[np.float32]:
    """The engine's log-probabilities, `[tokens]`."""
    return np.concatenate([part for group in groups for part in group.behaviour])


def _completions_trained(groups: Sequence[TrainingGroup], config: LearningConfig) -> NDArray[np.bool_]:
    """Whether each token's completion is trained on, `[tokens]`."""
    truncated = np.concatenate([group.truncated for group in groups])
    kept = ~truncated if config.mask_truncated else np.ones_like(truncated)
    return np.repeat(kept, [len(completion) for group in groups for completion in group.completions])


def _old_policies(groups: Sequence[TrainingGroup], *columns: NDArray[np.generic]) -> dict[str, GroupOldPolicy]:
    """Each group's part of the columns, which are `[tokens]` and in the order of `GroupOldPolicy`."""
    parts = zip(groups, *(split_by_group(column, groups) for column in columns), strict=True)
    return {group.group_id: GroupOldPolicy(*values) for group, *values in parts}
