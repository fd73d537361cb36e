"""Flows that run in processes of a real platform, with no model in them."""

import asyncio
import os
import signal
from dataclasses import replace

import prefect.runtime.flow_run
from prefect import flow, task

from gyre_core.cluster.fleet import drain_requested, promoted, worker_name
from gyre_core.cluster.heartbeat import WorkerBeat, worker_heart
from gyre_core.storage import open_storage

LOOK = 0.05
BEAT_TIMEOUT = 1.0


@flow(flow_run_name="worker-{slot:03d}.{generation}", persist_result=False)
async def rollout_worker(run: str, storage: str, slot: int, generation: int, standby: bool = False) -> str:
    """Takes part in a fleet as a rollout worker does; dies at its start while there is an object `broken`."""
    data, name = open_storage(storage), worker_name(slot, generation)
    flow_run = str(prefect.runtime.flow_run.id)
    beat = WorkerBeat(worker=name, token=name, flow_run=flow_run, host="", pid=os.getpid(), state="starting")
    heart = worker_heart(data, BEAT_TIMEOUT, lambda: beat)
    heart.start()
    if data.exists("broken"):
        raise RuntimeError("no such model")
    beat = replace(beat, state="standby" if standby else "ready", ready_seconds=1.0)
    while not drain_requested(data, name):
        if promoted(data, name):
            beat = replace(beat, state="ready")
        await asyncio.sleep(LOOK)
    beat = replace(beat, state="ended")
    heart.stop()
    return "drained"


@task(persist_result=False)
async def rest(seconds: float) -> None:
    await asyncio.sleep(seconds)


@flow(persist_result=False)
async def child(seconds: float) -> None:
    await rest(seconds)


@flow(persist_result=False)
async def nap(seconds: float, stubborn: bool = False) -> None:
    """Sleeps in a task of a flow below; a stubborn one does not mind being asked to end."""
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        await asyncio.sleep(seconds)
    await child(seconds)
