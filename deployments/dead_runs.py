"""Flow runs whose process on this machine has died without a word, or is to be cancelled and nobody there to do it.

As a rule the Prefect worker that started a process tells its end and cancels it. When that worker has died itself,
Prefect would show the run as Running, or Cancelling, for ever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from uuid import UUID

import psutil
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed, Scheduled

from deployments.flow_processes import flow_processes, forget
from deployments.pools import POOLS
from deployments.processes import ProcessId, end_processes
from flows.closing import close_run
from flows.states import in_states, state_of

REPORT_GRACE = 20.0
"""Seconds that a Prefect worker which lives has to tell the end of a process by itself."""
PENDING_GRACE = 60.0
"""Seconds that a Prefect worker has to make the process of a run that it took."""
CANCEL_GRACE = 30.0
"""Seconds that a process has to end after it was asked to; as long as Prefect gives it."""


class DeadRuns:
    """Looks after the flow runs whose processes were started on this machine."""

    def __init__(self) -> None:
        self._dead_since: dict[UUID, float] = {}
        self._watcher: dict[UUID, ProcessId] = {}
        self._asked_at: dict[UUID, float] = {}

    async def settle(self, client: PrefectClient, workers: Iterable[ProcessId]) -> None:
        """Look once: tell Prefect of processes that ended, and end cancelled ones that no Prefect worker watches.

        `workers` are the Prefect workers that run; what they watch is theirs, and its end theirs to tell.
        """
        now, watching = time.monotonic(), {worker.pid: worker for worker in workers if worker.running()}
        processes = flow_processes()
        self._dead_since = {run: since for run, since in self._dead_since.items() if run in processes}
        self._watcher = {run: worker for run, worker in self._watcher.items() if run in processes}
        for run, identity in processes.items():
            process = identity.find()
            if process is None:
                watcher = self._watcher.get(run)
                watched = bool(watching) if watcher is None else watcher.running()
                if now - self._dead_since.setdefault(run, now) >= (REPORT_GRACE if watched else 0.0):
                    await self._tell_end(client, run, identity)
            elif (parent := _parent(process)) in watching:
                self._watcher[run] = watching[parent]
            else:
                await self._cancel_if_wanted(client, run, process, now)

    async def release_stuck(self, client: PrefectClient) -> None:
        """Offer runs anew that a Prefect worker took and then died before it made their process."""
        taken = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=in_states([StateType.PENDING])),
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=list(POOLS))),
        )
        processes = flow_processes()
        for run in taken:
            age = time.time() - run.state.timestamp.timestamp() if run.state is not None else 0.0
            if run.id not in processes and age > PENDING_GRACE:
                await client.set_flow_run_state(run.id, Scheduled(), force=True)

    async def _cancel_if_wanted(self, client: PrefectClient, run: UUID, process: psutil.Process, now: float) -> None:
        flow_run = await _read(client, run)
        if flow_run is None or state_of(flow_run) != StateType.CANCELLING:
            return
        with suppress(psutil.NoSuchProcess):
            if run not in self._asked_at:
                self._asked_at[run] = now
                process.terminate()
            elif now - self._asked_at[run] > CANCEL_GRACE:
                process.kill()

    async def _tell_end(self, client: PrefectClient, run: UUID, process: ProcessId) -> None:
        flow_run = await _read(client, run)
        asked = self._asked_at.pop(run, None) is not None
        state = flow_run.state if flow_run is not None else None
        if flow_run is not None and state is not None:
            if state.type == StateType.CANCELLING or (asked and not state.is_completed()):
                await close_run(client, flow_run, Cancelled(message="Cancelled; its process has ended."))
            elif not state.is_final():
                message = f"Its process {process.pid} on {os.uname().nodename} ended without a word."
                await close_run(client, flow_run, Crashed(message=message))
        forget(run)


def end_flow_processes(timeout: float) -> int:
    """End all processes of flow runs that were started on this machine and still run; returns how many there were."""
    running = [process for process in flow_processes().values() if process.running()]
    end_processes(running, timeout)
    return len(running)


async def _read(client: PrefectClient, run: UUID) -> FlowRun | None:
    try:
        return await client.read_flow_run(run)
    except ObjectNotFound:
        return None


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0
