"""An owner that is frozen while another machine takes its run over, and thawed when that is done."""

import asyncio
import random
import shutil
import signal
import time

import pytest
from gyre_processes import GyreProcess, newest_run, wait_until, write_config
from tiny_runs import EVERY_STEP, loop_outcome, opened_runs, outcome

from flows.train import train
from gyre_core.config import GyreConfig, load_config
from gyre_core.monitor.metrics import read_metrics

STEPS = 8
CHANGES = {"experiment": {"steps": STEPS}, "checkpoint": EVERY_STEP}
PUBLISHED = ("checkpoints", "learner", "policy")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return asyncio.run(loop_outcome(load_config(write_config(tmp_path_factory.mktemp("undisturbed"), **CHANGES))))


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def on_another_machine(folder, config) -> GyreConfig:
    """The run's folder, but for the lock, which does not reach beyond a machine, and its settings there."""
    shutil.copytree(folder / "runs", folder / "other", ignore=shutil.ignore_patterns("owner.lock"))
    settings = config.model_dump(mode="json", exclude_unset=True)
    settings["experiment"]["output"] = str(folder / "other")
    return GyreConfig.model_validate(settings)


async def test_a_thawed_owner_ends_superseded_and_leaves_what_the_other_one_did(
    tmp_path, monkeypatch, prefect_server, undisturbed
):
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    shared = tmp_path / "shared"
    file = write_config(tmp_path, **CHANGES, storage={"url": str(shared)})
    frozen = GyreProcess(tmp_path / "log", "train", "--config", str(file), api_url=prefect_server)
    wait_until(lambda: list(tmp_path.glob("runs/tiny/*/metrics.jsonl")), "its beginning")
    wait_until(lambda: len(read_metrics(newest_run(tmp_path).path)) >= 2, "its second step")
    time.sleep(rng.uniform(0.0, 0.3))
    frozen.send(signal.SIGSTOP)
    try:
        with opened_runs(monkeypatch) as runs:
            await train(on_another_machine(tmp_path, load_config(file)), resume=True)
        (run,) = runs
        before = contents(shared)
    finally:
        frozen.send(signal.SIGCONT)
    assert frozen.wait() == 1, frozen.output
    assert "SupersededError: epoch 1 of this run was superseded by epoch 2" in frozen.output
    after = contents(shared)
    assert {name: after.get(name) for name in before} == before
    assert [name for name in after.keys() - before.keys() if set(PUBLISHED) & set(name.parts)] == []
    assert newest_run(tmp_path).summary()["status"] == "failed"
    outcome(run).assert_equals(undisturbed)
