"""What the algorithm makes of scores: from the rewards of groups to the numbers that completions are trained by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_core.algorithms.advantages import (
    are_equal,
    for_each_group,
    group_advantages,
    leave_one_out_advantages,
)
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
    def compares_siblings(self) -> bool:
        """Whether a completion is judged against the others of its group, so that equal rewards are no signal."""
        return not self._by_critic

    @property
    def skip_dead_groups(self) -> bool:
        """Whether groups whose advantages are all equal are left out of the update."""
        return self._learning.skip_dead_groups and self.compares_siblings

    def advantages(self, groups: Sequence[RolloutGroup]) -> list[NDArray[np.float32]]:
        """The advantages of clean groups, `[group]` each; with `ppo` their shaped rewards.

        The running statistics of shaping take the groups in, so each is given once.
        """
        shaped = self._shaper.shape(groups)
        if self._by_critic:
            return [rewards.astype(np.float32) for rewards in shaped]
        rewards = [rewards - self._divergence_penalties(group) for group, rewards in zip(groups, shaped, strict=True)]
        return for_each_group(self._compare, rewards)

    def has_signal(self, group: RolloutGroup) -> bool:
        """Whether the rows of a clean group do not all earn the same, penalties included; changes nothing."""
        rewards = group.rewards - self._shaper.penalties(group) - self._divergence_penalties(group)
        return not are_equal(rewards)

    def state(self) -> dict[str, Any]:
        """The running statistics, for JSON."""
        return self._shaper.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self._shaper.load_state(state)

    def metrics(self) -> dict[str, float]:
        """The shaping as it stands, under its names in `metrics.jsonl`."""
        return self._shaper.metrics()

    def _compare(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Advantages over the siblings, `[groups, group]` in and out."""
        if self._learning.advantage == "leave_one_out":
            return leave_one_out_advantages(rewards)
        return group_advantages(rewards, self._learning.scale_advantages)

    def _divergence_penalties(self, group: RolloutGroup) -> NDArray[np.float64] | float:
        """What a KL penalty in the reward takes off each completion."""
        learning = self._learning
        if learning.kl_in == "loss" or learning.kl_coef == 0.0:
            return 0.0
        return learning.kl_coef * sequence_divergences(group)


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
