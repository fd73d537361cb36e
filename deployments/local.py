"""A Prefect server on this machine: started when there is none, shared by several runs, ended by the last.

The server listens on loopback, with settings that make short steps cheap: by default its services write
task runs and events one at a time, which costs two seconds a step. Its state lies in `~/.gyre/server`
(`GYRE_HOME` moves it): the database, the log, and `server.json`, which names the process and its address.
A run that uses the server leaves a file named after its process in `users/`; whoever leaves last ends the server,
unless it is to be kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

START_TIMEOUT = 90.0
"""Seconds until a server must answer."""
STOP_TIMEOUT = 15.0
"""Seconds that a server has to end by itself."""

SERVER_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "2",
    "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    "DO_NOT_TRACK": "1",
}
"""Environment of a server that Gyre starts."""

CLIENT_SETTINGS = {
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
}
"""Environment of a run on such a server."""

_started: list[subprocess.Popen[bytes]] = []
# Handles of the servers that this process started: dropping one while the server runs is a ResourceWarning.


class ServerStartError(RuntimeError):
    """The server did not come up; carries the end of its log."""


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running server: its process, when that process began (seconds since 1970), and its API's URL."""

    pid: int
    started_at: float
    api_url: str

    def running(self) -> bool:
        """Whether the very process still runs."""
        return _is_running(self.pid, self.started_at)

    def comes_up(self) -> bool:
        """Wait until the server answers; returns False when its process ends first or START_TIMEOUT passes.

        A server that answers late may be a busy one that other runs use.
        """
        deadline = time.monotonic() + START_TIMEOUT
        while self.running() and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.api_url}/health", timeout=5.0).status_code == 200:
                    return True
            time.sleep(0.1)
        return False


@contextlib.contextmanager
def prefect_api(keep_server: bool = False) -> Generator[str]:
    """The API URL to use in a `with` block: the configured one, or that of a local server.

    A local server is started or shared as this module says; `keep_server` leaves it running.
    Raises ValueError when the configured one does not answer, and ServerStartError when a local one does not come up.
    """
    configured = get_current_settings().api.url
    if configured:
        with get_client(sync_client=True) as client:
            if error := client.api_healthcheck():
                raise ValueError(
                    f"the Prefect API at {configured} does not answer ({error}); start it, or unset PREFECT_API_URL, "
                    "in the Prefect profile too, for a server on this machine"
                )
        yield configured
        return
    home = _home()
    with _locked(home):
        server = _running_server(home) or _start_server(home)
        user = home / "users" / str(os.getpid())
        user.parent.mkdir(exist_ok=True)
        _write_whole(user, str(psutil.Process().create_time()))
    try:
        with _environment(CLIENT_SETTINGS), temporary_settings({PREFECT_API_URL: server.api_url}):
            yield server.api_url
    finally:
        with _locked(home):
            user.unlink(missing_ok=True)
            if keep_server:
                (home / "keep").touch()
            if not _users(home) and not (home / "keep").exists():
                _stop_server(home)


def stop_local_server() -> bool:
    """End the local server, kept or not; returns whether there was one."""
    home = _home()
    with _locked(home):
        return _stop_server(home)


def _home() -> Path:
    home = Path(os.environ.get("GYRE_HOME", Path.home() / ".gyre")) / "server"
    home.mkdir(parents=True, exist_ok=True)
    return home


@contextlib.contextmanager
def _locked(home: Path) -> Generator[None]:
    deadline = time.monotonic() + START_TIMEOUT + STOP_TIMEOUT
    with (home / "lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process holds {home / 'lock'}; end it, or set GYRE_HOME") from None
                time.sleep(0.1)
        yield


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _running_server(home: Path) -> LocalServer | None:
    try:
        server = LocalServer(**json.loads((home / "server.json").read_text()))
    except FileNotFoundError:
        return None
    return server if server.comes_up() else None


def _start_server(home: Path) -> LocalServer:
    _stop_server(home)
    port = _free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
        **SERVER_SETTINGS,
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
    }
    command = [sys.executable, "-m", "uvicorn", "--factory", "deployments.server:create_app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    log = home / "server.log"
    with log.open("ab") as output:
        # A session of its own, so that Ctrl-C ends the run first and the server after it.
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    _started.append(process)
    server = LocalServer(process.pid, psutil.Process(process.pid).create_time(), environment["PREFECT_API_URL"])
    # Named before it answers: a run that is killed while it waits leaves no server that nobody knows.
    _write_whole(home / "server.json", json.dumps(asdict(server)))
    if not server.comes_up():
        process.kill()
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ServerStartError(f"the Prefect server did not come up; the end of {log}:\n{tail}")
    return server


def _stop_server(home: Path) -> bool:
    """End the server that `server.json` names, with its children, if it still is that process."""
    (home / "keep").unlink(missing_ok=True)
    try:
        server = LocalServer(**json.loads((home / "server.json").read_text()))
    except FileNotFoundError:
        return False
    if not server.running():
        return False
    process = psutil.Process(server.pid)
    family = [process, *process.children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    _, stubborn = psutil.wait_procs(family, timeout=STOP_TIMEOUT)
    for remaining in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            remaining.kill()
    for handle in _started:
        handle.poll()  # Takes note that it ended.
    (home / "server.json").unlink(missing_ok=True)
    return True


def _users(home: Path) -> list[int]:
    """Processes that use the server; files of processes that died without leaving are removed."""
    users: list[int] = []
    for file in (home / "users").glob("[0-9]*"):
        if _is_running(int(file.name), float(file.read_text())):
            users.append(int(file.name))
        else:
            file.unlink(missing_ok=True)
    return users


def _is_running(pid: int, started_at: float) -> bool:
    """Whether the process that began at `started_at` runs; another one may have its id by now."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started_at) <= 1.0
    except psutil.NoSuchProcess:
        return False


def _write_whole(file: Path, text: str) -> None:
    """Write a file so that whoever is killed in between leaves the old one, or none."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(file)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
