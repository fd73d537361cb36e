"""A recurring alignment job: each firing trains a run of its own, and waits, yields or fails when one still trains."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from functools import partial
from typing import Literal
from uuid import UUID

import prefect.runtime.flow_run
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterIdempotencyKey,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.deployments import arun_deployment
from prefect.states import Cancelled, Cancelling, Completed

from flows.forms import FormConfig
from flows.names import RECURRING_FLOW, TRAIN_DEPLOYMENT, successor_key
from flows.outage import outlasting
from flows.recover import SETTLED
from flows.states import OPEN_STATES, in_states, state_of
from gyre_core.config import GyreConfig
from gyre_core.training.series import continued

LOOK_SECONDS = 2.0
"""Pause between two looks at another firing, or at the training of this one."""
QUEUE_TIMEOUT = 7 * 86400.0
"""Seconds that a firing waits for its turn before it fails."""
RECOVERY_TIMEOUT = 600.0
"""Seconds in which it must be decided whether a training that crashed goes on."""


class OverlapError(RuntimeError):
    """A firing of the series still trains."""


@flow(flow_run_name="{config.experiment.name}", persist_result=False)
async def recurring(
    config: FormConfig,
    overlap: Literal["skip", "queue", "refuse"] = "skip",
    start: Literal["model", "last_export"] = "model",
) -> str | State[None]:
    """Train a run of the series `config.experiment.name` through `train/gyre`; returns its key, NAME/RUN_ID.

    While a run of the series has not ended, of an earlier firing or any other, `overlap` decides: `skip` does nothing,
    `queue` waits for it, and `refuse` raises OverlapError. `start` is the configured model, or the last export of the
    series if there is one.
    A training that crashes and comes back is followed. Raises RuntimeError when the training did not complete;
    cancelled, it cancels the training.
    """
    earlier = await outlasting(lambda: _earlier(config.experiment.name))
    if earlier and overlap == "skip":
        return Completed(name="Skipped", message=f"{_names(earlier)} still trains.")
    if earlier and overlap == "refuse":
        raise OverlapError(f"{_names(earlier)} still trains, and this series refuses to overlap")
    await _wait_for_turn(config.experiment.name)
    chosen = await asyncio.to_thread(continued, config) if start == "last_export" else config
    run_id = _run_id()
    await _train(chosen, run_id)
    return f"{config.experiment.name}/{run_id}"


async def _earlier(series: str) -> list[FlowRun]:
    """What trains, or is about to train, for a series before this firing may."""
    async with get_client() as client:
        own = await client.read_flow_run(UUID(_own_id()))
        open_runs = FlowRunFilter(state=in_states(OPEN_STATES))
        firings, trainings = [
            await client.read_flow_runs(
                flow_filter=FlowFilter(name=FlowFilterName(any_=[name])), flow_run_filter=open_runs
            )
            for name in (RECURRING_FLOW, TRAIN_DEPLOYMENT.partition("/")[0])
        ]
    before = [run for run in firings if run.id != own.id and _order(run) < _order(own)]
    return [run for run in (*before, *trainings) if _series(run) == series]


async def _wait_for_turn(series: str) -> None:
    deadline = time.monotonic() + QUEUE_TIMEOUT
    while earlier := await outlasting(lambda: _earlier(series)):
        if time.monotonic() > deadline:
            raise OverlapError(f"{_names(earlier)} still trains after {QUEUE_TIMEOUT / 86400:.0f} days of waiting")
        await asyncio.sleep(LOOK_SECONDS)


async def _train(config: GyreConfig, run_id: str) -> None:
    """Train through the deployment, which takes its turn in the pool of learners, and follow it to its end."""
    parameters = {"config": config.model_dump(mode="json", exclude_unset=True), "run_id": run_id}
    training = await outlasting(
        lambda: arun_deployment(
            TRAIN_DEPLOYMENT, parameters=parameters, timeout=0, idempotency_key=f"recurring/{_own_id()}"
        )
    )
    try:
        while not _has_ended(training):
            await asyncio.sleep(LOOK_SECONDS)
            training = await outlasting(partial(_newest, training.id))
    except asyncio.CancelledError:
        await _cancel(training.id)
        raise
    assert training.state is not None, "it has ended"
    if not training.state.is_completed():
        raise RuntimeError(f"the training ended {training.state.name}: {training.state.message}")


def _has_ended(training: FlowRun) -> bool:
    """Whether nothing more will come of a training: one that crashed may yet come back, until that is decided."""
    if training.state is None or not training.state.is_final():
        return False
    undecided = state_of(training) == StateType.CRASHED and SETTLED not in training.tags
    return not undecided or time.time() - training.state.timestamp.timestamp() > RECOVERY_TIMEOUT


async def _newest(training: UUID) -> FlowRun:
    """A flow run of the training as it is now; of one that crashed, the one that goes on with it, if there is one."""
    async with get_client() as client:
        run = await client.read_flow_run(training)
        if state_of(run) != StateType.CRASHED:
            return run
        # It is settled after its successor was started: whoever reads that it is settled finds the successor.
        key = FlowRunFilterIdempotencyKey(any_=[successor_key(run.id)])
        successors = await client.read_flow_runs(flow_run_filter=FlowRunFilter(idempotency_key=key))
        return successors[0] if successors else run


async def _cancel(training: UUID) -> None:
    """Cancel a training; one that crashed is not started again, or what was started is cancelled."""
    run = await _newest(training)
    crashed = state_of(run) == StateType.CRASHED
    async with get_client() as client:
        await client.set_flow_run_state(run.id, Cancelled() if crashed else Cancelling())


def _own_id() -> str:
    return str(prefect.runtime.flow_run.id)


def _run_id() -> str:
    """An id that begins with when the firing was due, and is its own even if it fires twice in a second."""
    due: datetime = prefect.runtime.flow_run.scheduled_start_time
    return f"{due.astimezone(UTC):%Y%m%d-%H%M%S}-{_own_id()[-4:]}"


def _series(run: FlowRun) -> str | None:
    """The series that a flow run trains for, from its parameters as they were sent."""
    config = run.parameters.get("config")
    if not isinstance(config, dict):
        return None
    return config.get("experiment", {}).get("name", GyreConfig.model_fields["experiment"].default.name)


def _order(run: FlowRun) -> tuple[float, str]:
    due = run.expected_start_time
    return (due.timestamp() if due is not None else 0.0), str(run.id)


def _names(runs: list[FlowRun]) -> str:
    return ", ".join(f"{run.name} ({run.id})" for run in runs)
