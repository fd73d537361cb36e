"""What the pool keeps of a segment beside the index: the rows to train on, once they are decoded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_core.types import RolloutGroup, TrainingGroup


@dataclass(slots=True)
class SegmentState:
    """A segment that the index refers to: `size` in bytes, and per clean group its advantages, `[group]`.

    `groups` are its clean groups, None until they are decoded. `retired_in` is the step that left it without a live
    group.
    """

    request_id: str
    size: int
    advantages: list[NDArray[np.float32]]
    groups: list[TrainingGroup] | None = None
    retired_in: int | None = None


def training_group(group: RolloutGroup, advantages: NDArray[np.float32]) -> TrainingGroup:
    """What the learner needs of a clean group, and its advantages, `[group]`."""
    completions = [rollout.completion for rollout in group.rollouts]
    references = [
        rollout.reference_log_probabilities
        for rollout in group.rollouts
        if rollout.reference_log_probabilities is not None
    ]
    assert len(references) in (0, len(completions)), f"group {group.group_id} has references for some rows only"
    return TrainingGroup(
        group_id=group.group_id,
        prompt_ids=group.prompt.token_ids,
        completions=tuple(completion.token_ids for completion in completions),
        behaviour=tuple(completion.log_probabilities for completion in completions),
        reference=tuple(references) or None,
        truncated=np.array([completion.finish_reason == "length" for completion in completions]),
        rewards=group.rewards,
        advantages=advantages,
        version=group.version,
    )
