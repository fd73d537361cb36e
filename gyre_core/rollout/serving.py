"""How a request becomes a segment: claim, load the policy version, generate, score, commit.

The train process calls this for itself when generation is inline; a rollout worker calls the same.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gyre_core.cluster.claims import claim
from gyre_core.engines.base import Engine
from gyre_core.experience.segments import CommittedSegment, write_segment
from gyre_core.policy.logprobs import ReferenceModel
from gyre_core.rewards.scorer import Scorer
from gyre_core.rollout.gate import VersionGate
from gyre_core.storage import Storage
from gyre_core.types import (
    Completion,
    GroupRequest,
    LogProbabilities,
    Rollout,
    RolloutGroup,
    RolloutRequest,
    SamplingParameters,
)
from gyre_core.weights.chain import VersionChain


@dataclass(frozen=True, slots=True)
class Worker:
    """What serving needs: a token unique to this process, the run's storage, and the parts that do the work."""

    name: str
    storage: Storage
    chain: VersionChain
    engine: Engine
    scorer: Scorer
    reference: ReferenceModel | None
    gate: VersionGate = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gate", VersionGate(self.engine, self.chain))

    async def close(self) -> None:
        """End engine and scorer."""
        await self.engine.close()
        await asyncio.to_thread(self.scorer.close)


@dataclass(slots=True)
class ClaimedRequest:
    """An attempt of a request that this process has claimed, on its way to a segment.

    `generate`, `score` and `commit` are called in this order; times are seconds.
    """

    worker: Worker
    request: RolloutRequest
    attempt: int
    begun: bool = False
    """Whether the engine has been given it."""
    load_seconds: float = 0.0
    generation_seconds: float = 0.0
    reward_seconds: float = 0.0
    completions: dict[str, list[Completion]] = field(default_factory=dict[str, list[Completion]])
    groups: list[RolloutGroup] = field(default_factory=list[RolloutGroup])

    @property
    def name(self) -> str:
        """The attempt's name in storage."""
        return f"{self.request.request_id}.{self.attempt}"

    @property
    def completion_tokens(self) -> int:
        """Tokens of all completions."""
        return sum(len(item.token_ids) for group in self.completions.values() for item in group)

    async def generate(self) -> int:
        """Complete the request's prompts with its policy version; returns the number of completion tokens."""
        async with self.worker.gate.holding(self.request.version) as self.load_seconds:
            started = time.monotonic()
            self.begun = True
            self.completions = await generate(self.worker.engine, self.request.groups, self.request.sampling)
            self.generation_seconds = time.monotonic() - started
        return self.completion_tokens

    async def score(self) -> int:
        """Score the completions; returns their number. Raises RewardError like `Scorer.score`."""
        started = time.monotonic()
        self.groups = await score(self.worker, self.request, self.completions)
        self.reward_seconds = time.monotonic() - started
        return sum(len(group.rollouts) for group in self.groups)

    async def commit(self) -> CommittedSegment | None:
        """Publish the segment; None when another worker committed first, or the owner is done with the request."""
        try:
            return await asyncio.to_thread(write_segment, self.worker.storage, self.request.request_id, self.groups)
        except FileExistsError:
            return None


async def claim_request(worker: Worker, request: RolloutRequest, attempt: int) -> ClaimedRequest | None:
    """Claim the attempt; None when somebody else has it."""
    claimed = await asyncio.to_thread(claim, worker.storage, request.request_id, attempt, worker.name)
    return ClaimedRequest(worker, request, attempt) if claimed else None


async def answer_request(claimed: ClaimedRequest) -> CommittedSegment | None:
    """Take a claimed request all the way; returns what `commit` does.

    Raises whatever the engine, the scorer or the storage raises; the claim stays, so that the owner issues a new
    attempt.
    """
    await claimed.generate()
    await claimed.score()
    return await claimed.commit()


async def generate(
    engine: Engine, groups: Sequence[GroupRequest], sampling: SamplingParameters
) -> dict[str, list[Completion]]:
    """The groups' completions by group id, each group in the order of its samples."""
    completions: defaultdict[str, list[Completion]] = defaultdict(list)
    async for completion in engine.generate(groups, sampling):
        completions[completion.group_id].append(completion)
    for group in completions.values():
        group.sort(key=lambda completion: completion.sample_index)
    return dict(completions)


async def score(
    worker: Worker, request: RolloutRequest, completions: Mapping[str, Sequence[Completion]]
) -> list[RolloutGroup]:
    """The request's groups with their scores, and with reference log-probabilities where there is a reference.

    Raises RewardError like `Scorer.score`.
    """
    prompts = [(group.prompt, completions[group.group_id]) for group in request.groups]
    scores = await worker.scorer.score(prompts, step=request.step, version=request.version)
    references: list[list[LogProbabilities]] | None = None
    if worker.reference is not None:
        sequences = [(prompt.token_ids, [item.token_ids for item in group]) for prompt, group in prompts]
        references = await asyncio.to_thread(worker.reference.score, sequences)
    groups: list[RolloutGroup] = []
    for index, group in enumerate(request.groups):
        rollouts = tuple(
            Rollout(completion, score, references[index][position] if references else None)
            for position, (completion, score) in enumerate(zip(prompts[index][1], scores[index], strict=True))
        )
        groups.append(RolloutGroup(group.group_id, group.prompt, request.step, request.version, rollouts))
    return groups
