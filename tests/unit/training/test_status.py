"""What `gyre status` says."""

import time

import pytest
from training_configs import tiny_config

from gyre_core.monitor.metrics import MetricsWriter
from gyre_core.monitor.report import write_summary
from gyre_core.training.run_folder import RunFolder
from gyre_core.training.status import describe_runs, run_status


def run_folder(folder, run_id, status=None, rewards=(), **summary):
    run = RunFolder.create(tiny_config(folder, experiment={"steps": 5}), run_id)
    writer = MetricsWriter(run.path, tensorboard=False)
    for step, reward in enumerate(rewards, start=1):
        writer.write(step, {"reward": reward, "kl": 0.125}, time.time() - 60)
    writer.close()
    if status is not None:
        write_summary(run.path, {"status": status, **summary})
    return run


def test_no_runs(tmp_path):
    assert describe_runs(str(tmp_path / "runs")) == f"no runs under {tmp_path / 'runs'}"


def test_a_line_for_each_run(tmp_path):
    run_folder(tmp_path, "a", "completed", [0.1, 0.25])
    run_folder(tmp_path, "b", "running", [0.5])
    owned = run_folder(tmp_path, "c")
    owned.acquire()
    header, *lines = [line.split() for line in describe_runs(str(tmp_path / "runs")).splitlines()]
    assert header == ["run", "status", "steps", "reward", "last", "step"]
    assert [line[:4] for line in lines] == [
        ["trial/a", "completed", "2/5", "0.250"],
        ["trial/b", "crashed", "1/5", "0.500"],
        ["trial/c", "starting", "0/5"],
    ]
    assert 59 < int(lines[0][4]) < 180
    owned.release()


@pytest.mark.parametrize("status", ["starting", "running", "completed", "stopped", "interrupted", "failed"])
def test_a_run_that_says_it_runs_without_a_process_has_crashed(tmp_path, status):
    run = run_folder(tmp_path, "a", status)
    assert run_status(run) == ("crashed" if status in ("starting", "running") else status)
    run.acquire()
    assert run_status(run) == status
    run.release()


def test_one_run_in_full(tmp_path):
    run = run_folder(
        tmp_path,
        "a",
        "stopped",
        [0.5],
        evaluation={"before": {"reward": 0.25, "reward_se": 0.5}, "after": {"step": 1, "reward": 0.75}},
        alarms=[{"name": "kl_spike", "step": 1, "sentence": "KL is high.", "remedy": ""}],
        error="RunStoppedError: alarm",
    )
    lines = describe_runs(str(tmp_path / "runs"), "trial").splitlines()
    for line in (
        "run     trial/a",
        f"folder  {run.path}",
        "status  stopped",
        "steps   1 of 5",
        "        reward 0.5",
        "        kl 0.125",
        "held-out reward before training: 0.2500 ± 0.5000",
        "held-out reward after step 1: 0.7500",
        "alarm   kl_spike since step 1: KL is high.",
        "error   RunStoppedError: alarm",
    ):
        assert line in lines
    with pytest.raises(ValueError, match="no run 'other'"):
        describe_runs(str(tmp_path / "runs"), "other")
