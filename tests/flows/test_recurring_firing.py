"""A firing of a recurring job follows its training through crashes, and through absences of the Prefect server.

Nobody takes the trainings from their pool: the tests say what becomes of them.
"""

import asyncio

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.states import Completed, Crashed, Running
from tiny_runs import tiny_config

from deployments.deploy import DEPLOYMENTS, register
from deployments.pools import ensure_pools
from flows import recurring
from flows.recover import recover_run
from gyre_core.config import GyreConfig

pytestmark = pytest.mark.usefixtures("prefect_server")

DEADLINE = 60.0


@pytest.fixture
async def client(prefect_server):
    async with get_client() as client:
        await ensure_pools(client)
        await register(client, next(deployment for deployment in DEPLOYMENTS if deployment.flow == "train"))
        yield client


class Firing:
    """A firing that runs in this process; `training` is the flow run that it started."""

    def __init__(self, client, config: GyreConfig):
        self.client, self.task = client, asyncio.create_task(recurring.recurring(config))

    async def began(self, series: str):
        async with asyncio.timeout(DEADLINE):
            while not (found := await self._trainings(series)):
                await asyncio.sleep(0.05)
        (self.training,) = found
        await self.becomes(Running())

    async def _trainings(self, series):
        runs = await self.client.read_flow_runs(flow_run_filter=FlowRunFilter())
        return [run for run in runs if run.deployment_id and recurring._series(run) == series]

    async def becomes(self, state) -> None:
        await self.client.set_flow_run_state(self.training.id, state, force=True)
        self.training = await self.client.read_flow_run(self.training.id)

    async def end(self):
        async with asyncio.timeout(DEADLINE):
            return await self.task


@pytest.fixture
async def firing(client, tmp_path, monkeypatch):
    monkeypatch.setattr(recurring, "LOOK_SECONDS", 0.1)
    series = tmp_path.name
    firing = Firing(client, tiny_config(tmp_path, experiment={"name": series}))
    await firing.began(series)
    yield firing
    firing.task.cancel()
    await asyncio.gather(firing.task, return_exceptions=True)


async def test_it_completes_with_what_went_on_for_a_training_that_crashed(firing):
    for _ in range(2):
        await firing.becomes(Crashed(message="killed"))
        await asyncio.sleep(0.5)  # Looks at a run that may yet come back.
        firing.training = await recover_run(firing.client, firing.training)
        await firing.becomes(Running())
    await firing.becomes(Completed())
    assert (await firing.end()).startswith(f"{recurring._series(firing.training)}/")


async def test_it_fails_with_a_training_that_is_given_up(firing):
    await firing.client.update_flow_run(firing.training.id, tags=["gyre.restart:2@0"])
    await firing.becomes(Crashed(message="killed again"))
    assert await recover_run(firing.client, firing.training) is None
    with pytest.raises(RuntimeError, match=r"^the training ended Crashed: killed again$"):
        await firing.end()


async def test_it_fails_with_a_training_about_which_nobody_decides(firing, monkeypatch):
    monkeypatch.setattr(recurring, "RECOVERY_TIMEOUT", 1.0)
    await firing.becomes(Crashed(message="killed"))
    with pytest.raises(RuntimeError, match=r"^the training ended Crashed: killed$"):
        await firing.end()


@pytest.mark.parametrize("decided", [True, False])
async def test_cancelled_it_cancels_what_goes_on_for_its_training(firing, decided):
    await firing.becomes(Crashed(message="killed"))
    dead = firing.training
    if decided:
        firing.training = await recover_run(firing.client, dead)
        await firing.becomes(Running())
    firing.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await firing.end()
    assert (await firing.client.read_flow_run(firing.training.id)).state.name in ("Cancelling", "Cancelled")
    assert await recover_run(firing.client, dead) is None
    key = FlowRunFilterIdempotencyKey(any_=[f"recover/{dead.id}"])
    started = await firing.client.read_flow_runs(flow_run_filter=FlowRunFilter(idempotency_key=key))
    assert len(started) == decided


async def test_it_outlasts_an_absence_of_the_prefect_server(firing, monkeypatch):
    newest, away = recurring._newest, [httpx.ConnectError("refused"), httpx.ReadError("cut off")]

    async def sometimes(training):
        if away:
            raise away.pop()
        return await newest(training)

    monkeypatch.setattr(recurring, "_newest", sometimes)
    async with asyncio.timeout(DEADLINE):
        while away:
            await asyncio.sleep(0.05)
    await firing.becomes(Completed())
    await firing.end()
