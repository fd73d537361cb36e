"""The second task of a step: segments become advantages in the pool."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.training import stages
from gyre_core.training.run import TrainingRun


@task(task_run_name="reward-{step:06d}", cache_policy=NO_CACHE, persist_result=False)
async def reward(run: str, step: int) -> int:
    """Admit the step's segments to the pool; returns how many samples came in."""
    return await stages.reward(TrainingRun.of(run), step)
