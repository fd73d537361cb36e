"""What a step asks of whoever generates: requests for its own prompts, and for further ones where groups are dead."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gyre_core.cluster.requests import announce_next, announced, read_request, request_name
from gyre_core.experience.cleaning import clean
from gyre_core.experience.segments import (
    ABANDONED_BRANCH,
    CorruptSegmentError,
    quarantine,
    read_segment,
    segment_exists,
    segment_name,
)
from gyre_core.rollout.build import sampling_parameters
from gyre_core.storage import Storage
from gyre_core.training.credit import Credit
from gyre_core.training.run import TrainingRun
from gyre_core.training.step import OpenStep
from gyre_core.types import GroupRequest, Prompt, RolloutRequest

logger = logging.getLogger(__name__)


def plan_requests(run: TrainingRun, step: int) -> list[RolloutRequest]:
    """The step's requests; prompts and noise are a function of seed and step, the version one of step and `max_lag`."""
    return _cut_into_requests(run, step, run.cursor.prompts_for_step(step - 1), first_shard=0)


def plan_refill(run: TrainingRun, opened: OpenStep, asked: int, count: int) -> list[RolloutRequest]:
    """Requests for `count` further prompts of a step that asked for `asked` of them before."""
    prompts = run.cursor.refill_for_step(opened.step - 1, asked, count)
    return _cut_into_requests(run, opened.step, prompts, first_shard=len(opened.requests))


def _cut_into_requests(
    run: TrainingRun, step: int, prompts: Sequence[Prompt], first_shard: int
) -> list[RolloutRequest]:
    size = run.config.rollout.groups_per_request
    # A noise seed a step, so that a prompt that returns in a later epoch is sampled anew.
    state = np.random.SeedSequence([run.config.experiment.seed, step]).generate_state(1, np.uint64)
    sampling = replace(sampling_parameters(run.config), seed=int(state[0] >> 1))
    version = run.version_for(step)
    requests: list[RolloutRequest] = []
    for shard, start in enumerate(range(0, len(prompts), size), start=first_shard):
        identity = request_name(step, shard)
        groups = tuple(
            GroupRequest(f"{identity}-{index:04d}", prompt)
            for index, prompt in enumerate(prompts[start : start + size])
        )
        requests.append(RolloutRequest(identity, step, version, groups, sampling))
    return requests


def announce_requests(run: TrainingRun, wanted: Sequence[RolloutRequest]) -> tuple[RolloutRequest, ...]:
    """The requests as they are answered: announced unless they are already.

    A request of an earlier epoch is announced anew, and its segment put aside: its policy version may have been
    published after the checkpoint that this epoch began from, on a branch that was abandoned. Raises SupersededError.
    """
    requests: list[RolloutRequest] = []
    again = 0
    attempts = announced(run.storage)
    # Behind the listing, so that the next attempt of a superseded owner meets that of its successor.
    run.require_owned()
    for planned in wanted:
        attempt = attempts.get(planned.request_id, 0)
        found = read_request(run.storage, planned.request_id, attempt) if attempt else None
        if found is None or found.version.epoch != run.epoch:
            if segment_exists(run.storage, planned.request_id):
                again += 1
                # The name comes before the check, so that a superseded owner cannot hit its successor's segment.
                name = segment_name(run.storage, planned.request_id)
                run.require_owned()
                quarantine(run.storage, name, ABANDONED_BRANCH)
            announce_next(run.storage, planned, attempt + 1, run.require_owned)
            found = planned
        requests.append(found)
    if again:
        logger.info(
            "step %d: %d of %d requests were answered before the run was taken over, and are generated anew",
            wanted[0].step,
            again,
            len(wanted),
        )
    return tuple(requests)


def live_groups(storage: Storage, opened: OpenStep, credit: Credit) -> int:
    """Groups of the step's answered requests whose clean rows do not all earn the same.

    Raises RuntimeError for a damaged segment, which is put aside, so that the retried step makes it anew.
    """
    live = 0
    for request in opened.requests:
        try:
            committed = opened.committed.get(request.request_id)
            groups = clean(read_segment(storage, request.request_id, committed)).groups
        except CorruptSegmentError as error:
            quarantine(storage, error.name, error.reason)
            raise RuntimeError(f"{error}; it was put aside and request {request.request_id} is made anew") from error
        live += sum(credit.has_signal(group) for group in groups)
    return live
