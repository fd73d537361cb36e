"""The Prefect workers of this machine, one for each pool."""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import WorkerFilter, WorkerFilterStatus

from deployments.flow_processes import LOG_SETTINGS, flow_environment
from deployments.home import gyre_home
from deployments.processes import ProcessId, start_process

WORKER_SETTINGS = {
    "PREFECT_WORKER_QUERY_SECONDS": "1",
    "PREFECT_WORKER_ENABLE_CANCELLATION": "true",
    **LOG_SETTINGS,
}
"""Environment of the workers, and of the flows that they run: by default a worker asks for work every ten seconds."""


def start_prefect_worker(pool: str, api_url: str) -> ProcessId:
    """Start the process worker of a pool."""
    command = [sys.executable, "-m", "prefect", "worker", "start"]
    command += ["--pool", pool, "--type", "process", "--name", worker_name(pool)]
    environment = {**os.environ, **WORKER_SETTINGS, **flow_environment(), "PREFECT_API_URL": api_url}
    return ProcessId.of(start_process(command, worker_log(pool), environment).pid)


def worker_name(pool: str) -> str:
    """The name of this machine's worker, and of this `GYRE_HOME`'s, in a pool that others may serve too."""
    home = zlib.crc32(str(gyre_home()).encode())
    return f"{pool}-{os.uname().nodename}-{home:08x}"


def worker_log(pool: str) -> Path:
    """The log of a pool's worker."""
    return gyre_home() / "logs" / f"{pool}.log"


async def is_online(client: PrefectClient, pool: str) -> bool:
    """Whether the server has heard of this machine's worker of a pool."""
    workers = await client.read_workers_for_work_pool(
        pool, worker_filter=WorkerFilter(status=WorkerFilterStatus(any_=["ONLINE"]))
    )
    return any(worker.name == worker_name(pool) for worker in workers)
