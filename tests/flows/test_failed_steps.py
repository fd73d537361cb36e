"""What ends a run early leaves it resumable: a step that fails for good, which may be skipped as well, and an alarm."""

import json
import threading
import time

import httpx
import pytest
from tiny_runs import EVERY_STEP, REWARDS, Fault, InjectedError, opened_runs, outcome, tiny_config

from flows import outage
from flows.train import train
from gyre_core.rewards.values import RewardError
from gyre_core.training.run import RunFailedError, RunStoppedError
from gyre_core.types import PolicyVersion

pytestmark = pytest.mark.usefixtures("prefect_server")

ALWAYS = 1_000
PATIENT = {"step_retries": 1}


def summary(run):
    return json.loads((run.folder.path / "summary.json").read_text())


@pytest.mark.parametrize(
    ("fault", "done"),
    [
        (Fault("storage", "create", "/admit-", after=True, times=ALWAYS), 1),
        (Fault("learner", "apply", after=True, call=1, times=ALWAYS), 1),
        (Fault("chain", "retain", times=ALWAYS), 1),
        (Fault("saver.store", "save", after=True, step=3, times=ALWAYS), 2),
    ],
    ids=str,
)
async def test_a_stopped_run_resumes_from_before_the_step_that_failed(tmp_path, monkeypatch, reference, fault, done):
    failure = pytest.raises(RunFailedError, match=f"after step {done}: InjectedError")
    with opened_runs(monkeypatch, fault.inject) as runs, failure:
        await train(tiny_config(tmp_path, experiment=PATIENT, checkpoint=EVERY_STEP))
    assert fault.raised >= 2
    assert runs[0].saver.store.steps()[-1] == done
    assert (summary(runs[0])["status"], summary(runs[0])["steps"]) == ("failed", done)
    assert "InjectedError" in summary(runs[0])["error"]
    # What is exported now is the policy of the last committed step.
    assert runs[0].chain.versions()[-1] == runs[0].version
    with opened_runs(monkeypatch) as runs:
        await train(tiny_config(tmp_path), resume=True)
    assert (runs[0].epoch, summary(runs[0])["status"]) == (2, "completed")
    start = runs[0].start_version
    assert runs[0].chain.manifest(start).parent == PolicyVersion(1, start.number)
    outcome(runs[0]).assert_equals(reference)


@pytest.mark.parametrize(
    "fault",
    [Fault("learner", "apply", after=True, call=1, times=ALWAYS), Fault("chain", "retain", times=ALWAYS)],
    ids=str,
)
async def test_a_skipped_step_leaves_the_weights_of_the_step_before_it(tmp_path, monkeypatch, fault):
    weights = {}

    def watch(run):
        real = run.abandon

        async def abandon(step):
            await real(step)
            weights[step] = {name: tensor.clone() for name, tensor in run.learner.policy_weights().items()}

        run.abandon = abandon

    config = tiny_config(tmp_path, experiment=PATIENT | {"on_step_failure": "skip"})
    with opened_runs(monkeypatch, fault.inject, watch) as runs:
        await train(config)
    (run,) = runs
    # A publication is tried once more, as it begins beside the step before.
    assert fault.raised == (3 if fault.target == "chain" else 2)
    assert sorted(run.results) == [1, 3]
    assert (summary(run)["status"], summary(run)["steps"]) == ("completed", 3)
    before = run.chain.load(run.results[1].version)
    assert all(weights[2][name].equal(before[name]) for name in before)
    assert run.chain.manifest(run.results[3].version).parent == run.results[1].version
    assert all(run.learner.policy_weights()[name].equal(tensor) for name, tensor in run.chain.load(run.version).items())


class FailsBesideEarlier:
    """Makes a step fail for good while the one before it trains, which then ends as `last_words` says."""

    def __init__(self, step, last_words=None):
        self.step, self.last_words, self.given_up = step, last_words, threading.Event()

    def inject(self, run) -> None:
        admit, abandon, begin_step = run.guard.admit, run.abandon, run.learner.begin_step

        async def refuse(step):
            if step == self.step:
                raise InjectedError("beside the step before it")
            await admit(step)

        async def tell_abandoned(step):
            await abandon(step)
            if step == self.step:
                self.given_up.set()

        def hold(*arguments, **options):
            if run.step == self.step - 2:
                assert self.given_up.wait(30)
                time.sleep(0.2)  # What follows on the failure has had its chance.
                if self.last_words is not None:
                    raise self.last_words
            return begin_step(*arguments, **options)

        run.guard.admit, run.abandon, run.learner.begin_step = refuse, tell_abandoned, hold


@pytest.mark.parametrize("step", [3, 4], ids=["a step between others", "the last step"])
async def test_a_step_that_fails_beside_an_earlier_one_is_skipped_after_it(tmp_path, monkeypatch, step):
    experiment = {"steps": 4, "step_retries": 0, "on_step_failure": "skip"}
    config = tiny_config(tmp_path, experiment=experiment, rollout={"max_lag": 1})
    with opened_runs(monkeypatch, FailsBesideEarlier(step).inject) as runs:
        await train(config)
    (run,) = runs
    assert sorted(run.results) == [other for other in (1, 2, 3, 4) if other != step]
    assert (summary(run)["status"], summary(run)["steps"]) == ("completed", 4)
    assert run.saver.store.steps()[-1] == 4
    assert (run.folder.path / "export").exists()


async def test_a_run_that_ends_before_a_failed_steps_turn_resumes_with_all_that_is_missing(tmp_path, monkeypatch):
    experiment = {"steps": 4, "step_retries": 0, "on_step_failure": "skip"}
    config = tiny_config(tmp_path, experiment=experiment, rollout={"max_lag": 1})
    fault = FailsBesideEarlier(3, RewardError("the functions are at fault"))
    told = pytest.raises(RunFailedError, match="after step 1: RewardError")
    with opened_runs(monkeypatch, fault.inject) as runs, told:
        await train(config)
    assert runs[0].saver.store.steps()[-1] == 1
    with opened_runs(monkeypatch) as runs:
        await train(config, resume=True)
    assert sorted(runs[0].results) == [2, 3, 4]


async def test_a_server_that_stays_away_stops_also_a_run_that_skips_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(outage, "OUTAGE_TIMEOUT", 2.0)

    def lose_server(run) -> None:
        admit = run.guard.admit

        async def lose(step):
            if step == 2:
                raise httpx.ConnectError("refused")
            await admit(step)

        run.guard.admit = lose

    config = tiny_config(tmp_path, experiment={"step_retries": 0, "on_step_failure": "skip"})
    told = pytest.raises(RunFailedError, match="after step 1: ConnectError: refused")
    with opened_runs(monkeypatch, lose_server) as runs, told:
        await train(config)
    assert runs[0].saver.store.steps()[-1] == 1


def spoil_metrics(run) -> None:
    with (run.folder.path / "metrics.jsonl").open("a") as file:
        file.write("not a step\n")


def block_summary(run) -> None:
    (run.folder.path / "summary.json").unlink()
    (run.folder.path / "summary.json").mkdir()


@pytest.mark.parametrize("spoil", [spoil_metrics, block_summary])
async def test_a_summary_that_cannot_be_written_costs_neither_the_state_nor_the_cause(
    tmp_path, monkeypatch, caplog, spoil
):
    def fail_and_spoil(run) -> None:
        begin_step = run.learner.begin_step

        def spoil_and_raise(*arguments, **options):
            if run.step == 0:
                return begin_step(*arguments, **options)
            spoil(run)
            raise RewardError("the cause")

        run.learner.begin_step = spoil_and_raise

    told = pytest.raises(RunFailedError, match="after step 1: RewardError: the cause")
    with opened_runs(monkeypatch, fail_and_spoil) as runs, told:
        await train(tiny_config(tmp_path))
    assert runs[0].saver.store.steps() == [1]
    assert "summary.json does not say that the run is failed: " in caplog.text


async def test_an_alarm_may_stop_the_run_resumable(tmp_path, monkeypatch):
    sections = {"reward": {"functions": [{"path": f"{REWARDS}:constant"}]}, "health": {"dead_steps": 2}}
    stopping = sections | {"health": {"dead_steps": 2, "action": "stop"}}
    with opened_runs(monkeypatch) as runs, pytest.raises(RunStoppedError, match="alarm dead_signal at step 2"):
        await train(tiny_config(tmp_path, **stopping))
    stopped = summary(runs[0])
    assert (stopped["status"], stopped["steps"]) == ("stopped", 2)
    assert [alarm["name"] for alarm in stopped["alarms"]] == ["dead_signal"]
    assert not (runs[0].folder.path / "export").exists()
    with opened_runs(monkeypatch) as runs:
        await train(tiny_config(tmp_path, **sections), resume=True)
    assert list(runs[0].results) == [3]
    assert (summary(runs[0])["status"], summary(runs[0])["steps"]) == ("completed", 3)
