"""The four stages of an RL step, on the run that the process owns.

Each stage finds what an earlier try of the same step left and does only what is missing, so that a retried step
ends with the same weights, bit for bit: requests and segments are found by name, draws in the consume log, and the
learner goes back to the state before the step before it applies the logged minibatches again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence

import numpy as np

from gyre_core.cluster.requests import announce_next
from gyre_core.cluster.waiting import Awaited, wait, wait_for_work
from gyre_core.experience.admission import Admission
from gyre_core.experience.consumption import ConsumeRecord, DrawnMinibatch, read_consumption, write_consumption
from gyre_core.experience.segments import open_attempt
from gyre_core.learner.schedule import learning_rate
from gyre_core.rewards.outcomes import check_failure_share
from gyre_core.rollout.serving import answer_request, claim_request
from gyre_core.training.requests import announce_requests, live_groups, plan_refill, plan_requests
from gyre_core.training.run import NoSignalError, TrainingRun
from gyre_core.training.step import (
    OpenStep,
    StepResult,
    completion_token_count,
    lag_metrics,
    policy_changes,
    rollout_metrics,
    token_count,
    trained_advantages,
    update_metrics,
)
from gyre_core.types import PolicyVersion, RolloutGroup, RolloutRequest
from gyre_core.weights.flat import FlatWeights

logger = logging.getLogger(__name__)

_DRAW_STREAM = 3
"""Sets the generator of the draws apart from those of the prompts."""


async def take_step(run: TrainingRun, step: int) -> None:
    """Take a whole step, as the flow `rl_step` does with a task for each stage, give the turn to the next, and see the
    policy version published."""
    await run.guard.admit(step)
    await rollout(run, step)
    await run.turns.wait(step)
    await reward(run, step)
    await sample(run, step)
    await update(run, step)
    await run.finish(step)
    await run.turns.release(step)
    await run.publisher.settled()


async def rollout(run: TrainingRun, step: int) -> int:
    """Have the step's requests answered by segments; returns how many there are.

    Workers may leave a share of them, `1 - rollout.quota`, for a later step. Raises WaitExpiredError after
    `rollout.timeout`, NoSignalError when refills are allowed and bring not one live group, RequestFailedError for a
    request that every worker fails at, and in this process whatever the engine, the scorer or the storage raises.
    """
    if step in run.results:
        return 0
    opened = run.open_steps.setdefault(step, OpenStep(step))
    with opened.timer("broadcast_weights"):
        await run.publisher.settled()
    opened.requests = await asyncio.to_thread(announce_requests, run, plan_requests(run, step))
    count = await wait_for_work(
        f"the {len(opened.requests)} requests of step {step} (rollout.timeout)",
        _produce_live_groups(run, opened),
        whom=lambda: _whom(run, opened),
        deadline=run.config.rollout.timeout,
    )
    run.note_produced(opened)
    return count


def _whom(run: TrainingRun, opened: OpenStep) -> Sequence[Awaited]:
    if run.remote is not None:
        return run.remote.dispatcher.whom(request.request_id for request in opened.requests)
    return [Awaited(f"the engine of this process, which answered {len(opened.committed)} of them")]


async def _produce_live_groups(run: TrainingRun, opened: OpenStep) -> int:
    """Answer the step's requests, and while groups without a signal are among them, requests for further prompts."""
    count = await _produce(run, opened)
    wanted, limit = run.config.rollout.batch_size, run.config.rollout.max_refills
    opened.refills = 0
    asked = 0
    while opened.refills < limit:
        live = await asyncio.to_thread(live_groups, run.storage, opened, run.credit)
        if live >= wanted:
            return count
        missing = wanted - live
        planned = plan_refill(run, opened, asked, missing)
        opened.requests += await asyncio.to_thread(announce_requests, run, planned)
        opened.refills, asked = opened.refills + 1, asked + missing
        count = await _produce(run, opened)
    if limit and not await asyncio.to_thread(live_groups, run.storage, opened, run.credit):
        raise NoSignalError(
            f"step {opened.step}: for each of {wanted + asked} prompts, those of {limit} refills (rollout.max_refills) "
            "included, all completions earn the same; the prompts are too hard or too easy for this policy, or the "
            "reward is constant: look at the completions in the run folder, raise rollout.samples_per_prompt, or "
            "change the data"
        )
    return count


async def _produce(run: TrainingRun, opened: OpenStep) -> int:
    """Have the step's requests answered, by workers or in this process; returns how many were."""
    return await (_await_workers(run, opened) if run.remote is not None else _produce_here(run, opened))


async def _await_workers(run: TrainingRun, opened: OpenStep) -> int:
    """Wait until the workers have answered the share of the step's requests that `rollout.quota` asks for."""
    remote = run.remote
    assert remote is not None
    dispatcher = remote.dispatcher
    names = [request.request_id for request in opened.requests]
    await asyncio.to_thread(dispatcher.follow, opened.requests)
    quota = math.ceil(run.config.rollout.quota * len(names) - 1e-9)

    def enough() -> int | None:
        remote.raise_error()
        dispatcher.raise_failure(names)
        answered = len(dispatcher.answered(names))
        return answered if answered >= quota else None

    return await wait(
        f"{quota} of the {len(names)} requests of step {opened.step} (rollout.timeout)",
        enough,
        whom=lambda: _whom(run, opened),
        deadline=run.config.rollout.timeout,
    )


async def _produce_here(run: TrainingRun, opened: OpenStep) -> int:
    """Answer the step's requests in this process, one after the other; returns their number.

    The step has the engine for all of them: taking turns by request would delay the older of two steps, and load
    another version's weights each time. What workers left unanswered before the run was resumed here comes first.
    """
    async with run.engine_free:
        for request in (*run.stragglers.values(), *opened.requests):
            await _ensure_segment(run, opened, request)
    return len(opened.requests)


async def _ensure_segment(run: TrainingRun, opened: OpenStep, request: RolloutRequest) -> None:
    """Serve the request in this process unless its segment is there; a spent attempt is followed by a new one."""
    while (attempt := await asyncio.to_thread(open_attempt, run.storage, request.request_id)) is not None:
        # Behind the listing, as in `announce_requests`.
        await asyncio.to_thread(run.require_owned)
        claimed = await claim_request(run.worker, request, attempt)
        segment = await answer_request(claimed) if claimed else None
        if claimed is not None and segment is not None:
            opened.committed[request.request_id] = segment
            opened.timer.add("broadcast_weights", claimed.load_seconds)
            opened.timer.add("generation", claimed.generation_seconds)
            opened.timer.add("reward", claimed.reward_seconds)
            return
        await asyncio.to_thread(announce_next, run.storage, request, attempt + 1, run.require_owned)


async def reward(run: TrainingRun, step: int) -> int:
    """Admit the step's segments to the pool, in order; returns the number of samples that came in.

    Raises RewardError when more rows could not be scored than `reward.max_failure_share` allows, and RuntimeError
    for a damaged segment, which is put aside, so that the retried step makes it anew.
    """
    if step in run.results:
        return 0
    opened = run.open_steps[step]
    with opened.timer("reward"):
        return await run.in_order(_admit, run, opened)


def _admit(run: TrainingRun, opened: OpenStep) -> int:
    if opened.pool_before is None:
        opened.pool_before, opened.credit_before = run.pool.snapshot(run.step), run.credit.state()
    generated: list[RolloutGroup] = []
    clean: list[RolloutGroup] = []
    made_anew: dict[str, str] = {}
    opened.late = run.arrived(run.stragglers)
    requests = run.stragglers | {request.request_id: request for request in opened.requests}
    for request_id in (*opened.late, *run.arrived(request.request_id for request in opened.requests)):
        admission = _admit_segment(run, opened, requests[request_id])
        if admission.outcome == "corrupt":
            made_anew[request_id] = admission.reason
        generated.extend(admission.generated)
        clean.extend(admission.groups)
    if made_anew:
        names, reasons = ", ".join(made_anew), "; ".join(dict.fromkeys(made_anew.values()))
        raise RuntimeError(f"{reasons}; put aside, to be made anew: {names}")
    scores = [rollout.score for group in generated for rollout in group.rollouts]
    check_failure_share(scores, run.config.reward.max_failure_share, opened.step)
    opened.generated, opened.clean = generated, clean
    return sum(len(group.rollouts) for group in clean)


def _admit_segment(run: TrainingRun, opened: OpenStep, request: RolloutRequest) -> Admission:
    """Admit one segment; the running statistics of rewards count it if the pool takes it in, and only then."""
    credit, before = run.credit, run.credit.state()
    try:
        return run.pool.admit(
            request.request_id,
            opened.step,
            credit.advantages,
            run.now(opened.step),
            skip_dead_groups=credit.skip_dead_groups,
            committed=opened.committed.get(request.request_id),
            made_by=request.version if run.config.rollout.max_lag == 0 else None,
        )
    except BaseException:
        credit.load_state(before)
        raise


async def sample(run: TrainingRun, step: int) -> int:
    """Draw the step's minibatches and log them before anything is trained; returns the number of minibatches.

    A step that was drawn before trains on the very same rows.
    """
    if step in run.results:
        return 0
    opened = run.open_steps[step]
    with opened.timer("sample"):
        opened.record = await run.in_order(_draw, run, step)
    return len(opened.record.minibatches)


def _draw(run: TrainingRun, step: int) -> ConsumeRecord:
    found = read_consumption(run.storage, run.epoch, step)
    if found is not None:
        return found
    learning, rollout = run.config.learning, run.config.rollout
    now = run.now(step)
    run.pool.expire(now)
    drawn = run.pool.draw(
        np.random.default_rng([run.config.experiment.seed, _DRAW_STREAM, step]),
        minibatches=learning.update_steps,
        groups_per_minibatch=max(1, rollout.batch_size // learning.update_steps),
        now=now,
        current=run.version,
        on_policy=rollout.max_lag == 0,
    )
    lr = learning_rate(step - 1, run.config.experiment.steps, learning)
    record = ConsumeRecord(step, tuple(DrawnMinibatch(tuple(groups), lr, learning.kl_coef) for groups in drawn))
    run.require_owned()
    write_consumption(run.storage, run.epoch, record)
    return record


async def update(run: TrainingRun, step: int) -> str:
    """Train on the step's minibatches, commit the step, and begin to publish the policy version that it leaves.

    Returns that version: its own start's when there was nothing to train on.
    """
    if step not in run.results:
        opened = run.open_steps[step]
        with opened.timer("update"):
            await run.in_order(_train, run, opened)
        with opened.timer("broadcast_weights"):
            await run.publisher.settled()
            weights = await run.in_order(_copy_policy, run, opened)
        before = run.version
        _commit(run, opened, run.next_version if weights is not None else before)
        if weights is not None:
            run.publisher.begin(run.version, before, weights)
    return str(run.results[step].version)


def _train(run: TrainingRun, opened: OpenStep) -> None:
    """Apply the step's minibatches to the state before the step; a retried step goes back there first."""
    assert opened.record is not None, "a step is drawn before it is trained"
    learner = run.learner
    if opened.updating:
        learner.restore()
    else:
        learner.snapshot()
        opened.updating = True
    started = time.perf_counter()
    minibatches = run.pool.minibatches(opened.record)
    groups = [group for minibatch in minibatches for group in minibatch.groups]
    step = learner.take_step(minibatches, on_policy=run.config.rollout.max_lag == 0)
    opened.update_metrics = {**step.old.metrics, **update_metrics(step.updates), **lag_metrics(groups, run.version)}
    opened.policy_changes = policy_changes(groups, step.old)
    opened.update_seconds = time.perf_counter() - started


def _copy_policy(run: TrainingRun, opened: OpenStep) -> FlatWeights | None:
    """The policy's weights as they are now; None when the step changed nothing."""
    assert opened.record is not None
    return FlatWeights.of(run.learner.policy_weights()) if opened.record.minibatches else None


def _commit(run: TrainingRun, opened: OpenStep, version: PolicyVersion) -> None:
    """Count the step as done. Touches memory only, so that it happens whole or not at all."""
    assert opened.record is not None
    now = run.now(opened.step)
    segments = run.pool.segment_bytes(opened.record)
    run.pool.consume(opened.record, now)
    run.pool.record_policy_change(opened.policy_changes)
    _pass_on_stragglers(run, opened)
    # All older requests were answered, so their objects may go.
    run.pool.close(min((request.step for request in run.stragglers.values()), default=opened.step + 1))
    samples = sum(len(group.rollouts) for group in opened.generated)
    run.samples_seen += samples
    run.tokens_seen += token_count(opened.generated)
    run.version, run.step = version, opened.step
    run.recovery.reached("first_update")
    tokens = completion_token_count(opened.generated)
    run.tokens_consumed += tokens
    if (fill := run.fill(opened.step)) is not None:
        run.fill_readings.append(fill)
    metrics = {
        **rollout_metrics(opened.generated, run.credit.compares_siblings),
        **opened.update_metrics,
        **run.pool.metrics(now),
        **run.credit.metrics(),
        **_scoring_metrics(run),
        **_refills(run, opened),
        **({"experience/fill": fill} if fill is not None else {}),
        **(run.remote.metrics() if run.remote is not None else {}),
        "learning_rate": learning_rate(opened.step - 1, run.config.experiment.steps, run.config.learning),
        "kl_coef": run.config.learning.kl_coef,
        "num_samples": float(run.samples_seen),
        "num_tokens": float(run.tokens_seen),
    }
    # Last, as it would be counted twice if this were repeated.
    run.saver.note(opened.record, segments, opened.update_seconds)
    run.results[opened.step] = StepResult(
        step=opened.step,
        version=version,
        metrics=metrics,
        timer=opened.timer,
        samples=samples,
        completion_tokens=tokens,
        waited=opened.waited,
        generated=opened.generated,
        advantages=trained_advantages(opened.clean, opened.record) if run.credit.compares_siblings else {},
    )
    del run.open_steps[opened.step]


def _scoring_metrics(run: TrainingRun) -> dict[str, float]:
    """What went wrong at scoring since the step before, in this process and at the workers."""
    metrics = run.worker.scorer.metrics()
    for name, grown in (run.remote.scoring_metrics() if run.remote is not None else {}).items():
        metrics[name] = metrics.get(name, 0.0) + grown
    return metrics


def _refills(run: TrainingRun, opened: OpenStep) -> dict[str, float]:
    """Rounds of further prompts, where they are allowed."""
    return {"experience/refills": float(opened.refills)} if run.config.rollout.max_refills else {}


def _pass_on_stragglers(run: TrainingRun, opened: OpenStep) -> None:
    """Leave the step's unanswered requests to later steps, and count those of earlier ones that came in."""
    admitted = {request.request_id for request in opened.requests if run.pool.admitted(request.request_id)}
    for request_id in opened.late:
        run.stragglers.pop(request_id)
    run.stragglers |= {request.request_id: request for request in opened.requests if request.request_id not in admitted}
    if run.remote is not None:
        run.remote.dispatcher.forget((*opened.late, *admitted))
