"""Killed at any moment, a run resumes from its newest whole checkpoint and ends like an undisturbed one."""

import asyncio
import random
import signal
import time

import pytest
from gyre_processes import GyreProcess, newest_run, wait_until, write_config
from tiny_runs import EVERY_STEP, REWARDS, loop_outcome, opened_runs, outcome, take_steps

from flows.train import train
from gyre_core.config import load_config
from gyre_core.monitor.metrics import read_metrics
from gyre_core.training.build import open_run
from gyre_core.training.resume import RESUME

STEPS = 12
CHANGES = {"experiment": {"steps": STEPS}, "checkpoint": EVERY_STEP}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return asyncio.run(loop_outcome(load_config(write_config(tmp_path_factory.mktemp("undisturbed"), **CHANGES))))


async def test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one(
    tmp_path, monkeypatch, prefect_server, undisturbed
):
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    config = write_config(tmp_path, **CHANGES)
    for attempt in range(3):
        resume = ["--resume"] if attempt else []
        process = GyreProcess(
            tmp_path / f"{attempt}.log", "train", "--config", str(config), *resume, api_url=prefect_server
        )
        epoch = f"learner/epochs/{attempt + 1:04d}"
        wait_until(lambda epoch=epoch: list(tmp_path.glob(f"runs/tiny/*/{epoch}")), f"epoch {attempt + 1}")
        # Somewhere within a step, with steps left that the run cannot have finished before the signal comes.
        last = rng.randint(3 * attempt, 3 * attempt + 2)
        wait_until(lambda last=last: len(read_metrics(newest_run(tmp_path).path)) > last, f"step {last}")
        time.sleep(rng.uniform(0.0, 0.3))
        process.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert newest_run(tmp_path).owned() is False
    with opened_runs(monkeypatch) as runs:
        await train(load_config(config), resume=True)
    (run,) = runs
    assert sorted(undisturbed.metrics) == list(range(1, STEPS + 1))
    outcome(run).assert_equals(undisturbed)


async def test_a_second_interrupt_ends_a_run_within_its_step(tmp_path, monkeypatch, prefect_server):
    file = write_config(
        tmp_path,
        experiment={"steps": 2},
        reward={"functions": [{"path": f"{REWARDS}:slow"}]},
        rollout={"groups_per_request": 8},
    )
    process = GyreProcess(tmp_path / "log", "train", "--config", str(file), api_url=prefect_server)
    wait_until(lambda: list(tmp_path.glob("runs/tiny/*/claims/00000001-0000.1")), "the first step")
    process.send(signal.SIGINT)
    wait_until(lambda: "interrupted: finishing the open steps" in process.output, "the answer to the first interrupt")
    process.send(signal.SIGINT)
    assert process.wait() == 130, process.output
    run = newest_run(tmp_path)
    assert (run.summary()["status"], run.summary()["steps"], run.owned()) == ("interrupted", 0, False)
    with opened_runs(monkeypatch) as runs:
        await train(load_config(file), resume=True)
    assert sorted(runs[0].results) == [1, 2]


async def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(tmp_path, monkeypatch, prefect_server, reference):
    config = load_config(write_config(tmp_path, checkpoint=EVERY_STEP))
    with opened_runs(monkeypatch) as runs:
        await train(config)
    newest = newest_run(tmp_path).path / "checkpoints" / "00000003-0001" / "tensors.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    with opened_runs(monkeypatch) as runs:
        await train(config, resume=True)
    assert sorted(runs[0].results) == [3]
    outcome(runs[0]).assert_equals(reference)


async def test_a_run_killed_between_its_last_step_and_its_end_goes_on_to_its_end(
    tmp_path, monkeypatch, prefect_server, reference
):
    config = load_config(write_config(tmp_path, checkpoint=EVERY_STEP))
    run = await open_run(config)
    await take_steps(run)
    await run.close()
    assert not (run.folder.path / "export").exists()
    with opened_runs(monkeypatch) as runs:
        await train(config, resume=True)
    assert runs[0].results == {}
    outcome(runs[0]).assert_equals(reference)
    assert (run.folder.path / "export" / "model.safetensors").exists()
    assert run.folder.summary()["status"] == "completed"
    with pytest.raises(ValueError, match="is complete: 3 of 3 steps are done"):
        await open_run(config, origin=RESUME)
