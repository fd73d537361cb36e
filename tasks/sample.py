"""The third task of a step: minibatches are drawn from the pool."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.training import stages
from gyre_core.training.run import TrainingRun


@task(task_run_name="sample-{step:06d}", cache_policy=NO_CACHE, persist_result=False)
async def sample(run: str, step: int) -> int:
    """Draw the step's minibatches and log them before anything is trained; returns how many there are."""
    return await stages.sample(TrainingRun.of(run), step)
