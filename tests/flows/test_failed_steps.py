"""What ends a run early leaves it resumable: a step that fails for good, which may be skipped as well, and an alarm."""

import json

import pytest
from tiny_runs import EVERY_STEP, REWARDS, Fault, opened_runs, outcome, tiny_config

from flows.train import train
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
