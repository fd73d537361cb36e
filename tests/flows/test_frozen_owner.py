"""An owner that is frozen while another machine takes its run over, and thawed when that is done."""

import asyncio
import random
import signal
import time

import pytest
from gyre_processes import GyreProcess, newest_run, wait_until, write_config
from tiny_runs import EVERY_STEP, loop_outcome, opened_runs, outcome

from flows.train import train
from gyre_core.config import load_config
from gyre_core.monitor.metrics import read_metrics

STEPS = 8
CHANGES = {"experiment": {"steps": STEPS}, "checkpoint": EVERY_STEP}
SHARED = ("requests", "claims", "pool", "heartbeats")
"""Folders of what a step asks for and generates, under names that all who take it share."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return asyncio.run(loop_outcome(load_config(write_config(tmp_path_factory.mktemp("undisturbed"), **CHANGES))))


def bears_epoch(name, epoch):
    """Whether an object is its epoch's own: `learner/0001/admit-...`, `policy/0001-00000003/...`, or the like."""
    own = f"{epoch:04d}"
    return any(part == own or part.startswith(f"{own}-") or part.endswith(f"-{own}") for part in name.parts)


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


async def test_a_thawed_owner_ends_superseded_and_leaves_what_the_other_one_did(
    tmp_path, monkeypatch, prefect_server, undisturbed
):
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    file = write_config(tmp_path, **CHANGES)
    frozen = GyreProcess(tmp_path / "log", "train", "--config", str(file), api_url=prefect_server)
    wait_until(lambda: list(tmp_path.glob("runs/tiny/*/metrics.jsonl")), "its beginning")
    wait_until(lambda: len(read_metrics(newest_run(tmp_path).path)) >= 2, "its second step")
    time.sleep(rng.uniform(0.0, 0.3))
    frozen.send(signal.SIGSTOP)
    folder = newest_run(tmp_path).path
    # The lock does not reach beyond a machine.
    (folder / "owner.lock").unlink()
    try:
        with opened_runs(monkeypatch) as runs:
            await train(load_config(file), resume=True)
        (run,) = runs
        before = contents(folder)
    finally:
        frozen.send(signal.SIGCONT)
    assert frozen.wait() == 1, frozen.output
    assert "SupersededError: epoch 1 of this run was superseded by epoch 2" in frozen.output
    after = contents(folder)
    assert {name: after.get(name) for name in before} == before
    added = after.keys() - before.keys()
    assert [name for name in added if name.parts[0] not in SHARED and not bears_epoch(name, 1)] == []
    assert newest_run(tmp_path).summary()["status"] == "completed"
    outcome(run).assert_equals(undisturbed)
