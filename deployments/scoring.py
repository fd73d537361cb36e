"""Where the commands that are no flow run the reward functions."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from deployments.local import prefect_api
from flows.scoring import function_runner
from gyre_core.config import GyreConfig
from gyre_core.rewards.runner import FunctionRunner


@contextmanager
def configured_runner(config: GyreConfig) -> Generator[FunctionRunner | None]:
    """What runs the reward functions; None for processes beside this one.

    Ray's processes report to a Prefect server, which is up for as long as the block takes.
    """
    runner = function_runner(config)
    if runner is None:
        yield None
        return
    with prefect_api():
        yield runner
