"""Starts the train flow from the command line: finds or starts a Prefect server, and turns the outcome into words."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from typing import Any, cast

from prefect import tags
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.logging.handlers import APILogHandler
from rich.console import Console

from deployments.exit_codes import FAILED, INTERRUPTED, TERMINATED, USER_ERROR
from deployments.local import prefect_api
from deployments.platform import local_platform
from flows.scoring import function_runner
from flows.train import train
from gyre_core.config import GyreConfig
from gyre_core.monitor.progress import summary_table
from gyre_core.rewards.values import RewardError
from gyre_core.training.build import check_inputs
from gyre_core.training.run import RunFailedError, RunStoppedError
from gyre_core.training.run_folder import RunFolder

RUN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
"""Loggers of Prefect that tell of single runs and tasks."""


def run_training(config: GyreConfig, *, resume: bool, run_id: str | None, keep_server: bool) -> int:
    """Train on the configured Prefect API, or on a local server; returns the process's exit code.

    Launcher `pool` also brings up what runs rollout workers, unless it is there.

    0: completed, 1: failed or stopped by an alarm, 2: the user's mistake, 130: interrupted, 143: terminated.
    """
    server_log = _log_plainly()
    # Before a server starts: most mistakes are told in a moment.
    function_runner(config)
    asyncio.run(check_inputs(config, run_id=run_id, resume=resume))
    with_workers = config.rollout.launcher == "pool"
    with local_platform(keep_server) if with_workers else prefect_api(keep_server) as api_url:
        print(f"Prefect UI: {api_url.removesuffix('/api')}", flush=True)
        with tags(config.experiment.name, *config.experiment.tags):
            try:
                state, result = asyncio.run(_train(config, run_id, resume))
            except TerminationSignal:  # The flow has saved the state after the last whole step.
                print("terminated; go on with --resume", file=sys.stderr)
                return TERMINATED
        # The last log lines travel in the background, and the server may end with this block.
        server_log.flush()
    if state.is_completed():
        folder = RunFolder.find(str(result), config.experiment.output)
        Console().print(summary_table(folder.summary()))
        print(f"run folder: {folder.path}")
        return 0
    if state.is_cancelled():
        print(state.message, file=sys.stderr)
        return INTERRUPTED
    return _explain(cast(BaseException, result))


async def _train(config: GyreConfig, run_id: str | None, resume: bool) -> tuple[State[Any], object]:
    """The final state of the train flow, and its result or its error."""
    state: State[Any] = await cast(Any, train)(config, run_id=run_id, resume=resume, return_state=True)
    return state, await state.aresult(raise_on_failure=False)


def _explain(error: BaseException) -> int:
    """Tell what ended the run in a sentence, an unforeseen error with its traceback; returns the exit code."""
    cause = error.__cause__ if isinstance(error, RunFailedError) else error
    if not isinstance(cause, (ValueError, OSError, RewardError, RunStoppedError)):
        traceback.print_exception(cause)
    print(error, file=sys.stderr)
    return USER_ERROR if isinstance(error, ValueError) else FAILED


def _log_plainly() -> APILogHandler:
    """Show Gyre's own messages and Prefect's warnings, and send the former to the server; returns what sends them.

    Prefect's lines about every run and task, with the tracebacks of those that failed, belong in its UI.
    """
    for name in RUN_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not record.name.startswith(RUN_LOGGERS))
    server_log = APILogHandler()
    for name in ("gyre_core", "flows"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(server_log)
    return server_log
