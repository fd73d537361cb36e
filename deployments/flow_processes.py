"""Processes of flow runs on this machine: each leaves its number in a file, and writes a log of its own.

So they are known without asking the server, also after their Prefect worker has died.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil

from deployments.home import gyre_home
from deployments.processes import ProcessId

LOG_SETTINGS = {
    "PREFECT_LOGGING_EXTRA_LOGGERS": "gyre_core,flows",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}
"""Environment that sends Gyre's own messages, alarms and scaling decisions among them, to the run's log in Prefect.

Those of threads that outlive single flow runs stay in the process's log.
"""

_WRITE_DELAY = 10.0
# Seconds that may pass from the start of a process until its file is written, on a busy machine.
_LOGS_KEPT = 200


def process_variables() -> dict[str, Any]:
    """Job variables with which a process worker runs a flow: at once, with a log and a file of its own.

    By default it first starts a process that prepares a workspace, which costs two seconds, and reads the output over
    a pipe, so that a flow that prints fails once the Prefect worker has died.
    """
    script = (
        'if [ -z "$GYRE_FLOWS" ]; then exec python -m prefect.engine; fi; '
        'run="$GYRE_FLOWS/$PREFECT__FLOW_RUN_ID"; echo $$ >"$run.pid"; cd "$GYRE_FOLDER" && '
        'exec "$GYRE_PYTHON" -m prefect.engine >>"$run.log" 2>&1'
    )
    return {"command": shlex.join(["/bin/sh", "-c", script]), "stream_output": False, "env": LOG_SETTINGS}


def flow_environment() -> dict[str, str]:
    """What the supervisor's Prefect workers have in their environment for `process_variables`.

    Flows run in the folder of the process that calls this. A worker without it, started by hand, runs them as Prefect
    does by default.
    """
    return {"GYRE_FLOWS": str(flow_home()), "GYRE_FOLDER": str(Path.cwd()), "GYRE_PYTHON": sys.executable}


def flow_home() -> Path:
    """Folder of the processes' files and logs; made if absent."""
    home = gyre_home() / "flows"
    home.mkdir(exist_ok=True)
    return home


def flow_processes() -> dict[UUID, ProcessId]:
    """The process of each flow run that was not forgotten yet, whether it runs or not."""
    found: dict[UUID, ProcessId] = {}
    for file in flow_home().glob("*.pid"):
        try:
            pid, written_at = int(file.read_text()), file.stat().st_mtime
        except (FileNotFoundError, ValueError):
            continue  # Not written yet, or forgotten meanwhile.
        found[UUID(file.stem)] = ProcessId(pid, _start_time(pid, written_at))
    return found


def forget(flow_run: UUID) -> None:
    """Forget a process that has ended; its log stays."""
    (flow_home() / f"{flow_run}.pid").unlink(missing_ok=True)


def was_started_here(flow_run: UUID) -> bool:
    """Whether the process of a flow run was one of this machine, by the log that it left."""
    return (flow_home() / f"{flow_run}.log").exists()


def prune_logs() -> None:
    """Remove all but the newest logs of processes that have ended."""
    logs = sorted(flow_home().glob("*.log"), key=lambda file: file.stat().st_mtime, reverse=True)
    for log in logs[_LOGS_KEPT:]:
        if not log.with_suffix(".pid").exists():
            log.unlink(missing_ok=True)


def _start_time(pid: int, written_at: float) -> float:
    """When the process that wrote its number at `written_at` began; `written_at` itself when it has ended."""
    try:
        started_at = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return written_at
    # Another process that has the number by now began later, or, after a start of the machine, at any other time.
    return started_at if -1.0 <= written_at - started_at <= _WRITE_DELAY else written_at
