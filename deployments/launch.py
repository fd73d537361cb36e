"""Starts the train flow from the command line: finds or starts a Prefect server, and turns the outcome into words."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any, cast

from prefect import tags
from prefect.client.schemas.objects import State
from prefect.logging.handlers import APILogHandler
from rich.console import Console

from deployments.exit_codes import FAILED, INTERRUPTED, USER_ERROR
from deployments.local import prefect_api
from flows.train import train
from gyre_core.config import GyreConfig
from gyre_core.monitor.progress import summary_table
from gyre_core.training.run_folder import RunFolder


def run_training(config: GyreConfig, *, resume: bool, run_id: str | None, keep_server: bool) -> int:
    """Train on the configured Prefect API, or on a local server; returns the process's exit code.

    0: completed, 1: failed or stopped by an alarm, 2: the user's mistake, 130: interrupted.
    """
    server_log = _log_plainly()
    with prefect_api(keep_server) as api_url:
        print(f"Prefect UI: {api_url.removesuffix('/api')}", flush=True)
        with tags(config.experiment.name, *config.experiment.tags):
            state, result = asyncio.run(_train(config, run_id, resume))
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
    print(result, file=sys.stderr)
    return USER_ERROR if isinstance(result, ValueError) else FAILED


async def _train(config: GyreConfig, run_id: str | None, resume: bool) -> tuple[State[Any], object]:
    """The final state of the train flow, and its result or its error."""
    state: State[Any] = await cast(Any, train)(config, run_id=run_id, resume=resume, return_state=True)
    return state, await state.aresult(raise_on_failure=False)


def _log_plainly() -> APILogHandler:
    """Show Gyre's own messages and Prefect's warnings, and send the former to the server; returns what sends them.

    Prefect's lines about every run and task belong in its UI.
    """
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).setLevel(logging.WARNING)
    server_log = APILogHandler()
    for name in ("gyre_core", "flows"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(server_log)
    return server_log
