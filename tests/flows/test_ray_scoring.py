"""Reward functions on Ray: the scores of local processes, row for row, and what becomes of rows when parts of Ray die.

One small cluster serves all tests, except those of a cluster that a run starts for itself.
"""

import asyncio
import contextlib
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from gyre_processes import wait_until
from prefect import flow, get_client, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterFlowRunId
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings
from ray_rows import group, scores
from tiny_runs import TINY, opened_runs, outcome, tiny_config

from flows.scoring import LOOPBACK_VARIABLE, function_runner
from flows.train import train
from gyre_core.config import GyreConfig
from gyre_core.rewards.scorer import Scorer
from gyre_core.rewards.values import RewardError

HERE = Path(__file__).parent
pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ray_environment():
    """The environment of everything here that is Ray's: loopback, and a token of these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOOPBACK_VARIABLE, "0")
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture(scope="module")
def ray_address(ray_environment):
    """The address of a cluster of two CPUs and one GPU, in name; none of its processes is left in the end."""
    head = subprocess.Popen(
        [sys.executable, str(HERE / "ray_head.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield head.stdout.readline().strip()
    finally:
        processes = psutil.Process(head.pid).children(recursive=True)
        try:
            head.communicate(timeout=60)
        finally:
            head.kill()
            _, left = psutil.wait_procs(processes, timeout=30)
            for process in left:
                process.kill()
    assert not left


@pytest.fixture
def scoring(tmp_path, monkeypatch, ray_address):
    """Open a scorer of functions in a source text: `async with scoring(source, *names, ray=…, **settings) as scorer`.

    `ray` holds settings of `reward.ray`; None runs the functions in as many local processes as there are Ray tasks.
    """
    monkeypatch.chdir(tmp_path)

    @contextlib.asynccontextmanager
    async def open_scorer(source, *names, ray=(), **settings):
        (tmp_path / "judge.py").write_text(textwrap.dedent(source))
        functions = [{"path": f"judge.py:{name}"} for name in names or ("judge",)]
        if ray is None:
            where = {"processes": 2}
        else:
            where = {"launcher": "ray", "ray": {"address": ray_address, "tasks": 2, **dict(ray)}}
        config = GyreConfig.model_validate({"reward": {"functions": functions, **where, **settings}})
        scorer = Scorer(config.reward, tmp_path, function_runner(config))
        try:
            await scorer.start()
            yield scorer
        finally:
            await asyncio.to_thread(scorer.close)

    return open_scorer


def described(rows):
    """What a score says, without the addresses in a traceback."""
    return [
        (row.status, dict(row.parts), None if math.isnan(row.reward) else row.reward, row.error.splitlines()[-1:])
        for row in rows
    ]


ENDINGS = """
    import asyncio, os, time

    def judge(completions, answer, step, version):
        print("judging", completions)
        values = {"none": None, "nan": float("nan"), "text": "good", "true": True, "zero": 0}
        if "raise" in completions:
            raise KeyError("no such completion")
        if "exit" in completions:
            os._exit(3)
        if "hang" in completions:
            time.sleep(1000)
        return [values.get(text, float(len(text) + number)) for text, number in zip(completions, answer)]

    async def lengths(completions, **columns):
        await asyncio.sleep(0)
        return [len(text) for text in completions]

    def nothing(completions):
        return [None for _ in completions]
"""
TEXTS = [["one", "none", "raise", "zero"], ["nan", "exit", "four", "text", "true"], ["hang", "five5"]]


async def test_scores_and_counts_are_those_of_local_processes(scoring):
    groups = [group(number, texts, answer=number) for number, texts in enumerate(TEXTS)]
    found = {}
    for name, ray in (("process", None), ("ray", {})):
        async with scoring(ENDINGS, "judge", "lengths", "nothing", ray=ray, timeout=2.0) as scorer:
            scorer.check_columns(["answer"])
            found[name] = described(await scores(scorer, *groups)), scorer.metrics()
    assert found["ray"] == found["process"]
    rows, metrics = found["ray"]
    assert [row[0] for row in rows] == [
        *("scored", "scored", "failed", "scored"),
        *("failed", "failed", "scored", "failed", "scored"),
        *("failed", "scored"),
    ]
    # `judge` gives the length and the answer, `lengths` the length; who abstains adds nothing.
    assert [row[2] for row in rows if row[0] == "scored"] == [6.0, 4.0, 4.0, 9.0, 5.0, 12.0]
    assert metrics["rewards/judge/failed"] == 5.0
    assert metrics["rewards/lengths/failed"] == 0.0


async def test_a_broken_contract_and_a_function_that_cannot_be_loaded_stop_scoring(scoring):
    async with scoring("def judge(completions): return [1.0]") as scorer:
        with pytest.raises(RewardError, match=r"'judge' returned the wrong number of values: got 1, wanted 2"):
            await scores(scorer, group(0, "abcd"))
    with pytest.raises(ValueError, match=r"(?s)'judge.py:judge' cannot be imported.*ZeroDivisionError"):
        async with scoring("1 / 0"):
            pass


HELD = """
    import os, pathlib, time

    def judge(completions):
        here = pathlib.Path(__file__).parent
        with (here / "calls").open("a") as calls:
            calls.write(f"{os.getppid()} {' '.join(completions)}\\n")
        while "held" in completions and not (here / "go").exists():
            time.sleep(0.01)
        return [float(len(completion)) for completion in completions]
"""


def calls_of(folder):
    """The calls of `HELD` so far: the Ray process and the completions."""
    file = folder / "calls"
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [(int(process), tuple(completions)) for process, *completions in lines]


def held_by(folder):
    """The Ray processes that were given the row `held`, in turn."""
    return [process for process, completions in calls_of(folder) if "held" in completions]


@pytest.mark.parametrize(("retries", "kills"), [(0, 1), (1, 1), (1, 2)])
async def test_rows_whose_ray_process_is_killed_are_scored_once_or_fail(scoring, tmp_path, retries, kills):
    async with scoring(HELD, retries=retries, timeout=100.0) as scorer:
        call = asyncio.create_task(scores(scorer, group(0, ["held", "bb"]), group(1, ["ccc", "dddd"])))
        for count in range(1, kills + 1):
            await asyncio.to_thread(wait_until, lambda count=count: len(held_by(tmp_path)) == count, "the call")
            os.kill(held_by(tmp_path)[-1], signal.SIGKILL)
        (tmp_path / "go").touch()
        rows = await call
        counts = scorer.counts["judge"]
    calls = [completions for _, completions in calls_of(tmp_path)]
    assert sorted(calls) == [("ccc", "dddd"), *[("held", "bb")] * (1 + retries)]
    if kills <= retries:
        assert [row.reward for row in rows] == [4.0, 2.0, 3.0, 4.0]
        assert (counts.scored, counts.failed, counts.retried) == (4, 0, 2)
    else:
        assert [row.status for row in rows] == ["failed", "failed", "scored", "scored"]
        assert "the Ray task that called it was lost: WorkerCrashedError" in rows[0].error
        assert (counts.scored, counts.failed, counts.retried) == (2, 2, 2 * retries)


async def test_what_is_cancelled_or_closed_ends_on_the_cluster(scoring, tmp_path):
    async with scoring(HELD, timeout=1000.0) as scorer:
        for end in ("cancel", "close"):
            (tmp_path / "calls").unlink(missing_ok=True)
            call = asyncio.create_task(scores(scorer, group(0, ["held", "held"])))
            await asyncio.to_thread(wait_until, lambda: len(calls_of(tmp_path)) == 2, "both calls")
            processes = [psutil.Process(process) for process, _ in calls_of(tmp_path)]
            if end == "cancel":
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            else:
                await asyncio.to_thread(scorer.close)
                with pytest.raises(RewardError, match="the connection to the Ray cluster is closed"):
                    await call
            assert not (await asyncio.to_thread(psutil.wait_procs, processes, timeout=30))[1]


async def test_resources_that_no_node_has_are_told_after_the_deadline(scoring):
    with pytest.raises(ValueError, match=r"^reward.ray: a task needs") as error:
        async with scoring("def judge(completions): return []", ray={"num_gpus": 2.0, "timeout": 3.0}):
            pass
    assert str(error.value) == (
        "reward.ray: a task needs 1 CPU and 2 GPU, and the cluster has nodes of 2 CPU and 1 GPU; lower num_cpus or "
        "num_gpus, or add a node (waited 3 s for one, reward.ray.timeout)"
    )


async def test_a_function_has_the_gpu_that_its_task_asks_for_and_leaves_it(scoring):
    source = """
        import os
        calls = []
        def judge(completions):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
            calls.append(completions)
            return [len(calls) for _ in completions]
    """
    async with scoring(source, ray={"num_gpus": 1.0}) as scorer:
        for _ in range(2):
            assert [row.reward for row in await scores(scorer, group(0, "abcd"))] == [1.0] * 4


async def test_a_cluster_that_does_not_answer_is_told_after_the_deadline(scoring):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ValueError, match="cannot be reached") as error:
            async with scoring("def judge(completions): return []", ray={"address": address, "timeout": 2.0}):
                pass
    assert str(error.value) == (
        f"reward.ray.address: the Ray cluster at {address} cannot be reached: no answer within 2 s (reward.ray.timeout)"
    )


class Gate:
    """A port that is closed until the block begins, and then leads to another one."""

    def __init__(self, host, port):
        self.upstream = host, port
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            self.port = reserved.getsockname()[1]
        self.connections = set()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.lead_on, "127.0.0.1", self.port)

    async def __aexit__(self, *_):
        self.server.close()
        for connection in self.connections:
            connection.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    async def lead_on(self, reader, writer):
        self.connections.add(asyncio.current_task())
        there_reader, there_writer = await asyncio.open_connection(*self.upstream)
        try:
            await asyncio.gather(self.copy(reader, there_writer), self.copy(there_reader, writer))
        finally:
            for end in (writer, there_writer):
                end.close()
                with contextlib.suppress(ConnectionError):
                    await end.wait_closed()

    async def copy(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
            writer.write_eof()


async def test_rows_wait_for_the_prefect_server(scoring, caplog):
    gate = Gate(*re.fullmatch(r"http://(.*):(\d+)/api", get_current_settings().api.url).groups())
    async with scoring("def judge(completions): return [float(c) for c in completions]", ray={"tasks": 1}) as scorer:
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{gate.port}/api"}):
            call = asyncio.create_task(scores(scorer, group(0, "12")))
            await asyncio.to_thread(wait_until, lambda: "server is away from Ray" in caplog.text, "the outage")
            async with gate:
                assert [row.reward for row in await call] == [1.0, 2.0]


@task(cache_policy=NO_CACHE, persist_result=False)
async def score_in_a_task(scorer, *groups):
    return await scores(scorer, *groups)


@flow(persist_result=False, validate_parameters=False)
async def score_in_a_flow(scorer, *groups):
    await score_in_a_task(scorer, *groups)
    return str(flow_run.id)


async def test_ray_tasks_are_task_runs_of_the_flow_whose_rows_they_score(scoring):
    async def task_runs(run):
        below = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[run]))
        async with get_client() as client:
            return [(item.name, item.state_name) for item in await client.read_task_runs(task_run_filter=below)]

    async with scoring("def judge(completions): return [1.0 for _ in completions]") as scorer:
        run = await score_in_a_flow(scorer, group(0, "ab"), group(1, "cd"))

        def complete():
            runs = asyncio.run(task_runs(run))
            return [name for name, state in runs if name.startswith("score_rows") and state == "Completed"][1:]

        # Ray's processes tell their tasks' ends in the background, and end with the scorer.
        await asyncio.to_thread(wait_until, complete, "two task runs")


async def test_a_run_on_ray_learns_what_a_run_on_local_processes_learns(tmp_path, monkeypatch, reference, ray_address):
    config = tiny_config(
        tmp_path, reward={**TINY["reward"], "launcher": "ray", "ray": {"address": ray_address, "tasks": 3}}
    )
    with opened_runs(monkeypatch) as runs:
        await train(config)
    outcome(runs[0]).assert_equals(reference)


LATE = {"ray::DashboardA", "ray::RuntimeEnv"}
"""Beginnings of the names of Ray's processes that notice only after a minute that theirs was killed."""


def has_ended(process):
    """Whether a process runs no more; a zombie of a killed parent may be left to whoever reaps it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("ending", ["closed", "killed"])
def test_a_cluster_of_its_own_ends_with_its_process(tmp_path, ray_environment, ending):
    (tmp_path / "judge.py").write_text("def judge(completions): return [float(c) for c in completions]")
    environment = os.environ | {"PYTHONPATH": str(HERE), "PREFECT_API_URL": get_current_settings().api.url}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "ray_local.py")],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        processes = {psutil.Process(int(number)) for number in process.stdout.readline().split()}
        names = {item: item.name() for item in processes}
        connections = [connection for item in processes for connection in item.net_connections("inet")]
        listening = {item.laddr.ip for item in connections if item.status == psutil.CONN_LISTEN}
        assert {"gcs_server", "raylet"} <= set(names.values())
        assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        late = {item for item in processes if names[item][:15] in LATE} if ending == "killed" else set()
        if ending == "killed":
            process.kill()
        said, _ = process.communicate("\n" if ending == "closed" else None, timeout=60)
        wait_until(lambda: all(map(has_ended, processes - late)), "the end of its processes")
    finally:
        process.kill()
        process.communicate()
        for item in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                item.kill()
    assert said.split() == []


def test_what_is_not_installed_is_one_sentence(monkeypatch):
    config = GyreConfig.model_validate({"reward": {"launcher": "ray"}})
    monkeypatch.delitem(sys.modules, "flows.ray_scoring", raising=False)
    monkeypatch.setitem(sys.modules, "prefect_ray", None)
    with pytest.raises(ValueError, match=r"^reward.launcher: ray needs the module prefect_ray; .*'gyre\[ray\]'"):
        function_runner(config)
    assert function_runner(GyreConfig()) is None
