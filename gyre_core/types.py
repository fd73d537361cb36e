"""The values that travel between Gyre's parts: frozen, and without behaviour.

Shapes: `prompt` is the number of prompt tokens, `time` the number of completion tokens of one
completion, `group` the number of completions of one prompt. Token ids are int32, log-probabilities float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
LogProbabilities = NDArray[np.float32]
FinishReason = Literal["stop", "length"]
RewardStatus = Literal["scored", "abstained", "failed"]


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """A published policy: the `number`-th version along the lineage, published in `epoch`.

    Ordered by epoch, then number. Number 0 is the policy as the run starts.
    """

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch:04d}-{self.number:08d}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data.

    `prompt_id` is stable across runs and resumes; `text` is the prompt as the model sees it (chat template
    applied); `prompt` is the prompt as the data gave it (text or chat messages), which reward functions receive;
    `columns` holds the row's other columns.
    """

    prompt_id: str
    prompt: str | list[dict[str, Any]]
    text: str
    token_ids: Tokens
    """`[prompt]`"""
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How an engine samples; temperature 0 is greedy, `top_p` 1 and `top_k` 0 are off."""

    samples: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0

    @property
    def truncated(self) -> bool:
        """Whether sampling leaves out tokens that the untruncated policy could choose."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One prompt to be completed `SamplingParameters.samples` times; `group_id` is unique in the run."""

    group_id: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sequence from an engine.

    `token_ids` ends with the end-of-sequence token when the model produced one, and `text` leaves it out.
    `log_probabilities` are the engine's own, as it sampled: temperature-scaled and truncated by top-p and top-k.
    """

    group_id: str
    sample_index: int
    token_ids: Tokens
    """`[time]`"""
    log_probabilities: LogProbabilities
    """`[time]`"""
    text: str
    finish_reason: FinishReason
    version: PolicyVersion
    started_at: float
    """Seconds since 1970."""
    finished_at: float


@dataclass(frozen=True, slots=True)
class Score:
    """What the reward functions said of one completion.

    `parts` holds each function's raw value by name (None where it abstained or failed); `reward` is their
    weighted sum, NaN unless `status` is `scored`; `error` says why a row failed.
    """

    parts: Mapping[str, float | None]
    reward: float
    status: RewardStatus
    error: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its score and, when there is a KL penalty, the reference model's log-probabilities
    (untruncated, temperature-scaled)."""

    completion: Completion
    score: Score
    reference_log_probabilities: LogProbabilities | None
    """`[time]`"""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All rollouts of one prompt that were generated together."""

    group_id: str
    prompt: Prompt
    step: int
    version: PolicyVersion
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """The rollouts' rewards, `[group]`; NaN for those without one."""
        return np.array([rollout.score.reward for rollout in self.rollouts], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """The unit of generation: a few groups, claimed, generated, scored and committed together.

    `request_id` is `{step:08d}-{shard:04d}`; its content is a function of seed and step alone.
    """

    request_id: str
    step: int
    version: PolicyVersion
    groups: tuple[GroupRequest, ...]
    sampling: SamplingParameters

    @property
    def sequences(self) -> int:
        """Completions that it asks for."""
        return len(self.groups) * self.sampling.samples


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """A group as the learner sees it: its scored, clean completions only.

    `truncated`, `advantages` and `rewards` are `[group]`; each element of `completions`, `behaviour` and
    `reference` is one completion's `[time]`. `weight` is the importance weight of the draw, apart from the
    policy ratio.
    """

    group_id: str
    prompt_ids: Tokens
    """`[prompt]`"""
    completions: tuple[Tokens, ...]
    behaviour: tuple[LogProbabilities, ...]
    """The engine's log-probabilities, as it sampled."""
    reference: tuple[LogProbabilities, ...] | None
    truncated: NDArray[np.bool_]
    """Which completions `rollout.max_tokens` cut off."""
    rewards: NDArray[np.float64]
    """As the reward functions gave them, weighted and summed."""
    advantages: NDArray[np.float32]
    """What the algorithm makes of the rewards: with GRPO the completions' advantages; with PPO their shaped rewards, of
    which the learner's critic makes advantages of tokens."""
    version: PolicyVersion
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The groups of one optimiser update, with the learning rate and KL coefficient that go with it."""

    groups: tuple[TrainingGroup, ...]
    lr: float
    kl_coef: float
