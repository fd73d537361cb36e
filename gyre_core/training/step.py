"""What is known of one open step, and the numbers that it leaves behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gyre_core.algorithms.advantages import for_each_group, spreads
from gyre_core.experience.consumption import ConsumeRecord
from gyre_core.experience.segments import CommittedSegment
from gyre_core.experience.snapshot import Snapshot
from gyre_core.learner.inputs import OldPolicy
from gyre_core.monitor.timing import StepTimer
from gyre_core.types import PolicyVersion, Rollout, RolloutGroup, RolloutRequest, TrainingGroup


@dataclass(slots=True)
class OpenStep:
    """A step between its rollout and its commit; `step` counts from 1.

    Each stage fills in its part, and does so again when the step is retried.
    """

    step: int
    timer: StepTimer = field(default_factory=StepTimer)
    requests: tuple[RolloutRequest, ...] = ()
    late: tuple[str, ...] = ()
    """Requests of earlier steps whose segments came in time for this one."""
    committed: dict[str, CommittedSegment] = field(default_factory=dict[str, CommittedSegment])
    """The segments that this process wrote for it, by request id."""
    produced: bool = False
    """Whether its samples are there, as many as it waits for."""
    waited: float = 0.0
    """Seconds that the learner was free for the step before its segments were there."""
    refills: int = 0
    """Rounds of generation for further prompts in place of dead groups."""
    pool_before: Snapshot | None = None
    """The pool before the step's first admission."""
    credit_before: dict[str, Any] = field(default_factory=dict[str, Any])
    """The running statistics of rewards before it."""
    generated: list[RolloutGroup] = field(default_factory=list[RolloutGroup])
    """The groups of the step's segments, rows that were dropped included."""
    clean: list[RolloutGroup] = field(default_factory=list[RolloutGroup])
    """The same without the dropped rows."""
    record: ConsumeRecord | None = None
    update_metrics: dict[str, float] = field(default_factory=dict[str, float])
    policy_changes: dict[str, float] = field(default_factory=dict[str, float])
    """Of each trained group, how far the learner was from the policy that sampled it."""
    update_seconds: float = 0.0
    """How long the learner trained."""
    updating: bool = False
    """Whether the learner has left the state before this step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """A committed step: the version it left, and its metrics, until it is reported without those of time, which
    `timer` still counts."""

    step: int
    version: PolicyVersion
    metrics: Mapping[str, float]
    timer: StepTimer
    samples: int
    completion_tokens: int
    waited: float
    generated: Sequence[RolloutGroup]
    advantages: Mapping[tuple[str, int], float]
    """By group id and sample index, of the step's own completions that were trained on; empty with PPO, whose
    advantages are the tokens'."""
    reported: bool = False
    """Whether `metrics` are complete and logged."""


def rollout_metrics(groups: Sequence[RolloutGroup], compares_siblings: bool = True) -> dict[str, float]:
    """Rewards and lengths of a step's completions, under their names in `metrics.jsonl`.

    The share of groups without a signal belongs to algorithms that compare siblings.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    scored = [rollout for rollout in rollouts if rollout.score.status == "scored"]
    lengths = np.array([len(rollout.completion.token_ids) for rollout in rollouts])
    terminated = np.array([rollout.completion.finish_reason == "stop" for rollout in rollouts])
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1.0 - terminated.mean()),
        "reward/failure_share": _share(rollouts, "failed"),
        "reward/abstained_share": _share(rollouts, "abstained"),
    }
    if terminated.any():
        metrics["completions/mean_terminated_length"] = float(lengths[terminated].mean())
    if scored:
        metrics["reward"] = float(np.mean([rollout.score.reward for rollout in scored]))
        metrics |= _group_metrics(groups)
        if not compares_siblings:
            metrics.pop("frac_reward_zero_std", None)
        metrics |= _part_metrics(scored)
    return metrics


def _share(rollouts: Sequence[Rollout], status: str) -> float:
    return sum(rollout.score.status == status for rollout in rollouts) / len(rollouts)


def _group_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Mean spread of the rewards within a group, and the share of groups without any."""
    rewards = [
        np.array([rollout.score.reward for rollout in group.rollouts if rollout.score.status == "scored"])
        for group in groups
    ]
    found = for_each_group(spreads, [group for group in rewards if len(group) > 1])
    if not found:
        return {}
    return {"reward_std": float(np.mean(found)), "frac_reward_zero_std": float(np.mean(np.equal(found, 0.0)))}


def _part_metrics(scored: Sequence[Rollout]) -> dict[str, float]:
    """Mean and spread of each reward function's raw values."""
    metrics: dict[str, float] = {}
    parts: dict[str, list[float]] = {}
    for rollout in scored:
        for name, value in rollout.score.parts.items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    for name, values in parts.items():
        metrics[f"rewards/{name}/mean"] = float(np.mean(values))
        if len(values) > 1:
            metrics[f"rewards/{name}/std"] = float(np.std(values, ddof=1))
    return metrics


_SUMMED = ("optim/updates", "optim/skipped_updates")


def update_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """A step's metrics from those of its updates: counts are summed, everything else averaged over the updates."""
    names = dict.fromkeys(name for update in updates for name in update)
    metrics: dict[str, float] = {}
    for name in names:
        values = [update[name] for update in updates if name in update]
        metrics[name] = float(np.sum(values)) if name in _SUMMED else float(np.mean(values))
    return metrics


def lag_metrics(groups: Sequence[TrainingGroup], current: PolicyVersion) -> dict[str, float]:
    """How many versions behind `current` the trained groups were generated; empty for no groups."""
    if not groups:
        return {}
    lags = [current.number - group.version.number for group in groups]
    return {"off_policy/mean": float(np.mean(lags)), "off_policy/max": float(max(lags))}


def completion_token_count(groups: Sequence[RolloutGroup]) -> int:
    """Tokens of all completions."""
    return sum(len(rollout.completion.token_ids) for group in groups for rollout in group.rollouts)


def token_count(groups: Sequence[RolloutGroup]) -> int:
    """Prompt and completion tokens of all completions, the prompt counted for each."""
    return sum(
        len(group.rollouts) * len(group.prompt.token_ids)
        + sum(len(rollout.completion.token_ids) for rollout in group.rollouts)
        for group in groups
    )


def trained_advantages(clean: Sequence[RolloutGroup], record: ConsumeRecord) -> dict[tuple[str, int], float]:
    """The advantages that the record gives to these groups' rows, by group id and sample index."""
    recorded = {group.group_id: group.advantages for group in record.groups}
    return {
        (group.group_id, rollout.completion.sample_index): float(advantage)
        for group in clean
        if group.group_id in recorded
        for rollout, advantage in zip(group.rollouts, recorded[group.group_id], strict=True)
    }


def policy_changes(groups: Sequence[TrainingGroup], old: OldPolicy) -> dict[str, float]:
    """Mean |log-ratio| of the learner's policy, at the start of the step, to the sampling one, by group id."""
    return {
        group.group_id: float(
            np.abs(old.groups[group.group_id].log_probabilities - np.concatenate(group.behaviour)).mean()
        )
        for group in groups
    }
