"""How a request becomes a segment: claim, load the policy version, generate, score, commit.

The train process calls this for itself when generation is inline; a rollout worker calls the same.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gyre_core.cluster.claims import claim
from gyre_core.engines.base import Engine
from gyre_core.experience.segments import CommittedSegment, write_segment
from gyre_core.policy.logprobs import ReferenceModel
from gyre_core.rewards.scorer import Scorer
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
    """What serving needs: a name unique to this process, the run's storage, and the parts that do the work."""

    name: str
    storage: Storage
    chain: VersionChain
    engine: Engine
    scorer: Scorer
    reference: ReferenceModel | None


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """What serving one request took and gave: seconds, tokens and its segment."""

    request_id: str
    load_seconds: float
    generation_seconds: float
    reward_seconds: float
    commit_seconds: float
    completion_tokens: int
    samples: int
    segment: CommittedSegment


async def serve_request(worker: Worker, request: RolloutRequest, attempt: int) -> ServedRequest | None:
    """Produce the request's segment; None when another worker has the claim or committed first.

    Raises whatever the engine, the scorer or the storage raises; the claim stays, so that the owner issues a
    new attempt.
    """
    if not await asyncio.to_thread(claim, worker.storage, request.request_id, attempt, worker.name):
        return None
    started = time.monotonic()
    if worker.engine.version != request.version:
        weights = await asyncio.to_thread(worker.chain.load, request.version)
        await worker.engine.load_weights(request.version, weights)
    loaded = time.monotonic()
    completions = await generate(worker.engine, request.groups, request.sampling)
    generated = time.monotonic()
    groups = await score(worker, request, completions)
    scored = time.monotonic()
    try:
        segment = await asyncio.to_thread(write_segment, worker.storage, request.request_id, groups)
    except FileExistsError:
        return None
    return ServedRequest(
        request_id=request.request_id,
        load_seconds=loaded - started,
        generation_seconds=generated - loaded,
        reward_seconds=scored - generated,
        commit_seconds=time.monotonic() - scored,
        completion_tokens=sum(len(item.token_ids) for group in completions.values() for item in group),
        samples=sum(len(group) for group in completions.values()),
        segment=segment,
    )


async def generate(
    engine: Engine, groups: Sequence[GroupRequest], sampling: SamplingParameters
) -> dict[str, list[Completion]]:
    """The groups' completions by group id, each group in the order of its samples."""
    completions: defaultdict[str, list[Completion]] = defaultdict(list)
    async for completion in engine.generate(groups, sampling):
        completions[completion.group_id].append(completion)
    for group in completions.values():
        group.sort(key=lambda completion: completion.sample_index)
    return completions


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
