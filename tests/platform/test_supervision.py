"""A running platform: what is registered, and what the supervisor does when something dies."""

import httpx
import pytest
from platform_tools import reaches, start, until
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.states import Cancelling

from deployments.flow_processes import flow_processes
from deployments.platform_state import PlatformState
from flows.names import CONTROL_POOL


@pytest.fixture
async def client(platform):
    async with get_client() as client:
        yield client


async def children(client, run):
    parent = FlowRunFilterParentFlowRunId(any_=[run.id])
    return await client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parent))


def kill_prefect_worker(pool):
    """Kill the Prefect worker of a pool; returns its process."""
    process = PlatformState.load().workers[pool].process
    process.find().kill()
    return process


async def replaced(pool, old):
    process = PlatformState.load().workers[pool].process
    return process if process is not None and process != old and process.running() else None


async def test_the_form_of_a_training_run_explains_every_field(client):
    deployment = await client.read_deployment_by_name("train/gyre")
    schema = deployment.parameter_openapi_schema
    assert set(schema["properties"]) == {"config", "run_id", "resume", "resume_step", "resume_from"}
    assert all(value["description"] for value in schema["properties"].values())
    sections = schema["definitions"]["GyreConfig"]["properties"]
    assert {"experiment", "rollout", "learning", "elastic"} <= set(sections)
    for section in sections.values():
        fields = schema["definitions"][section["$ref"].rpartition("/")[2]]["properties"]
        assert all("$ref" in field or field["description"] for field in fields.values())
    # A form sends the defaults that it shows, and this one depends on `elastic.enabled`.
    assert "default" not in schema["definitions"]["RolloutConfig"]["properties"]["launcher"]
    assert schema["definitions"]["RolloutConfig"]["properties"]["batch_size"]["default"] == 128


async def test_cancelling_a_run_leaves_no_process(client):
    run = await reaches(await start("nap/gyre", seconds=300), "Running")
    process = flow_processes()[run.id]
    assert process.running()
    await client.set_flow_run_state(run.id, Cancelling())
    await reaches(run, "Cancelled")
    assert not process.running()


async def test_a_run_outlives_its_prefect_worker_which_is_replaced_and_can_still_be_cancelled(client):
    run = await reaches(await start("nap/gyre", seconds=300), "Running")
    process = flow_processes()[run.id]
    old = kill_prefect_worker(CONTROL_POOL)
    await until(lambda: replaced(CONTROL_POOL, old), "another Prefect worker")
    assert process.running()
    await client.set_flow_run_state(run.id, Cancelling())
    await reaches(run, "Cancelled")
    assert not process.running()


async def test_a_run_that_dies_with_its_prefect_worker_is_set_to_crashed_with_all_below_it(client):
    run = await reaches(await start("nap/gyre", seconds=300), "Running")
    (below,) = await until(lambda: children(client, run), "the flow below")
    await reaches(below, "Running")
    process = flow_processes()[run.id]
    old = kill_prefect_worker(CONTROL_POOL)
    process.find().kill()
    crashed = await reaches(run, "Crashed")
    assert str(process.pid) in crashed.state.message
    assert (await client.read_flow_run(below.id)).state.name == "Crashed"
    assert run.id not in flow_processes()
    await until(lambda: replaced(CONTROL_POOL, old), "another Prefect worker")


async def test_a_server_that_dies_is_started_again_at_its_address(platform, client):
    server = PlatformState.load().server.process
    server.find().kill()

    async def answers():
        try:
            async with httpx.AsyncClient() as browser:
                reply = await browser.get(f"{platform.api_url}/health")
        except httpx.HTTPError:
            return False
        return reply.status_code == 200 and PlatformState.load().server.process != server

    await until(answers, "another server")
    run = await start("nap/gyre", seconds=0)
    await reaches(run, "Completed")
    assert PlatformState.load().server.restarts == 1
