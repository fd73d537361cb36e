"""What the tests of the platform share: its processes, toy flows, and waiting with a deadline."""

import asyncio
import time

from prefect.client.orchestration import get_client

from deployments.deploy import FlowDeployment
from deployments.flow_processes import flow_processes
from deployments.platform_state import PlatformState
from flows.names import CONTROL_POOL, ROLLOUT_POOL

DEADLINE = 120.0
"""Seconds until what a test waits for must have happened."""
TOYS = (
    FlowDeployment("rollout_worker", "toy_flows.rollout_worker", ROLLOUT_POOL, "A worker without an engine."),
    FlowDeployment("nap", "toy_flows.nap", CONTROL_POOL, "A flow that takes its time."),
)


async def until(ready, what: str):
    """What the coroutine function `ready` returns as soon as that is true; fails after `DEADLINE`."""
    deadline = time.monotonic() + DEADLINE
    while not (result := await ready()):
        assert time.monotonic() < deadline, f"gave up waiting for {what}"
        await asyncio.sleep(0.1)
    return result


def all_processes():
    """Everything that the platform runs: supervisor, server, Prefect workers and flow runs."""
    state = PlatformState.load()
    return [state.supervisor, state.server.process, *state.worker_processes(), *flow_processes().values()]


async def start(name: str, **parameters):
    """Start a run of a deployment; returns it."""
    async with get_client() as client:
        deployment = await client.read_deployment_by_name(name)
        return await client.create_flow_run_from_deployment(deployment.id, parameters=parameters)


async def reaches(run, *states):
    """Wait until a flow run is in one of these states; returns it."""

    async def there():
        async with get_client() as client:
            seen = await client.read_flow_run(run.id)
        return seen if seen.state.name in states else None

    return await until(there, f"{run.name} to be {' or '.join(states)}")
