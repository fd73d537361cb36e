"""The second task of a rollout worker: completions become a committed segment."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.rollout.work import RolloutWorker


@task(task_run_name="score-{attempt}", cache_policy=NO_CACHE, persist_result=False)
async def score(worker: str, attempt: str) -> bool:
    """Score an attempt's completions and commit them; False when another worker was first."""
    held = RolloutWorker.of(worker).held(attempt)
    await held.score()
    return await held.commit() is not None
