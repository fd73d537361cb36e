"""A rollout worker as a flow run: it lives as long as its engine, and takes requests from the run's storage."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import time

import prefect.runtime.flow_run
import psutil
from prefect import flow, tags

from blocks.storage import open_data_storage
from flows.scoring import function_runner
from flows.termination import cancelled_by_sigterm
from gyre_core.cluster.fleet import worker_name
from gyre_core.rollout.build import open_worker, read_config
from gyre_core.rollout.serving import ClaimedRequest
from gyre_core.rollout.work import RolloutWorker
from tasks.generate import generate
from tasks.score import score


@flow(flow_run_name="worker-{slot:03d}.{generation}", persist_result=False, validate_parameters=False)
async def rollout_worker(run: str, storage: str, slot: int, generation: int, standby: bool = False) -> str:
    """Generate and score for the run `run`, whose data lies at `storage`, until asked to go; returns why it went.

    `slot` and `generation` name the worker within the run; a `standby` one waits, warm, until it is promoted.
    Raises BrokenWorkerError when everything it tries fails.
    """
    name = worker_name(slot, generation)
    token = f"{name} {platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
    data = await open_data_storage(storage)
    config = await asyncio.to_thread(read_config, data)
    worker = RolloutWorker(
        name,
        token,
        data,
        config.rollout,
        flow_run=str(prefect.runtime.flow_run.id or ""),
        standby=standby,
        # The process was begun for this flow run alone.
        start={"process": time.time() - psutil.Process().create_time()},
    )

    async def answer(claimed: ClaimedRequest) -> bool:
        await generate(name, claimed.name)
        return await score(name, claimed.name)

    with tags(run), cancelled_by_sigterm():
        return await worker.run(lambda: open_worker(config, data, token, function_runner(config)), answer)
