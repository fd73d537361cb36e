"""The local server's books: who uses it, which process it is, and when it ends."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import psutil
import pytest
from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL, temporary_settings
from websockets.sync.server import serve

from deployments import local, users


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home without a server; whatever is started there ends with the test."""
    monkeypatch.setenv("GYRE_HOME", str(tmp_path))
    (tmp_path / "server" / "users").mkdir(parents=True)
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        yield tmp_path / "server"
        local.stop_local_server()


@pytest.fixture
def other_process():
    """A process that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


def ended_process():
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def use(home, pid, started_at):
    (home / "users" / str(pid)).write_text(str(started_at))


def name_server(home, pid, started_at):
    server = {"pid": pid, "started_at": started_at, "api_url": "http://127.0.0.1:9/api"}
    (home / "server.json").write_text(json.dumps(server))


def test_only_live_processes_count_as_users(home, other_process):
    """Files of ended processes go, and so do those whose id another process has by now."""
    use(home, os.getpid(), psutil.Process().create_time())
    use(home, ended_process(), 1000.0)
    use(home, other_process.pid, other_process.create_time() - 3600)
    (home / "users" / ".123.unfinished").write_text("")
    assert users.living(home / "users") == [os.getpid()]
    assert [file.name for file in (home / "users").glob("[0-9]*")] == [str(os.getpid())]


def test_a_process_that_has_the_id_of_an_ended_server_is_left_alone(home, other_process):
    name_server(home, other_process.pid, other_process.create_time() - 3600)
    assert local._running_server(home) is None
    assert not local.stop_local_server()
    assert other_process.is_running()


def test_a_server_that_ended_is_no_server(home):
    assert not local.stop_local_server()
    name_server(home, ended_process(), 1000.0)
    assert local._running_server(home) is None
    assert not local.stop_local_server()


def test_stopping_ends_the_named_process(home, other_process):
    name_server(home, other_process.pid, other_process.create_time())
    (home / "keep").touch()
    assert local.stop_local_server()
    assert not other_process.is_running() or other_process.status() == psutil.STATUS_ZOMBIE
    assert not (home / "server.json").exists()
    assert not (home / "keep").exists()


class Answer(BaseHTTPRequestHandler):
    """Says yes to every question."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, *arguments):
        pass


def test_a_configured_api_is_used_as_it_is(home):
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        configured = f"http://127.0.0.1:{server.server_port}/api"
        with temporary_settings({PREFECT_API_URL: configured}), local.prefect_api() as url:
            assert url == configured
        server.shutdown()
        thread.join()
    assert not (home / "server.json").exists()


def test_a_configured_api_that_does_not_answer_is_told_before_anything_starts(home):
    dead = temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"})
    with dead, pytest.raises(ValueError, match=r"127.0.0.1:9/api does not answer"), local.prefect_api():
        pass
    assert not (home / "server.json").exists()


def test_a_server_that_does_not_come_up_is_told_with_its_log(home, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (home / "server.log").write_text("the reason\n")
    with pytest.raises(local.ServerStartError, match="the reason"), local.prefect_api():
        pass
    assert not list((home / "users").iterdir())


def test_the_last_user_ends_the_server(home, other_process):
    """One that stays in use is shared by the next run, kept if asked for, and ended by whoever is last."""
    use(home, other_process.pid, other_process.create_time())
    with local.prefect_api() as url:
        server = json.loads((home / "server.json").read_text())
        assert url == server["api_url"]
        assert url.startswith("http://127.0.0.1:")
        assert PREFECT_API_URL.value() == url
        assert set(users.living(home / "users")) == {os.getpid(), other_process.pid}
    assert PREFECT_API_URL.value() != url
    assert httpx.get(f"{url}/health").status_code == 200
    other_process.kill()
    with local.prefect_api() as again:
        assert (again, json.loads((home / "server.json").read_text())) == (url, server)
    assert not psutil.pid_exists(server["pid"]) or psutil.Process(server["pid"]).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@contextlib.contextmanager
def event_listener():
    """The URL of an API that only takes events, and the names of those that came."""
    came = []

    def refuse_other_requests(connection, request):
        return None if "Upgrade" in request.headers else connection.respond(404, "")

    def take(connection):
        for message in map(json.loads, connection):
            if message.get("type") == "auth":
                connection.send('{"type": "auth_success"}')
            else:
                came.append(message["event"])

    with serve(take, "127.0.0.1", 0, process_request=refuse_other_requests) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}/api", came
        server.shutdown()
        thread.join()


def test_events_go_to_the_api_in_use_and_have_arrived_when_it_is_left():
    """Prefect keeps one sender of events, whose connection stays with the API that it was made for."""

    def emit(name):
        emit_event(name, resource={"prefect.resource.id": "test"})

    with event_listener() as (first, came_first), event_listener() as (second, came_second), local.using_api(first):
        emit("one")
        with local.using_api(second):
            emit("two")
            emit("three")
        emit("four")
    assert came_first == ["one", "four"]
    assert came_second == ["two", "three"]
