"""What the algorithm makes of scores: from the rewards of groups to the numbers that completions are trained by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_core.algorithms.advantages import group_advantages, leave_one_out_advantages
from gyre_core.config import GyreConfig
from gyre_core.experience.cleaning import SMALLEST_GROUP
from gyre_core.rewards.shaping import RewardShaper
from gyre_core.types import RolloutGroup


class Credit:
    """Shapes the rewards of groups in the order of their admission, and makes advantages of them.

    `ppo` leaves that to the learner's critic, which wants the shaped rewards. Then a group may be of one completion,
    and one whose rewards are all equal is as good as any.
    """

    def __init__(self, config: GyreConfig) -> None:
        self._learning = config.learning
        self._by_critic = config.experiment.algorithm == "ppo"
        self._shaper = RewardShaper(config.reward.shaping, config.rollout.max_tokens)

    @property
    def smallest_group(self) -> int:
        """Clean rows that a group needs at the least."""
        return 1 if self._by_critic else SMALLEST_GROUP

    @property
    def skip_dead_groups(self) -> bool:
        """Whether groups whose advantages are all equal are left out of the update."""
        return self._learning.skip_dead_groups and not self._by_critic

    def advantages(self, groups: Sequence[RolloutGroup]) -> list[NDArray[np.float32]]:
        """The advantages of clean groups, `[group]` each; with `ppo` their shaped rewards.

        The running statistics of shaping take the groups in, so each is given once.
        """
        return [
            self._advantages(group, shaped) for group, shaped in zip(groups, self._shaper.shape(groups), strict=True)
        ]

    def state(self) -> dict[str, Any]:
        """The running statistics, for JSON."""
        return self._shaper.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self._shaper.load_state(state)

    def metrics(self) -> dict[str, float]:
        """The shaping as it stands, under its names in `metrics.jsonl`."""
        return self._shaper.metrics()

    def _advantages(self, group: RolloutGroup, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        learning = self._learning
        if self._by_critic:
            return rewards.astype(np.float32)
        if learning.kl_in == "reward" and learning.kl_coef > 0.0:
            rewards = rewards - learning.kl_coef * sequence_divergences(group)
        if learning.advantage == "leave_one_out":
            return leave_one_out_advantages(rewards)
        return group_advantages(rewards, learning.scale_advantages)


def sequence_divergences(group: RolloutGroup) -> NDArray[np.float64]:
    """Estimates k1 of each completion's KL divergence from the reference, summed over its tokens, `[group]`.

    The sampling policy's log-probabilities stand for the policy's, as they are what the tokens were drawn from.
    """
    divergences: list[float] = []
    for rollout in group.rollouts:
        reference = rollout.reference_log_probabilities
        assert reference is not None, "a KL penalty loads a reference"
        divergences.append(float((rollout.completion.log_probabilities.astype(np.float64) - reference).sum()))
    return np.array(divergences)
