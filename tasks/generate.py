"""The first task of a rollout worker: a claimed request becomes completions."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.rollout.work import RolloutWorker


@task(task_run_name="generate-{attempt}", cache_policy=NO_CACHE, persist_result=False)
async def generate(worker: str, attempt: str) -> int:
    """Complete the prompts of an attempt that the worker holds; returns the number of completion tokens."""
    return await RolloutWorker.of(worker).held(attempt).generate()
