"""Final states for flow runs that will not come to one by themselves, with all that is open below them."""

from __future__ import annotations

import asyncio
import logging
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Crashed

from flows.states import OPEN_STATES, in_states

logger = logging.getLogger(__name__)

SECOND_LOOK = 0.5
"""Seconds until what a run gave up is looked for once more."""


async def close_run(client: PrefectClient, flow_run: FlowRun, state: State) -> None:
    """Set a flow run and all open flow and task runs below it to a final state."""
    await close_below(client, flow_run.id, state)
    await client.set_flow_run_state(flow_run.id, state.fresh_copy(), force=True)


async def close_steps(flow_run: UUID) -> None:
    """Set all that is open below a run that has given its steps up to Crashed.

    A flow that is cancelled while Prefect opens it stays Pending. When Prefect is away, that is logged.
    """
    try:
        async with get_client() as client:
            gave_up = Crashed(message="Its run gave it up.")
            await close_below(client, flow_run, gave_up)
            # What was on its way to the server when its sender was cancelled arrives a moment later.
            await asyncio.sleep(SECOND_LOOK)
            await close_below(client, flow_run, gave_up)
    except httpx.HTTPError as error:
        logger.warning("steps that were given up may be shown as open: %r", error)


async def close_below(client: PrefectClient, parent: UUID, state: State) -> None:
    """Set all open flow and task runs below a flow run to a final state."""
    children = await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent]),
            state=in_states(OPEN_STATES),
        )
    )
    for child in children:
        await close_run(client, child, state)
    open_tasks = await client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[parent])),
        task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=list(OPEN_STATES)))),
    )
    for task_run in open_tasks:
        await client.set_task_run_state(task_run.id, state.fresh_copy(), force=True)
