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


class ServerStartError(RuntimeError):
    """The server did not come up; carries the end of its log."""


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running server: its process, when that process began (seconds since 1970), and its API's URL."""

    pid: int
    started_at: float
    api_url: str

    @property
    def ui_url(self) -> str:
        """Where a browser finds the server."""
        return self.api_url.removesuffix("/api")

    def alive(self) -> bool:
        """Whether the very process still runs and answers."""
        try:
            if abs(psutil.Process(self.pid).create_time() - self.started_at) > 1.0:
                return False
            return httpx.get(f"{self.api_url}/health", timeout=5.0).status_code == 200
        except (psutil.NoSuchProcess, httpx.HTTPError):
            return False


@contextlib.contextmanager
def prefect_api(keep_server: bool = False) -> Generator[str]:
    """The API URL to use in a `with` block: the configured one, or that of a local server.

    A local server is started or shared as this module says; `keep_server` leaves it running.
    Raises ServerStartError when it does not come up.
    """
    configured = get_current_settings().api.url
    if configured:
        yield configured
        return
    home = _home()
    with _locked(home):
        server = _running_server(home) or _start_server(home)
        user = home / "users" / str(os.getpid())
        user.parent.mkdir(exist_ok=True)
        user.write_text(str(psutil.Process().create_time()))
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
    return server if server.alive() else None


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
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    log = home / "server.log"
    with log.open("ab") as output:
        # A session of its own, so that Ctrl-C ends the run first and the server after it.
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    server = LocalServer(process.pid, psutil.Process(process.pid).create_time(), environment["PREFECT_API_URL"])
    deadline = time.monotonic() + START_TIMEOUT
    while not server.alive():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise ServerStartError(f"the Prefect server did not come up; the end of {log}:\n{tail}")
        time.sleep(0.1)
    (home / "server.json").write_text(json.dumps(asdict(server)))
    return server


def _stop_server(home: Path) -> bool:
    """End the server that `server.json` names, with its children, if it still is that process."""
    (home / "keep").unlink(missing_ok=True)
    try:
        server = LocalServer(**json.loads((home / "server.json").read_text()))
        process = psutil.Process(server.pid)
    except (FileNotFoundError, psutil.NoSuchProcess):
        return False
    if abs(process.create_time() - server.started_at) > 1.0:
        return False
    family = [process, *process.children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    _, stubborn = psutil.wait_procs(family, timeout=STOP_TIMEOUT)
    for remaining in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            remaining.kill()
    (home / "server.json").unlink(missing_ok=True)
    return True


def _users(home: Path) -> list[int]:
    """Processes that use the server; files of processes that died without leaving are removed."""
    users: list[int] = []
    for file in (home / "users").glob("*"):
        try:
            if abs(psutil.Process(int(file.name)).create_time() - float(file.read_text())) <= 1.0:
                users.append(int(file.name))
                continue
        except psutil.NoSuchProcess:
            pass
        file.unlink(missing_ok=True)
    return users


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
