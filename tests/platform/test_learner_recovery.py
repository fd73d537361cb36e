"""A training run that is killed on a real platform comes back by itself, as one new flow run, but not for ever."""

import asyncio
import json

import pytest
from platform_tools import reaches, start, until
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterTags,
)
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.states import Cancelling

from deployments.flow_processes import flow_processes
from deployments.platform_state import PlatformState
from flows.names import LEARNER_POOL, RUN_GIVEN_UP, TRAIN_DEPLOYMENT
from flows.recover import recover_run
from flows.states import OPEN_STATES, in_states
from gyre_core.monitor.metrics import read_metrics
from gyre_core.training.status import describe_runs

TINY = {
    "models": {"tiny": {"hidden_size": 16, "layers": 1}, "warm_start": {"max_steps": 0}},
    "data": {"evaluation_size": 0, "size": 16},
    "rollout": {"batch_size": 4, "samples_per_prompt": 2, "max_tokens": 2},
    "checkpoint": {"interval": 1e-6},
    "monitor": {"tensorboard": False},
}
"""A checkpoint after every step."""
KILLS_ITS_TRAINER = """
import os, signal
from pathlib import Path

RUN = Path({run!r})

def deadly(completions, **columns):
    if (RUN / "metrics.jsonl").stat().st_size:
        os.kill(int((RUN / "owner.lock").read_text()), signal.SIGKILL)
    return [float(len(text)) for text in completions]
"""


@pytest.fixture
async def client(platform):
    async with get_client() as client:
        yield client


def settings(folder, name, **sections):
    experiment = {"name": name, "steps": 100_000, "threads": 1, "output": str(folder)}
    return {**TINY, "experiment": experiment, **sections}


async def flow_runs(client, key):
    """All flow runs of the train deployment for a run, oldest first."""
    deployment = await client.read_deployment_by_name(TRAIN_DEPLOYMENT)
    runs = await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]), tags=FlowRunFilterTags(all_=[key])
        )
    )
    return sorted(runs, key=lambda run: run.created)


async def successor(client, key, dead):
    newest = (await flow_runs(client, key))[-1]
    return newest if newest.id != dead.id else None


async def recoveries(client, dead):
    """The flow runs that the automation started for a crashed one."""
    runs = await client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=["recover"])))
    return [run for run in runs if run.parameters["flow_run"] == str(dead.id)]


async def next_step(folder):
    """Wait until a run has logged one more step than it has now."""

    def last():
        rows = read_metrics(folder)
        return rows[-1].step if rows else 0

    before = last()

    async def beyond():
        return last() > before

    await until(beyond, f"a step after {before}")


async def process_of(run):
    async def there():
        return flow_processes().get(run.id)

    return await until(there, "the process")


def kill_prefect_worker():
    PlatformState.load().workers[LEARNER_POOL].process.find().kill()


async def cancel(client, run):
    await client.set_flow_run_state(run.id, Cancelling())
    await reaches(run, "Cancelled")


async def test_a_killed_run_comes_back_as_one_flow_run_and_outlives_its_prefect_worker(client, tmp_path):
    key, folder = "phoenix/a", tmp_path / "phoenix" / "a"
    run = await start(TRAIN_DEPLOYMENT, config=settings(tmp_path, "phoenix"), run_id="a")
    await next_step(folder)

    kill_prefect_worker()
    await next_step(folder)
    assert [known.id for known in await flow_runs(client, key)] == [run.id]

    # Once with a Prefect worker that tells the end of the process, once with one that is dead as well.
    for kill_worker in (False, True):
        process = await process_of(run)
        if kill_worker:
            kill_prefect_worker()
        process.find().kill()
        dead = await reaches(run, "Crashed")
        # Beside the supervisor several others notice, the automation among them.
        await asyncio.gather(*(recover_run(client, dead) for _ in range(3)))
        (recovery,) = await until(lambda dead=dead: recoveries(client, dead), "the automation's flow run")
        await reaches(recovery, "Completed")
        run = await until(lambda dead=dead: successor(client, key, dead), "the next flow run")
        assert (run.parameters["run_id"], run.parameters["resume"]) == ("a", True)
        await reaches(run, "Running")
        await next_step(folder)
    await cancel(client, run)

    runs = await flow_runs(client, key)
    assert [known.state.name for known in runs] == ["Crashed", "Crashed", "Cancelled"]
    below = await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[key]), state=in_states(OPEN_STATES))
    )
    assert below == []
    steps = [row.step for row in read_metrics(folder)]
    assert steps == list(range(steps[-1] + 1)) or steps == list(range(1, steps[-1] + 1))
    assert await recover_run(client, runs[-1]) is None, "cancelled runs stay so"


async def test_a_run_that_kills_itself_at_one_step_is_given_up_and_named(client, tmp_path):
    folder, functions = tmp_path / "lemming" / "a", tmp_path / "deadly.py"
    functions.write_text(KILLS_ITS_TRAINER.format(run=str(folder)))
    reward = {"functions": [{"path": f"{functions}:deadly"}]}
    config = settings(tmp_path, "lemming", reward=reward, evaluation={"every": 0})
    run = await start(TRAIN_DEPLOYMENT, config=config, run_id="a")
    for _ in range(2):
        await reaches(run, "Crashed")
        run = await until(lambda dead=run: successor(client, "lemming/a", dead), "the next flow run")
    await reaches(run, "Crashed")

    async def given_up():
        return json.loads((folder / "summary.json").read_text())["status"] == "given up"

    await until(given_up, "the end of its restarts")
    last = read_metrics(folder)[-1].step
    sentence = f"crashed 3 times after step {last}"
    runs = await flow_runs(client, "lemming/a")
    assert [run.state.name for run in runs] == ["Crashed"] * 3
    assert [tag for run in runs for tag in run.tags if "restart" in tag] == [
        f"gyre.restart:1@{last}",
        f"gyre.restart:2@{last}",
    ]
    assert f"error   {sentence}" in describe_runs(str(tmp_path), "lemming/a")

    async def told():
        wanted = EventFilter(event=EventNameFilter(name=[RUN_GIVEN_UP]))
        reply = await client.request("POST", "/events/filter", json={"filter": wanted.model_dump(mode="json")})
        return reply.json()["events"]

    (event,) = await until(told, "the event")
    assert (event["payload"]["run"], event["payload"]["step"]) == ("lemming/a", last)
