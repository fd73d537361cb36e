"""Evaluation on held-out prompts, as a flow of its own."""

from __future__ import annotations

from prefect import flow

from gyre_core.training.run import TrainingRun


@flow(flow_run_name="evaluate-{step:06d}", persist_result=False, validate_parameters=False)
async def evaluate(run: str, step: int) -> dict[str, float]:
    """Evaluate the policy as step `step` left it (0: as it starts); returns the metrics."""
    return await TrainingRun.of(run).evaluate(step)
