"""A Prefect server on this machine: started when there is none, shared by several runs, ended by the last.

The server listens on loopback, with settings that make short steps cheap: by default its services write
task runs and events one at a time, which costs two seconds a step. Its state lies in `~/.gyre/server`
(`GYRE_HOME` moves it): the database, the log, and `server.json`, which names the process and its address.
The environment variable `GYRE_DATABASE_URL` names a PostgreSQL database to use in place of SQLite.
Whoever uses the server, a run or the supervisor of `gyre up`, leaves a file named after its process in `users/`;
whoever leaves last ends the server, unless it is to be kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prefect.client.orchestration import get_client
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from deployments import users
from deployments.database import DATABASE_VARIABLE, check_database, hide_password, server_url
from deployments.home import gyre_home, last_lines, locked, write_whole
from deployments.processes import ProcessId, end_processes, start_process

START_TIMEOUT = 90.0
"""Seconds until a server must answer."""
STOP_TIMEOUT = 15.0
"""Seconds that a server has to end by itself."""
EVENTS_TIMEOUT = 5.0
"""Seconds for which the last events are waited for before an API is left."""

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
    """A server on this machine: its process, and its API's URL."""

    process: ProcessId
    api_url: str

    @classmethod
    def known(cls, home: Path) -> LocalServer | None:
        """The server that `server.json` names, whether it runs or not."""
        try:
            fields = json.loads((home / "server.json").read_text())
        except FileNotFoundError:
            return None
        return cls(ProcessId(fields["pid"], fields["started_at"]), fields["api_url"])

    def remember(self, home: Path) -> None:
        """Name the server in `server.json`."""
        fields = {"pid": self.process.pid, "started_at": self.process.started_at, "api_url": self.api_url}
        write_whole(home / "server.json", json.dumps(fields))

    def comes_up(self) -> bool:
        """Wait until the server answers; returns False when its process ends first or START_TIMEOUT passes.

        A server that answers late may be a busy one that other runs use.
        """
        deadline = time.monotonic() + START_TIMEOUT
        while self.process.running() and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.api_url}/health", timeout=5.0).status_code == 200:
                    return True
            time.sleep(0.1)
        return False


@contextlib.contextmanager
def prefect_api(keep_server: bool = False, port: int | None = None) -> Generator[str]:
    """The API URL to use in a `with` block: the configured one, or that of a local server.

    A local server is started or shared as this module says, a new one at `port` (default: any that is free);
    `keep_server` leaves it running. Raises ValueError when the configured API or the database does not answer or the
    port is in use, and ServerStartError when a local server does not come up.
    """
    if configured := configured_api():
        yield configured
        return
    home = server_home()
    with _locked(home):
        server = _running_server(home) or _start_server(home, port)
        users.join(home / "users")
    try:
        with _environment(CLIENT_SETTINGS), using_api(server.api_url):
            yield server.api_url
    finally:
        with _locked(home):
            users.leave(home / "users")
            if keep_server:
                (home / "keep").touch()
            if not users.living(home / "users") and not (home / "keep").exists():
                _stop_server(home)


@contextlib.contextmanager
def using_api(url: str) -> Generator[None]:
    """Have this process use the Prefect API at `url` in a `with` block, and deliver its events by the end of it.

    Prefect sends events in the background, by a connection that stays with the first API that it was made for.
    """
    EventsWorker.drain_all(timeout=EVENTS_TIMEOUT)
    try:
        with temporary_settings({PREFECT_API_URL: url}):
            yield
    finally:
        EventsWorker.drain_all(timeout=EVENTS_TIMEOUT)


def configured_api() -> str | None:
    """The API of the environment or the Prefect profile, if any; raises ValueError when it does not answer.

    The address of the local server counts as none: it is there to be shown to `prefect`, and comes and goes.
    """
    configured = get_current_settings().api.url
    if configured and configured == _last_address(server_home()):
        return None
    if configured:
        with get_client(sync_client=True) as client:
            if error := client.api_healthcheck():
                raise ValueError(
                    f"the Prefect API at {configured} does not answer ({error}); start it, or unset PREFECT_API_URL, "
                    "in the Prefect profile too, for a server on this machine"
                )
    return configured


def running_server() -> LocalServer | None:
    """The local server whose process runs, if any."""
    server = LocalServer.known(server_home())
    return server if server is not None and server.process.running() else None


def revive_server() -> None:
    """Start the local server again at its address after its process has ended; one that runs is left alone.

    Raises ServerStartError, or ValueError when another process has taken the port.
    """
    home = server_home()
    with _locked(home):
        server = LocalServer.known(home)
        if server is not None and not server.process.running():
            _start_server(home, httpx.URL(server.api_url).port)


def end_unused_server() -> None:
    """End the local server if no process that lives uses it, and it is not to be kept."""
    home = server_home()
    with _locked(home):
        if not users.living(home / "users") and not (home / "keep").exists():
            _stop_server(home)


def stop_local_server() -> bool:
    """End the local server, kept or not; returns whether there was one."""
    home = server_home()
    with _locked(home):
        return _stop_server(home)


def server_home() -> Path:
    """Folder of the local server; made if absent."""
    home = gyre_home() / "server"
    home.mkdir(exist_ok=True)
    return home


def _last_address(home: Path) -> str | None:
    """The API's URL of the local server that was started last."""
    try:
        return (home / "address").read_text()
    except FileNotFoundError:
        return None


def _locked(home: Path) -> AbstractContextManager[None]:
    return locked(home / "lock", START_TIMEOUT + STOP_TIMEOUT)


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
    server = LocalServer.known(home)
    return server if server is not None and server.comes_up() else None


def _start_server(home: Path, port: int | None) -> LocalServer:
    _stop_server(home)
    port = _checked_port(port)
    database = os.environ.get(DATABASE_VARIABLE)
    if database:
        check_database(database)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
        **SERVER_SETTINGS,
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_API_DATABASE_CONNECTION_URL": server_url(database)
        if database
        else f"sqlite+aiosqlite:///{home / 'prefect.db'}",
    }
    command = [sys.executable, "-m", "uvicorn", "--factory", "deployments.server:create_app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    log = home / "server.log"
    process = ProcessId.of(start_process(command, log, environment).pid)
    server = LocalServer(process, environment["PREFECT_API_URL"])
    # Named before it answers: a run that is killed while it waits leaves no server that nobody knows.
    server.remember(home)
    write_whole(home / "address", server.api_url)
    if not server.comes_up():
        end_processes([server.process], timeout=0.0)
        tail = hide_password(last_lines(log, 15), database)
        raise ServerStartError(f"the Prefect server did not come up; the end of {log}:\n{tail}")
    return server


def _stop_server(home: Path) -> bool:
    """End the server that `server.json` names, with its children, if it still is that process."""
    (home / "keep").unlink(missing_ok=True)
    server = LocalServer.known(home)
    if server is None or not server.process.running():
        return False
    end_processes([server.process], STOP_TIMEOUT)
    (home / "server.json").unlink(missing_ok=True)
    return True


def _checked_port(port: int | None) -> int:
    """`port` if it can be listened at, or any free one when it is None; raises ValueError."""
    with socket.socket() as probe:
        # As the server does, so that a port whose last connections are fading away counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port or 0))
        except OSError as error:
            raise ValueError(
                f"port {port} of this machine cannot be used ({error.strerror}); end what listens there, or choose "
                "another one with --port"
            ) from None
        return int(probe.getsockname()[1])
