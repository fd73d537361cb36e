"""The train flow in Prefect's eyes, steps that overlap, and evaluations beside them."""

import dataclasses

import pytest
from gyre_processes import wait_until
from prefect import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
)
from tiny_runs import REWARDS, InjectedError, loop_outcome, opened_runs, outcome, tiny_config

from flows.train import train
from gyre_core.cluster.requests import request_name
from gyre_core.experience.segments import segment_exists
from gyre_core.monitor.metrics import read_metrics
from gyre_core.training.run import RunFailedError

pytestmark = pytest.mark.usefixtures("prefect_server")


async def subflows(client, flow_run):
    return await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run]))
    )


async def test_runs_tasks_and_artifacts_carry_telling_names(tmp_path, monkeypatch):
    config = tiny_config(
        tmp_path,
        experiment={"tags": ["first", "second"], "steps": 2},
        data={"evaluation_size": 4},
        monitor={"artifact_every": 1},
    )
    with opened_runs(monkeypatch) as runs:
        state = await train(config, return_state=True)
    (run,) = runs
    flow_run = state.state_details.flow_run_id
    async with get_client() as client:
        top = await client.read_flow_run(flow_run)
        assert (top.name, top.state_name) == ("train-tiny", "Completed")
        below = await subflows(client, flow_run)
        names = {item.name: item for item in below}
        assert names.keys() == {"step-000001", "step-000002", "evaluate-000000", "evaluate-000002"}
        assert {item.state_name for item in below} == {"Completed"}
        assert all(set(item.tags) == {"tiny", run.key, "first", "second"} for item in [top, *below])
        tasks = await client.read_task_runs(
            task_run_filter=TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[names["step-000002"].id]))
        )
        assert {task.name for task in tasks} <= {f"{name}-000002" for name in ("rollout", "reward", "sample", "update")}
        artifacts = await client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
        )
    suffix = run.key.replace("/", "-")
    kinds = {(artifact.key, artifact.type) for artifact in artifacts}
    assert kinds == {(f"progress-{suffix}", "progress"), (f"steps-{suffix}", "table"), (f"curves-{suffix}", "image")}
    assert [artifact.data for artifact in artifacts if artifact.type == "progress"] == [100.0]


async def test_a_fatal_error_is_not_retried_and_ends_flow_and_step_failed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_config(tmp_path, reward={"functions": [{"path": f"{REWARDS}:miscounted"}]})
    with opened_runs(monkeypatch) as runs:
        state = await train(config, return_state=True)
    async with get_client() as client:
        below = await subflows(client, state.state_details.flow_run_id)
    assert state.is_failed()
    with pytest.raises(RunFailedError, match=r"after step 0: RewardError: .*miscounted.* got 17, wanted 16"):
        await state.aresult()
    assert runs[0].folder.summary()["status"] == "failed"
    assert [(item.name, item.state_name) for item in below] == [("step-000001", "Failed")]
    assert (tmp_path / "calls.txt").read_text().count("called") == 1


def update_after_the_next_generation(run) -> None:
    """Hold each update until the segments of the step after it are there, which only a step beside it can make."""
    real, last = run.learner.begin_step, run.config.experiment.steps

    def begin_step(groups, on_policy):
        following = run.step + 2
        if following <= last:
            wait_until(lambda: segment_exists(run.storage, request_name(following, 1)), f"step {following}")
        return real(groups, on_policy)

    run.learner.begin_step = begin_step


async def test_steps_overlap_within_max_lag_and_repeat(tmp_path, monkeypatch):
    config = tiny_config(
        tmp_path,
        experiment={"steps": 4},
        rollout={"max_lag": 1},
        # A group may be drawn in its own step and in the one after it, so that it is two versions old at the most.
        experience={"max_uses": 1, "step_seconds": 60.0, "time_window": 90.0},
    )
    with opened_runs(monkeypatch, update_after_the_next_generation) as runs:
        await train(config)
        await train(config)
    first, second = runs
    rows = read_metrics(first.folder.path)
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert all(row.metrics["optim/updates"] > 0 for row in rows)
    lags = [row.metrics["off_policy/max"] for row in rows]
    assert lags[0] == 0
    assert all(1 <= lag <= 2 for lag in lags[1:])
    outcome(second).assert_equals(outcome(first))
    # Without any overlap the same requests ask for the same versions: what is learned does not depend on the speeds.
    outcome(first).assert_equals(await loop_outcome(config))


class BrokenScorer:
    async def score(self, groups, *, step, version):
        raise InjectedError("the scorer of the evaluation")


def break_evaluation(run) -> None:
    run.evaluator = dataclasses.replace(run.evaluator, scorer=BrokenScorer())


@pytest.fixture(scope="module")
def held_out():
    return {"data": {"evaluation_size": 4}, "evaluation": {"every": 1, "prompts": 4}}


@pytest.mark.parametrize("disturb", [None, break_evaluation], ids=["evaluated", "evaluation fails"])
async def test_evaluation_touches_no_training_state(tmp_path, monkeypatch, held_out, disturb):
    never_evaluated = await loop_outcome(tiny_config(tmp_path / "loop", **held_out))
    with opened_runs(monkeypatch, *([disturb] if disturb else [])) as runs:
        await train(tiny_config(tmp_path / "flow", **held_out))
    evaluated = outcome(runs[0])
    assert sorted(runs[0].evaluations) == ([] if disturb else [0, 1, 2, 3])
    training = {
        step: {name: value for name, value in metrics.items() if not name.startswith("eval/")}
        for step, metrics in evaluated.metrics.items()
        if step > 0
    }
    dataclasses.replace(evaluated, metrics=training).assert_equals(never_evaluated)
