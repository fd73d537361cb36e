"""Starts the train flow from the command line: finds or starts a Prefect server, and turns the outcome into words."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import traceback
from collections.abc import Generator
from typing import Any, cast

from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW, temporary_settings
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
from gyre_core.training.resume import Origin
from gyre_core.training.run import RunFailedError, RunStoppedError
from gyre_core.training.run_folder import RunFolder

RUN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
"""Loggers of Prefect that tell of single runs and tasks."""
OWN_LOGGERS = ("gyre_core", "flows")
"""Loggers whose lines are shown, and sent to the server."""


def run_training(config: GyreConfig, *, origin: Origin, run_id: str | None, keep_server: bool) -> int:
    """Train on the configured Prefect API, or on a local server; returns the process's exit code.

    Launcher `pool` also brings up what runs rollout workers, unless it is there.

    0: completed, 1: failed or stopped by an alarm, 2: the user's mistake, 130: interrupted, 143: terminated.
    """
    with _plain_log() as server_log:
        # Before a server starts: most mistakes are told in a moment.
        function_runner(config)
        asyncio.run(check_inputs(config, run_id=run_id, origin=origin))
        with_workers = config.rollout.launcher == "pool"
        with local_platform(keep_server) if with_workers else prefect_api(keep_server) as api_url:
            print(f"Prefect UI: {api_url.removesuffix('/api')}", flush=True)
            try:
                state, result = asyncio.run(_train(config, run_id, origin))
            except (TerminationSignal, asyncio.CancelledError):  # The flow has saved the state of the last whole step.
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


async def _train(config: GyreConfig, run_id: str | None, origin: Origin) -> tuple[State[Any], object]:
    """The final state of the train flow, and its result or its error."""
    state: State[Any] = await cast(Any, train)(
        config,
        run_id=run_id,
        resume=origin.resumes,
        resume_step=origin.step,
        resume_from=origin.source,
        return_state=True,
    )
    return state, await state.aresult(raise_on_failure=False)


def _explain(error: BaseException) -> int:
    """Tell what ended the run in a sentence, an unforeseen error with its traceback; returns the exit code."""
    cause = error.__cause__ if isinstance(error, RunFailedError) else error
    if not isinstance(cause, (ValueError, OSError, RewardError, RunStoppedError)):
        traceback.print_exception(cause)
    print(error, file=sys.stderr)
    return USER_ERROR if isinstance(error, ValueError) else FAILED


@contextlib.contextmanager
def _plain_log() -> Generator[APILogHandler]:
    """Show Gyre's own messages and Prefect's warnings, and send the former to the server by what is returned.

    Prefect's lines about every run and task, with the tracebacks of those that failed, belong in its UI.
    """
    shown, server_log = logging.getLogger().handlers, APILogHandler()
    levels = dict.fromkeys(RUN_LOGGERS, logging.WARNING) | dict.fromkeys(OWN_LOGGERS, logging.INFO)
    before = {name: logging.getLogger(name).level for name in levels}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    for handler in shown:
        handler.addFilter(_is_not_of_a_run)
    for name in OWN_LOGGERS:
        logging.getLogger(name).addHandler(server_log)
    try:
        # Threads that outlive single flow runs log too; those lines are shown, and belong to no run in the UI.
        with temporary_settings({PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}):
            yield server_log
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
            logging.getLogger(name).removeHandler(server_log)
        for handler in shown:
            handler.removeFilter(_is_not_of_a_run)


def _is_not_of_a_run(record: logging.LogRecord) -> bool:
    return not record.name.startswith(RUN_LOGGERS)
