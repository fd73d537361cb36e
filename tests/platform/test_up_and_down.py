"""`gyre up` and `gyre down` from the shell: what is told, what runs, and that nothing is left behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest
from platform_tools import DEADLINE, TOYS, all_processes, reaches, start, until
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments import pools
from deployments.deploy import register
from deployments.flow_processes import flow_processes
from deployments.local import LocalServer, server_home
from deployments.platform import stop_platform
from deployments.platform_state import PlatformState
from deployments.processes import ProcessId

HOLD = """
import time
from deployments.platform import local_platform
with local_platform():
    time.sleep(600)
"""


@pytest.fixture
def own_home(home, tmp_path, monkeypatch):
    """A `GYRE_HOME` of one test; what it leaves running is ended."""
    monkeypatch.setenv("GYRE_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    stop_platform()


def command(*arguments):
    return [sys.executable, "-m", "deployments.cli", *arguments]


def gyre(*arguments):
    """Run the command in a process of its own; returns exit code, stdout and stderr."""
    result = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=3 * DEADLINE)
    return result.returncode, result.stdout, result.stderr


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def register_toys():
    async with get_client() as client:
        for toy in TOYS:
            await register(client, toy)


async def running_nap():
    run = await reaches(await start("nap/gyre", seconds=300), "Running")
    return flow_processes()[run.id]


def ended(processes):
    return [process for process in processes if process.running()] == []


def test_up_twice_then_its_supervisor_dies_then_up_and_down(own_home):
    port = free_port()
    code, out, err = gyre("up", "--port", str(port))
    assert (code, err) == (0, "starting the Prefect server, the work pools and their workers ...\n")
    assert f"Prefect UI: http://127.0.0.1:{port}\n" in out
    code, out, _ = gyre("up")
    assert code == 0
    assert out.startswith("`gyre up` runs already; end it with `gyre down`\n")
    first = all_processes()
    with temporary_settings({PREFECT_API_URL: PlatformState.load().api_url}):
        asyncio.run(register_toys())
        process = asyncio.run(running_nap())
        first[0].find().kill()

        code, out, _ = gyre("up")
        assert code == 0
        assert out.startswith("an earlier `gyre up` had died without `gyre down`; what it left was cleaned up\n")
        assert process.running(), "a flow run outlives the supervisor"
        second = all_processes()
        assert process in second
        assert second[1] == first[1], "the server is shared"
        assert ended({*first} - {*second})
    code, out, err = gyre("down")
    assert (code, err) == (0, "ending everything that `gyre up` started (up to 60 s for what is at work) ...\n")
    assert out == "everything that `gyre up` started has ended\n"
    assert ended([*first, *second])
    assert gyre("down") == (0, "nothing runs that `gyre up` started\n", "")


def test_a_port_in_use_is_one_sentence_and_nothing_is_left(own_home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, out, err = gyre("up", "--port", str(taken.getsockname()[1]))
    assert (code, out) == (2, "")
    assert "cannot be used (Address already in use)" in err
    assert len(err.splitlines()) == 2, "what it does, and why it did not come to that"
    assert PlatformState.load() is None


def test_a_database_that_is_none_is_one_sentence_without_its_password(own_home):
    code, out, err = gyre("up", "--database", "postgresql://me:very-secret@127.0.0.1:9/nowhere")
    assert (code, out) == (2, "")
    assert "the database postgresql://***@127.0.0.1:9/nowhere does not let us in" in err
    assert len(err.splitlines()) == 2, "what it does, and why it did not come to that"
    written = [file.read_text(errors="replace") for file in own_home.rglob("*") if file.is_file()]
    assert not any("very-secret" in text for text in [err, *written])


@pytest.mark.parametrize(
    ("arguments", "number"),
    [(command("up", "--port", "0"), signal.SIGINT), ([sys.executable, "-c", HOLD], signal.SIGKILL)],
    ids=["Ctrl-C in gyre up", "a run that is killed"],
)
def test_what_ends_on_the_way_up_leaves_nothing(own_home, arguments, number):
    with subprocess.Popen(arguments) as process:
        server = asyncio.run(until(known_server, "a server"))
        supervisor = PlatformState.load().supervisor
        process.send_signal(number)
        assert process.wait(DEADLINE) == (130 if number == signal.SIGINT else -number)
    asyncio.run(until(lambda: all_ended([supervisor, server.process]), "the end of the platform"))


async def known_server():
    return LocalServer.known(server_home())


async def all_ended(processes):
    return ended(processes) and PlatformState.load() is None


async def test_a_pool_of_another_type_is_named(platform, monkeypatch):
    monkeypatch.setattr(pools, "POOLS", {"gyre-test": "of another type"})
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name="gyre-test", type="docker"))
        with pytest.raises(ValueError, match="the work pool gyre-test is of type docker, and Gyre needs process here"):
            await pools.ensure_pools(client)


def test_another_process_with_the_number_of_one_that_ended_is_not_it():
    assert ProcessId.of(os.getpid()).running()
    assert not ProcessId(os.getpid(), ProcessId.of(os.getpid()).started_at - 60.0).running()
