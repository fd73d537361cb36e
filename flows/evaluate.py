"""Evaluation on held-out prompts, as a flow of its own."""

from __future__ import annotations

import asyncio
import logging

from prefect import flow

from blocks.storage import load_access
from flows.scoring import function_runner
from gyre_core.training.evaluate_run import evaluate_run
from gyre_core.training.run import TrainingRun
from gyre_core.training.run_folder import RunFolder

logger = logging.getLogger(__name__)


@flow(flow_run_name="evaluate-{step:06d}", persist_result=False, validate_parameters=False)
async def evaluate(run: str, step: int) -> dict[str, float]:
    """Evaluate the policy as step `step` left it (0: as it starts); returns the metrics."""
    return await TrainingRun.of(run).evaluate(step)


@flow(name="evaluate", flow_run_name="evaluate-{run}", persist_result=False)
async def evaluate_newest(run: str, output: str = "runs") -> str:
    """Evaluate the newest policy of a run, NAME or NAME/RUN_ID below `output`; returns and logs the figures as text."""
    config = RunFolder.find(run, output).config()
    await load_access(config.storage.block)
    figures = await asyncio.to_thread(evaluate_run, run, output, function_runner(config))
    logger.info("%s", figures)
    return figures
