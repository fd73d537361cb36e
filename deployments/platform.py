"""The platform of this machine as commands see it: `gyre up`, `gyre down`, and a run that needs both around itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

from prefect.settings import get_current_settings

from deployments import users
from deployments.database import DATABASE_VARIABLE, server_url
from deployments.dead_runs import end_flow_processes
from deployments.exit_codes import USER_ERROR
from deployments.home import gyre_home, last_lines, locked
from deployments.local import (
    START_TIMEOUT,
    configured_api,
    end_unused_server,
    prefect_api,
    running_server,
    using_api,
)
from deployments.platform_state import PlatformError, PlatformState, owners_folder, report_file, state_file
from deployments.processes import end_processes, start_process, wait_for_end
from deployments.supervisor import (
    DRAIN_TIMEOUT,
    ONLINE_TIMEOUT,
    WORKER_STOP_TIMEOUT,
)

DEFAULT_PORT = 4200
"""Port of the server that `gyre up` starts, Prefect's usual one."""
UP_TIMEOUT = START_TIMEOUT + ONLINE_TIMEOUT + 60.0
"""Seconds until everything must be up; the single parts end sooner, with their own reasons."""
DOWN_TIMEOUT = DRAIN_TIMEOUT + 2 * WORKER_STOP_TIMEOUT + 60.0
"""Seconds until everything must have ended."""
_LOG_LINES = 15


def running_platform() -> PlatformState | None:
    """The platform whose supervisor lives, if any; one that is about to end is waited for."""
    state = PlatformState.load()
    if state is None or not state.running:
        return None
    if state.stage == "stopping" and wait_for_end(state.supervisor, DOWN_TIMEOUT):
        return None
    return state


@contextlib.contextmanager
def alone() -> Generator[None]:
    """Hold off other commands that would start or end the platform, in a `with` block."""
    with locked(gyre_home() / "starting.lock", UP_TIMEOUT + DOWN_TIMEOUT):
        yield


def start_platform(*, port: int | None = None, database: str | None = None, owned: bool = False) -> PlatformState:
    """Start everything and wait until it is ready, `alone`.

    `port` is that of a server that has to be started (default: any that is free), `database` the URL of its PostgreSQL;
    an `owned` platform ends with the last process that is in `owners_folder`. Raises ValueError for a user's mistake
    and PlatformError for anything that did not come up; then nothing is left running, as after Ctrl-C.
    """
    if database is not None:
        server_url(database)
        _refuse_running_server("--database")
    elif port is not None:
        _refuse_running_server("--port")
    environment = {**os.environ, **({DATABASE_VARIABLE: database} if database else {})}
    command = [sys.executable, "-m", "deployments.supervisor"]
    command += ["--port", str(port)] if port is not None else []
    command += ["--owned"] if owned else []
    report_file().unlink(missing_ok=True)
    supervisor = start_process(command, _log(), environment)
    try:
        return _wait_until_ready(supervisor)
    except BaseException:
        with contextlib.suppress(subprocess.TimeoutExpired):
            supervisor.terminate()
            supervisor.wait(DOWN_TIMEOUT)
        raise


def clean_up(*, end_flows: bool) -> bool:
    """End what a supervisor that died has left; returns whether there was anything.

    Without `end_flows`, flow runs go on: the next supervisor looks after them.
    """
    state = PlatformState.load()
    if state is None or state.running:
        return False
    if end_flows:
        end_processes(state.worker_processes(), WORKER_STOP_TIMEOUT)
        end_flow_processes(WORKER_STOP_TIMEOUT)
        if state.local:
            end_unused_server()
    for worker in state.worker_processes():
        # Asked to end, a Prefect worker would end its flow runs too; killed, it leaves them alone.
        if process := worker.find():
            process.kill()
    state_file().unlink(missing_ok=True)
    return True


def stop_platform() -> str | None:
    """Drain and end everything that `start_platform` started; returns remarks of it, or None when nothing ran.

    Raises PlatformError when the supervisor does not end in time; then it was killed, and the rest was ended.
    """
    state = PlatformState.load()
    if state is None:
        return None
    supervisor = state.supervisor.find()
    if supervisor is None:
        clean_up(end_flows=True)
        return "its supervisor had died; what it left was ended"
    supervisor.terminate()
    if not wait_for_end(state.supervisor, DOWN_TIMEOUT):
        supervisor.kill()
        wait_for_end(state.supervisor, 5.0)
        clean_up(end_flows=True)
        raise PlatformError(f"the supervisor did not end within {DOWN_TIMEOUT:.0f} s and was killed, with the rest")
    return _report()


@contextlib.contextmanager
def local_platform(keep_server: bool = False) -> Generator[str]:
    """The API URL of a Prefect that runs rollout workers, in a `with` block.

    That is the configured API, the platform that `gyre up` started, or one that runs share: the first starts it, and it
    ends after the last, or with its process; `keep_server` leaves its server running. Raises like `start_platform`.
    """
    if configured_api() is not None:
        with prefect_api() as url:
            yield url
        return
    users.join(owners_folder())
    try:
        with alone():
            state = running_platform()
            if state is None:
                clean_up(end_flows=False)
                state = start_platform(owned=True)
        with contextlib.ExitStack() as api:
            if state.local:
                api.enter_context(prefect_api(keep_server))
            else:
                api.enter_context(using_api(state.api_url))
            yield state.api_url
    finally:
        users.leave(owners_folder())
        _end_if_unused()


def _end_if_unused() -> None:
    with alone():
        state = running_platform()
        if state is not None and state.owned and not users.living(owners_folder()):
            stop_platform()


def _wait_until_ready(supervisor: subprocess.Popen[bytes]) -> PlatformState:
    deadline = time.monotonic() + UP_TIMEOUT
    while supervisor.poll() is None:
        state = PlatformState.load()
        if state is not None and state.supervisor.pid == supervisor.pid and state.stage == "ready":
            return state
        if time.monotonic() > deadline:
            raise PlatformError(
                f"nothing is ready after {UP_TIMEOUT:.0f} s; the end of the log:\n{last_lines(_log(), _LOG_LINES)}"
            )
        time.sleep(0.1)
    reason = _report() or f"the supervisor ended early; the end of its log:\n{last_lines(_log(), _LOG_LINES)}"
    raise ValueError(reason) if supervisor.returncode == USER_ERROR else PlatformError(reason)


def _refuse_running_server(option: str) -> None:
    server = running_server()
    if server is not None and not get_current_settings().api.url:
        raise ValueError(
            f"{option} is for a server that is still to be started, and one runs at {server.api_url}; leave the option "
            "out, or end that server with `gyre stop-server`"
        )


def _report() -> str:
    try:
        return report_file().read_text().strip()
    except FileNotFoundError:
        return ""


def _log() -> Path:
    return gyre_home() / "logs" / "supervisor.log"
