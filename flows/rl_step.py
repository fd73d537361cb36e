"""One RL step as a flow of four tasks: rollout, reward, sample, update."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

from prefect import flow

from gyre_core.training.run import TrainingRun
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.sample import sample
from tasks.update import update

logger = logging.getLogger(__name__)


@flow(flow_run_name="step-{step:06d}", persist_result=False, validate_parameters=False)
async def rl_step(run: str, step: int) -> str:
    """Take one step of the run with this key; returns the policy version that it leaves.

    A step is a transaction: tried again, it does what is missing and ends with the same weights. It generates beside
    other steps and takes its turn for the rest. An error that no retry can mend is raised again at once.
    """
    owner = TrainingRun.of(run)
    with owner.recording_fatal_errors(), _telling_failure(step):
        await owner.guard.admit(step)
        await rollout(run, step)
        await owner.turns.wait(step)
        await reward(run, step)
        await sample(run, step)
        version = await update(run, step)
        await owner.finish(step)
        return version


@contextmanager
def _telling_failure(step: int) -> Generator[None]:
    """Log a line on an error that fails this try of the step; Prefect has its traceback."""
    try:
        yield
    except Exception as error:
        logger.warning("step %d failed: %s: %s", step, type(error).__name__, str(error).partition("\n")[0])
        raise
