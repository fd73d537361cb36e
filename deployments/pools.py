"""The work pools: `gyre-rollout`, `gyre-learner` and `gyre-control`."""

from __future__ import annotations

import contextlib

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import WorkPool
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.workers.process import ProcessWorker

from flows.names import CONTROL_POOL, LEARNER_POOL, ROLLOUT_POOL

POOLS = {
    ROLLOUT_POOL: "Rollout workers of Gyre; the fleet moves the concurrency limit.",
    LEARNER_POOL: "Training runs of Gyre, one at a time.",
    CONTROL_POOL: "Resizes, evaluations and recurring jobs of Gyre.",
}
"""Name and description of each pool."""
CONCURRENCY_LIMITS = {LEARNER_POOL: 1}
"""Limit that a pool is made with; the others begin without one."""


async def ensure_pools(client: PrefectClient) -> None:
    """Make the pools that are missing, for process workers.

    Raises ValueError, before anything is made, when one of them is there with another type.
    """
    present = {name: await _read_pool(client, name) for name in POOLS}
    for pool in present.values():
        if pool is not None and pool.type != ProcessWorker.type:
            raise ValueError(
                f"the work pool {pool.name} is of type {pool.type}, and Gyre needs {ProcessWorker.type} here; delete "
                f"it with `prefect work-pool delete {pool.name}`, or use another Prefect server"
            )
    for name, pool in present.items():
        if pool is None:
            await _make_pool(client, name)


async def _read_pool(client: PrefectClient, name: str) -> WorkPool | None:
    try:
        return await client.read_work_pool(name)
    except ObjectNotFound:
        return None


async def _make_pool(client: PrefectClient, name: str) -> None:
    pool = WorkPoolCreate(
        name=name,
        type=ProcessWorker.type,
        description=POOLS[name],
        base_job_template=ProcessWorker.get_default_base_job_template(),
    )
    if name in CONCURRENCY_LIMITS:
        pool.concurrency_limit = CONCURRENCY_LIMITS[name]
    # Another `gyre up` on the same server may be faster.
    with contextlib.suppress(ObjectAlreadyExists):
        await client.create_work_pool(pool)
