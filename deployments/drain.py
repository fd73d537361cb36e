"""The orderly end of the flow runs of this machine's pools: asked to end, waited for, named when they do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Cancelled, Cancelling

from deployments.flow_processes import flow_processes
from flows.names import CONTROL_POOL, LEARNER_POOL, ROLLOUT_POOL
from flows.states import OPEN_STATES, in_states, state_of

LookAfter = Callable[[], Awaitable[None]]

FAREWELL = 5.0
"""Seconds in which rollout workers may go by themselves once their runs have ended."""
_LOOK_SECONDS = 0.5


async def drain(client: PrefectClient, look_after: LookAfter, *, timeout: float, local: bool) -> list[str]:
    """End what runs in processes of this machine, training first; returns the names of what did not end in time.

    `look_after` is called on the way, to end what no Prefect worker watches. On a server of this machine (`local`) runs
    that wait in the pools are cancelled too: nobody is left to take them.
    """
    deadline = time.monotonic() + timeout
    if local:
        await _cancel_waiting(client)
    leading = (LEARNER_POOL, CONTROL_POOL)
    while (running := await _running(client, leading)) and time.monotonic() < deadline:
        await _cancel(client, running)
        await _pause(look_after)
    farewell = time.monotonic() + FAREWELL
    while (running := await _running(client, [ROLLOUT_POOL])) and time.monotonic() < deadline:
        if time.monotonic() > farewell:
            await _cancel(client, running)
        await _pause(look_after)
    return [run.name for run in await _running(client, [*leading, ROLLOUT_POOL])]


async def _cancel(client: PrefectClient, runs: Iterable[FlowRun]) -> None:
    for run in runs:
        if state_of(run) != StateType.CANCELLING:
            await client.set_flow_run_state(run.id, Cancelling())


async def _pause(look_after: LookAfter) -> None:
    await look_after()
    await asyncio.sleep(_LOOK_SECONDS)


async def _running(client: PrefectClient, pools: Sequence[str]) -> list[FlowRun]:
    """Flow runs of these pools that have a process on this machine, and have not ended."""
    here = [run for run, process in flow_processes().items() if process.running()]
    return (
        await _read(client, pools, [kind for kind in OPEN_STATES if kind != StateType.SCHEDULED], here) if here else []
    )


async def _cancel_waiting(client: PrefectClient) -> None:
    """Cancel what waits for a process, but for the firings of schedules, which are made anew by the server."""
    for run in await _read(client, (LEARNER_POOL, CONTROL_POOL, ROLLOUT_POOL), [StateType.SCHEDULED], None):
        if not run.auto_scheduled:
            await client.set_flow_run_state(run.id, Cancelled(message="`gyre down` came before it began."), force=True)


async def _read(
    client: PrefectClient, pools: Sequence[str], states: list[StateType], runs: list[UUID] | None
) -> list[FlowRun]:
    return await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            id=FlowRunFilterId(any_=runs) if runs is not None else None,
            state=in_states(states),
        ),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=list(pools))),
    )
