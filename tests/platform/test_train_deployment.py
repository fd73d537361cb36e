"""A training run launched through Prefect: from CI, whose exit code tells the outcome, and cancelled in the UI."""

import json
import os
import subprocess
import sys

import pytest
from platform_tools import DEADLINE, reaches, start, until
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling

from deployments.flow_processes import flow_processes

ENDLESS = {
    "models": {"tiny": {"hidden_size": 16, "layers": 1}, "warm_start": {"max_steps": 0}},
    "data": {"evaluation_size": 0, "size": 16},
    "rollout": {"batch_size": 4, "samples_per_prompt": 2, "max_tokens": 2},
    "monitor": {"tensorboard": False},
}


def run_from_ci(name, **parameters):
    """`prefect deployment run … --watch` as CI calls it; returns the exit code."""
    given = [text for key, value in parameters.items() for text in ("--param", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "prefect", "deployment", "run", name, *given, "--watch"]
    environment = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value()}
    return subprocess.run(command, env=environment, capture_output=True, timeout=2 * DEADLINE).returncode


@pytest.mark.usefixtures("platform")
def test_the_exit_code_tells_ci_how_a_run_ended():
    assert run_from_ci("nap/gyre", seconds=0) == 0
    assert run_from_ci("train/gyre", config={"data": {"path": "/nowhere/prompts.jsonl"}}) == 1
    assert run_from_ci("train/gyre", config={"learning": {"learnig_rate": 1}}) == 1


@pytest.mark.usefixtures("platform")
async def test_a_cancelled_run_is_resumable_and_leaves_no_process(tmp_path):
    settings = {**ENDLESS, "experiment": {"name": "endless", "steps": 100_000, "threads": 1, "output": str(tmp_path)}}
    run = await start("train/gyre", config=settings, run_id="first")
    metrics = tmp_path / "endless" / "first" / "metrics.jsonl"

    async def has_trained():
        return metrics.exists() and metrics.read_text().count("\n") > 2

    await until(has_trained, "the first steps")
    process = flow_processes()[run.id]
    async with get_client() as client:
        await client.set_flow_run_state(run.id, Cancelling())
    await reaches(run, "Cancelled")

    async def has_ended():
        return not process.running()

    await until(has_ended, "the end of its process, a moment after that of its flow run")
    summary = json.loads((tmp_path / "endless" / "first" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["steps"] > 0
    assert list((tmp_path / "endless" / "first" / "checkpoints").glob("*/manifest.json"))
