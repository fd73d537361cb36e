"""The first task of a step: prompts become segments of experience."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.training import stages
from gyre_core.training.run import TrainingRun


@task(task_run_name="rollout-{step:06d}", cache_policy=NO_CACHE, persist_result=False)
async def rollout(run: str, step: int) -> int:
    """Produce the step's segments, those that are missing; returns how many requests there are."""
    return await stages.rollout(TrainingRun.of(run), step)
