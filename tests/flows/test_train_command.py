"""`gyre train` from the shell's side: servers that come and go, signals, exit codes, and what a run leaves behind."""

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
import torch
from gyre_processes import DEADLINE, GyreProcess, newest_run, wait_until, write_config
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.settings import PREFECT_API_URL, temporary_settings
from tiny_runs import EVERY_STEP, REWARDS
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.local import stop_local_server
from gyre_core.monitor.metrics import read_metrics
from gyre_core.training.run_folder import run_storage
from gyre_core.weights.chain import VersionChain

SUMMARY_KEYS = {"status", "steps", "evaluation", "samples_per_second", "tokens_per_second", "time_share"}
TIME_SHARES = {"generation", "reward", "update", "orchestration"}


def summary(folder):
    return json.loads((newest_run(folder).path / "summary.json").read_text())


def ui_url(output):
    (line,) = [line for line in output.splitlines() if line.startswith("Prefect UI: ")]
    return line.removeprefix("Prefect UI: ")


def answers(url):
    try:
        return httpx.get(f"{url}/api/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home without a server; whatever is started there ends with the test."""
    monkeypatch.setenv("GYRE_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    stop_local_server()


async def flow_states(url, name):
    with temporary_settings({PREFECT_API_URL: f"{url}/api"}):
        async with get_client() as client:
            found = await client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])))
    return sorted(run.state_name for run in found)


async def test_two_runs_share_a_server_that_the_last_one_ends(tmp_path, home):
    long, short = tmp_path / "long", tmp_path / "short"
    long.mkdir()
    short.mkdir()
    changes = {"data": {"evaluation_size": 4}, "monitor": {"tensorboard": True}}
    command = ["train", "--config", str(write_config(long, experiment={"steps": 1000}, **changes))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    log = tmp_path / "long.log"
    with log.open("wb") as output:
        first = subprocess.Popen(
            [sys.executable, "-m", "deployments.cli", *command], env=environment, stdout=output, stderr=output
        )
    try:
        wait_until(lambda: list(long.glob("runs/tiny/*/metrics.jsonl")), "the first run")
        url = ui_url(log.read_text())
        second = GyreProcess(tmp_path / "short.log", "train", "--config", str(write_config(short)), home=home)
        assert second.wait() == 0
        assert ui_url((tmp_path / "short.log").read_text()) == url
        assert answers(url)
        first.send_signal(signal.SIGINT)
        assert first.wait(DEADLINE) == 130, log.read_text()
    finally:
        first.kill()
        first.wait()
    assert not answers(url)
    steps = summary(long)["steps"]
    assert (summary(short)["status"], summary(long)["status"]) == ("completed", "interrupted")
    assert f"interrupted after step {steps}; go on with --resume" in log.read_text()
    assert len(list(long.glob("runs/tiny/*/checkpoints/*/manifest.json"))) == 1

    third = GyreProcess(
        tmp_path / "third.log",
        *[*command, "--resume", "--keep-server", f"--experiment.steps={steps + 2}"],
        home=home,
    )
    assert third.wait() == 0, third.output
    kept = ui_url(third.output)
    assert answers(kept)
    assert await flow_states(kept, "train-tiny") == ["Cancelled", "Completed", "Completed"]
    check_what_is_left(long, steps + 2)
    assert stop_local_server()
    assert not answers(kept)


def check_what_is_left(folder, steps):
    """The files that a completed run leaves for people and programs."""
    run, said = newest_run(folder), summary(folder)
    assert said.keys() >= SUMMARY_KEYS
    assert (said["status"], said["steps"]) == ("completed", steps)
    for moment in ("before", "after"):
        assert 0.0 <= said["evaluation"][moment]["reward"] <= 1.0
        assert said["evaluation"][moment]["reward_se"] >= 0.0
    assert said["time_share"].keys() == TIME_SHARES
    assert sum(said["time_share"].values()) <= 1.0 + 1e-9
    assert min(said["samples_per_second"], said["tokens_per_second"], said["peak_memory_bytes"]) > 0
    assert [row.step for row in read_metrics(run.path)] == list(range(steps + 1))
    assert list(run.path.glob("tensorboard/events*"))
    assert len(list(run.path.glob("completions/step-*.jsonl"))) == steps
    chain = VersionChain(run_storage(run.config(), run))
    published = chain.load(chain.versions()[-1])
    model = AutoModelForCausalLM.from_pretrained(run.path / "export")
    weights = dict(model.named_parameters())
    assert weights.keys() == published.keys()
    assert all(torch.equal(weights[name], published[name]) for name in published)
    tokenizer = AutoTokenizer.from_pretrained(run.path / "export")
    assert tokenizer.decode(tokenizer("12+34=")["input_ids"], skip_special_tokens=True) == "12+34="
    assert "AutoModelForCausalLM" in (run.path / "export" / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"data": {"path": "/nowhere/prompts.jsonl"}}, 2, "/nowhere/prompts.jsonl"),
        ({"reward": {"functions": [{"path": f"{REWARDS}:missing"}]}}, 2, "missing"),
        ({"reward": {"functions": [{"path": f"{REWARDS}:miscounted"}]}}, 1, "miscounted"),
        (
            {
                "reward": {"functions": [{"path": f"{REWARDS}:constant"}]},
                "health": {"dead_steps": 1, "action": "stop"},
                "checkpoint": EVERY_STEP,
            },
            1,
            "alarm dead_signal at step 1",
        ),
    ],
    ids=["no data", "no such function", "broken function", "alarm"],
)
def test_exit_codes_tell_mistakes_from_failures(tmp_path, monkeypatch, prefect_server, changes, code, sentence):
    monkeypatch.chdir(tmp_path)
    process = GyreProcess(
        tmp_path / "log", "train", "--config", str(write_config(tmp_path, **changes)), api_url=prefect_server
    )
    assert process.wait() == code, process.output
    assert sentence in process.output.splitlines()[-1]
    assert "Traceback" not in process.output


def test_a_configured_api_that_does_not_answer_is_named(tmp_path):
    address = "http://127.0.0.1:9/api"
    process = GyreProcess(tmp_path / "log", "train", "--config", str(write_config(tmp_path)), api_url=address)
    assert process.wait() == 2, process.output
    assert f"{address} does not answer" in process.output.splitlines()[-1]
    assert "Traceback" not in process.output
    assert not (tmp_path / "runs").exists()
