"""SIGTERM ends a flow whatever its process was doing when the signal came."""

import asyncio
import os
import random
import signal
import time

import pytest
from gyre_processes import GyreProcess, newest_run, wait_until, write_config
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.sorting import FlowRunSort
from tiny_runs import EVERY_STEP

from flows.termination import cancelled_by_sigterm, to_the_end
from gyre_core.checkpoint.retention import Retention
from gyre_core.checkpoint.store import CheckpointStore
from gyre_core.monitor.metrics import read_metrics
from gyre_core.storage import open_storage


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


async def terminate_in_a_task():
    terminate()


@flow(persist_result=False)
async def below():
    asyncio.get_running_loop().call_soon(terminate)
    await asyncio.sleep(60)


async def in_a_callback():
    asyncio.get_running_loop().call_soon(terminate)
    await asyncio.sleep(60)


async def in_a_task_that_nobody_awaits():
    asyncio.create_task(terminate_in_a_task())  # noqa: RUF006
    await asyncio.sleep(60)


async def in_a_flow_below():
    await below()


async def while_the_loop_waits():
    asyncio.get_running_loop().run_in_executor(None, lambda: (time.sleep(0.3), terminate()))
    await asyncio.sleep(60)


@pytest.mark.parametrize("moment", [in_a_callback, in_a_task_that_nobody_awaits, in_a_flow_below, while_the_loop_waits])
async def test_it_is_cancelled_at_any_moment_and_cleans_up(moment, prefect_server):
    cleaned = []

    @flow(persist_result=False)
    async def endless():
        with cancelled_by_sigterm():
            try:
                await moment()
            finally:
                terminate()  # A second one does not disturb the end.
                await asyncio.sleep(0.1)
                cleaned.append(True)

    before = signal.getsignal(signal.SIGTERM)
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(endless())
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) is before


async def test_work_that_is_not_to_be_left_half_done_is_done_however_often_its_task_is_cancelled():
    done = []

    async def save():
        await asyncio.sleep(0.3)
        done.append(True)

    task = asyncio.create_task(to_the_end(save()))
    for _ in range(3):
        await asyncio.sleep(0.05)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [True]


async def test_work_that_fails_raises_its_own_error():
    async def fail():
        await asyncio.sleep(0)
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        await to_the_end(fail())


async def test_a_run_ends_with_its_code_and_a_checkpoint_whenever_it_is_terminated(tmp_path, prefect_server):
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    config = write_config(tmp_path, experiment={"steps": 1000}, checkpoint=EVERY_STEP)
    for attempt in range(3):
        resume = ["--resume"] if attempt else []
        process = GyreProcess(
            tmp_path / f"{attempt}.log", "train", "--config", str(config), *resume, api_url=prefect_server
        )
        wait_until(lambda: list(tmp_path.glob(f"runs/tiny/*/learner/epochs/{attempt + 1:04d}")), "an epoch")  # noqa: B023
        first = len(read_metrics(newest_run(tmp_path).path))
        wait_until(lambda: len(read_metrics(newest_run(tmp_path).path)) > first + 2, "steps")  # noqa: B023
        time.sleep(rng.uniform(0.0, 0.3))
        process.send(signal.SIGTERM)
        assert process.wait() == 143
        run = newest_run(tmp_path)
        newest = CheckpointStore(open_storage(run.path), Retention(1)).newest()
        assert newest.step == read_metrics(run.path)[-1].step
    async with get_client() as client:
        found = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[run.key])), sort=FlowRunSort.START_TIME_DESC
        )
    assert found
    assert not [item for item in found if not item.state.is_final()]
