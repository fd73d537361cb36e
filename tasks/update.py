"""The last task of a step: the learner trains and publishes the next policy version."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.training import stages
from gyre_core.training.run import TrainingRun


@task(task_run_name="update-{step:06d}", cache_policy=NO_CACHE, persist_result=False)
async def update(run: str, step: int) -> str:
    """Train on the step's minibatches and commit the step; returns the policy version that it leaves."""
    return await stages.update(TrainingRun.of(run), step)
