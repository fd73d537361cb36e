"""Increments, two stores, earlier steps and forks: wherever a run goes on from, it ends like an undisturbed one."""

import asyncio
import json
import logging
import math
import shutil
import threading
import time
from dataclasses import replace

import pytest
from tiny_runs import EVERY_STEP, Outcome, outcome, take_steps, tiny_config

from gyre_core.checkpoint.manifest import CheckpointManifest, ObjectRecord
from gyre_core.monitor.metrics import read_metrics
from gyre_core.storage import open_storage
from gyre_core.training import recovery
from gyre_core.training.build import open_run
from gyre_core.training.checkpoints import describe_checkpoints, open_checkpoints
from gyre_core.training.ending import write_run_summary
from gyre_core.training.resume import RESUME, Origin
from gyre_core.weights.digests import bytes_digest

STEPS = 5
REPLAY = {**EVERY_STEP, "incremental": True, "exact": "replay", "replay_budget": 1e9}
ALWAYS = {**EVERY_STEP, "incremental": True, "exact": "always"}


def config_of(output, checkpoint=REPLAY, **changes):
    changes.setdefault("experiment", {"steps": STEPS})
    return tiny_config(output, checkpoint=checkpoint, **changes)


async def train(config, last=None, **options):
    """Open a run, take its steps up to `last`, and leave it as a killed process would."""
    run = await open_run(config, **options)
    try:
        await take_steps(run, attempts=1, last=last)
        return run, outcome(run)
    finally:
        await run.close()


def bases(run):
    """The step of each checkpoint with that of what it builds on, None for a full one."""
    store = open_checkpoints(run.config, run.folder)
    manifests = [store.manifest(name) for name in store.names()]
    return {manifest.step: manifest.base and int(manifest.base[:8]) for manifest in manifests}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return asyncio.run(train(config_of(tmp_path_factory.mktemp("undisturbed"), EVERY_STEP)))[1]


@pytest.mark.parametrize("killed_after", range(1, STEPS))
@pytest.mark.parametrize("checkpoint", [REPLAY, ALWAYS], ids=["replay", "always"])
async def test_a_run_resumed_from_an_increment_ends_like_an_undisturbed_one(
    tmp_path, undisturbed, checkpoint, killed_after
):
    config = config_of(tmp_path, {**checkpoint, "keep": 9})
    run, _ = await train(config, last=killed_after)
    found = bases(run)
    assert sorted(found) == list(range(1, killed_after + 1))
    assert found[1] is None and (killed_after == 1 or found[2] == 1)
    if checkpoint is REPLAY:
        assert set(found.values()) <= {None, 1}
    resumed, found = await train(config, origin=RESUME)
    assert sorted(resumed.results) == list(range(killed_after + 1, STEPS + 1))
    found.assert_equals(undisturbed)


async def test_increments_go_on_building_on_the_same_base_after_a_resume_and_end_with_a_full_one(tmp_path, undisturbed):
    config = config_of(tmp_path, {**REPLAY, "keep": 9})
    await train(config, last=2)
    run, _ = await train(config, last=3, origin=RESUME)
    run, found = await train(config, origin=RESUME)
    assert bases(run) == {1: None, 2: 1, 3: 1, 4: 1, 5: None}
    found.assert_equals(undisturbed)


async def test_a_full_checkpoint_follows_once_a_recovery_would_repeat_for_too_long(tmp_path):
    run, _ = await train(config_of(tmp_path, {**REPLAY, "replay_budget": 1e-9, "keep": 9}))
    assert set(bases(run).values()) == {None}


async def test_the_base_of_an_increment_that_is_kept_stays_and_so_do_the_segments_it_repeats(tmp_path, undisturbed):
    config = config_of(tmp_path, {**REPLAY, "keep": 1})
    run, _ = await train(config, last=4)
    assert bases(run) == {1: None, 4: 1}
    manifest = open_checkpoints(config, run.folder).manifest("00000004-0001")
    sizes = [run.storage.size(name) for name in run.storage.list("pool") if int(name[5:13]) in (2, 3, 4)]
    assert manifest.pinned_bytes == sum(sizes)
    (await train(config, origin=RESUME))[1].assert_equals(undisturbed)


def rewrite_state(folder, **changes):
    """Change what a checkpoint says, with digests that match."""
    file, manifest_file = folder / "state.json", folder / "manifest.json"
    data = json.dumps(json.loads(file.read_text()) | changes).encode()
    file.write_bytes(data)
    manifest = CheckpointManifest.from_json(manifest_file.read_bytes())
    objects = {**manifest.objects, "state.json": ObjectRecord(len(data), bytes_digest(data))}
    changed = replace(manifest, objects=objects)
    manifest_file.write_bytes(changed.to_json())


async def test_a_repetition_that_leads_elsewhere_is_noticed_and_the_full_checkpoint_taken(
    tmp_path, undisturbed, caplog
):
    config = config_of(tmp_path, {**REPLAY, "keep": 1})
    run, _ = await train(config, last=3)
    rewrite_state(run.folder.path / "checkpoints" / "00000003-0001", learner_digest="0" * 32)
    with caplog.at_level(logging.WARNING):
        resumed, found = await train(config, origin=RESUME)
    assert "led to other weights when they were repeated here" in caplog.text
    assert sorted(resumed.results) == [2, 3, 4, 5]
    found.assert_equals(undisturbed)


async def test_a_segment_that_is_gone_makes_the_full_checkpoint_be_taken(tmp_path, undisturbed, caplog):
    config = config_of(tmp_path, {**REPLAY, "keep": 1})
    run, _ = await train(config, last=3)
    run.storage.delete("pool/00000002-0000.parquet")
    resumed, found = await train(config, origin=RESUME)
    assert "cannot be repeated" in caplog.text
    assert sorted(resumed.results) == [2, 3, 4, 5]
    found.assert_equals(undisturbed)


DUAL = {**REPLAY, "dual_write": True, "keep": 2}


def warm_folder(tmp_path, run):
    return tmp_path.with_name(f"{tmp_path.name}-warm") / run.key


async def lose_checkpoints(run, warm):
    shutil.rmtree(run.folder.path / "checkpoints")


async def lose_all_data(run, warm):
    """What a run has when its storage was another volume than its folder's."""
    for name in ("checkpoints", "pool", "policy", "learner", "requests", "claims", "tombstones"):
        shutil.rmtree(run.folder.path / name, ignore_errors=True)


async def lose_warm(run, warm):
    shutil.rmtree(warm)


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


async def damage_one_in_each(run, warm):
    flip(run.folder.path / "checkpoints" / "00000003-0001" / "pool.parquet")
    flip(run.folder.path / "checkpoints" / "00000001-0001" / "state.json")
    flip(warm / "checkpoints" / "00000001-0001" / "tensors.safetensors")
    (warm / "checkpoints" / "00000003-0001" / "state.json").unlink()


async def damage_both_manifests(run, warm):
    flip(run.folder.path / "checkpoints" / "00000003-0001" / "manifest.json")
    (warm / "checkpoints" / "00000001-0001" / "manifest.json").write_bytes(b"{")


@pytest.mark.parametrize(
    "harm", [lose_checkpoints, lose_all_data, lose_warm, damage_one_in_each, damage_both_manifests]
)
async def test_what_one_of_two_stores_still_has_is_enough(tmp_path, undisturbed, harm):
    config = config_of(tmp_path, DUAL)
    run, _ = await train(config, last=3)
    assert run.saver.metrics() == {"perf/warm_lag": 0.0, "perf/warm_errors": 0.0}
    warm = warm_folder(tmp_path, run)
    await harm(run, warm)
    resumed, found = await train(config, origin=RESUME)
    assert sorted(resumed.results) == [4, 5]
    # What a lost storage said of steps that are over is gone; what they led to is not.
    if harm is lose_all_data:
        kept = {step: found.consumed[step] for step in (4, 5)}
        assert kept == {step: undisturbed.consumed[step] for step in (4, 5)}
        found = Outcome(found.tensors, found.counters, undisturbed.consumed, found.metrics)
    found.assert_equals(undisturbed)
    assert "is missing" not in describe_checkpoints(resumed.key, str(tmp_path))[0]


async def test_a_warm_store_that_cannot_be_written_is_counted_and_holds_nobody_up(tmp_path, undisturbed, caplog):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the warm store's folder should be")
    config = config_of(tmp_path / "runs", {**DUAL, "warm_url": str(blocked)})
    run, found = await train(config)
    found.assert_equals(undisturbed)
    assert run.saver.metrics()["perf/warm_errors"] >= 1
    assert caplog.text.count("does not follow, and is tried again") == 1


async def test_other_folders_among_the_checkpoints_are_left_alone(tmp_path, undisturbed):
    config = config_of(tmp_path / "runs", {**DUAL, "warm_url": str(tmp_path / "warm")})
    run, _ = await train(config, last=3)
    for store in (run.folder.path, tmp_path / "warm" / run.key):
        shutil.copytree(store / "checkpoints" / "00000001-0001", store / "checkpoints" / "backup")
    resumed, found = await train(config, origin=RESUME)
    found.assert_equals(undisturbed)
    assert (resumed.folder.path / "checkpoints" / "backup").exists()
    assert (tmp_path / "warm" / run.key / "checkpoints" / "backup").exists()


async def test_an_evaluation_without_a_score_is_no_best(tmp_path):
    evaluated = {"data": {"evaluation_size": 4}, "evaluation": {"every": 1}}
    config = config_of(tmp_path, {"interval": 1e9, "incremental": True, "keep": 1, "keep_best": 1}, **evaluated)
    run = await open_run(config)
    for step, reward in enumerate((0.5, math.nan, 0.9), 1):
        await take_steps(run, attempts=1, last=step)
        run.saver.note_evaluation(step, reward)
    await take_steps(run, attempts=1)
    await run.close()
    store = open_checkpoints(config, run.folder)
    assert max(manifest.score or 0.0 for manifest in map(store.manifest, store.names())) == 0.9


async def test_differences_that_do_not_pay_are_left_off_for_a_while(tmp_path, monkeypatch):
    """At this learning rate a difference is larger than half; so after the first one come as many full ones as said."""
    monkeypatch.setattr("gyre_core.training.saver.PAUSE", 3)
    config = config_of(tmp_path, {**ALWAYS, "keep": 9}, experiment={"steps": 8}, learning={"lr": 0.1})
    run, _ = await train(config)
    assert bases(run) == {1: None, 2: 1, 3: None, 4: None, 5: None, 6: 5, 7: None, 8: None}


async def test_checkpoints_may_lie_apart_from_the_runs_other_data(tmp_path, undisturbed):
    apart = tmp_path / "apart"
    config = config_of(tmp_path / "runs", {**REPLAY, "url": str(apart)})
    run, _ = await train(config, last=3)
    assert not (run.folder.path / "checkpoints").exists()
    assert open_storage(apart / run.key).folders("checkpoints")
    (await train(config, origin=RESUME))[1].assert_equals(undisturbed)


async def test_the_best_policies_are_kept_beside_the_newest(tmp_path):
    """Evaluations after steps 1 to 4 find .5, .9, .6 and .7: the first checkpoint after .9 is that of step 3."""
    evaluated = {"data": {"evaluation_size": 4}, "evaluation": {"every": 1}}
    config = config_of(tmp_path, {"interval": 1e9, "incremental": True, "keep": 1, "keep_best": 1}, **evaluated)
    run = await open_run(config)
    for step, reward in enumerate((0.5, 0.9, 0.6, 0.7), 1):
        await take_steps(run, attempts=1, last=step)
        run.saver.note_evaluation(step, reward)
    await take_steps(run, attempts=1)
    await run.save()
    await run.close()
    store = open_checkpoints(config, run.folder)
    manifests = [store.manifest(name) for name in store.names()]
    assert [(each.step, each.score, each.scored_step) for each in manifests] == [(3, 0.9, 2), (5, 0.7, 4)]


async def test_going_back_to_an_earlier_step_gives_up_what_came_later(tmp_path, undisturbed):
    config = config_of(tmp_path, {**REPLAY, "keep": 9})
    await train(config, last=4)
    with pytest.raises(ValueError, match=r"--resume.step 7: .* it has: 1, 2, 3, 4"):
        await open_run(config, origin=Origin(step=7))
    run = await open_run(config, origin=Origin(step=2))
    await run.close()
    # Killed before its first step, it still goes on from there and not from what it gave up.
    resumed, found = await train(config, origin=RESUME)
    assert sorted(resumed.results) == [3, 4, 5]
    found.assert_equals(undisturbed)


@pytest.mark.parametrize("by", ["tiny", "tiny/source"])
async def test_a_fork_goes_on_where_the_other_run_was_and_leaves_it_alone(tmp_path, undisturbed, by):
    config = config_of(tmp_path, {**REPLAY, "keep": 9})
    source, _ = await train(config, last=3, run_id="source")
    before = sorted(file.stat().st_mtime_ns for file in source.folder.path.rglob("*") if file.is_file())
    # By its name alone the source is the newest run there is, which the fork itself is soon.
    fork, found = await train(config, run_id="fork", origin=Origin(source=by))
    assert (fork.key, sorted(fork.results)) == ("tiny/fork", [4, 5])
    # It is a new run, which nothing has recovered.
    assert not [name for row in read_metrics(fork.folder.path) for name in row.metrics if name.startswith("recovery/")]
    found = Outcome(found.tensors, found.counters, undisturbed.consumed, found.metrics)
    found.assert_equals(undisturbed)
    assert sorted(file.stat().st_mtime_ns for file in source.folder.path.rglob("*") if file.is_file()) == before


async def test_a_fork_of_a_complete_run_takes_further_steps(tmp_path):
    source, _ = await train(config_of(tmp_path, {**REPLAY, "keep": 9}, experiment={"steps": 3}))
    write_run_summary(source, "completed")
    with pytest.raises(ValueError, match="is complete: 3 of 3 steps are done"):
        await open_run(source.config, origin=Origin(source=source.key))
    fork, _ = await train(config_of(tmp_path, {**REPLAY, "keep": 9}), origin=Origin(source=source.key))
    assert sorted(fork.results) == [4, 5]


async def test_a_fork_may_change_what_it_learns_by_but_not_what_it_learns(tmp_path):
    source, _ = await train(config_of(tmp_path, {**REPLAY, "keep": 9}), last=3)
    other = config_of(tmp_path, REPLAY, learning={"lr": 5e-3, "update_steps": 2})
    fork, _ = await train(other, run_id="fork", origin=Origin(source=source.key, step=2))
    assert sorted(fork.results) == [3, 4, 5]
    wider = config_of(tmp_path, REPLAY, models={"tiny": {"hidden_size": 32, "layers": 1}})
    with pytest.raises(ValueError, match=r"models\.tiny\.hidden_size: was 16, is now 32"):
        await open_run(wider, run_id="wider", origin=Origin(source=source.key))
    assert not (tmp_path / "tiny" / "wider").exists()


OTHER_WAYS = {
    "learning": {"lr": 5e-3, "betas": (0.5, 0.9), "clip_high": 0.1, "weight_decay": 0.3, "entropy_coef": 0.1},
    "rollout": {"temperature": 0.7, "max_lag": 1},
}
"""With each of these the steps of a run would lead elsewhere."""


@pytest.mark.parametrize("step", [2, 3])
async def test_a_fork_repeats_the_other_runs_steps_as_they_were_taken(tmp_path, step):
    source, _ = await train(config_of(tmp_path, {**REPLAY, "keep": 9}), last=step)
    assert bases(source)[step] == 1, "it is an increment"
    other = config_of(tmp_path, REPLAY, **OTHER_WAYS)
    fork = await open_run(other, run_id="fork", origin=Origin(source=source.key, step=step))
    await fork.close()
    assert fork.step == step
    kept, found = source.learner.state()[0], fork.learner.state()[0]
    assert all(kept[name].equal(found[name]) for name in kept)
    # Whoever takes over now has nothing to repeat.
    assert bases(fork)[step] is None
    resumed = await open_run(other, run_id="fork", origin=RESUME)
    await resumed.close()
    assert (resumed.step, resumed.recovery.steps) == (step, 0)
    assert all(kept[name].equal(tensor) for name, tensor in resumed.learner.state()[0].items())


@pytest.mark.parametrize("place", ["url", "warm_url"])
async def test_a_new_run_takes_nothing_of_an_older_one_of_its_name(tmp_path, place):
    config = config_of(tmp_path / "runs", {**DUAL, place: str(tmp_path / "apart")})
    await train(config, last=2, run_id="again")
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(ValueError, match="apart/tiny/again holds checkpoints of another run tiny/again"):
        await open_run(config, run_id="again")
    assert not (tmp_path / "runs" / "tiny" / "again").exists()


async def test_a_fork_that_died_on_its_way_may_be_begun_again(tmp_path, undisturbed, monkeypatch):
    config = config_of(tmp_path / "runs", {**REPLAY, "keep": 9, "url": str(tmp_path / "apart")})
    source, _ = await train(config, last=3, run_id="source")
    fork = Origin(source=source.key)
    with monkeypatch.context() as patch:
        patch.setattr("gyre_core.training.recovery.copy_segments", dies)
        with pytest.raises(KeyboardInterrupt):
            await open_run(config, run_id="fork", origin=fork)
    with pytest.raises(ValueError, match=r"tiny/fork ended before it had begun from a checkpoint of tiny/source"):
        await open_run(config, run_id="fork", origin=RESUME)
    shutil.rmtree(tmp_path / "runs" / "tiny" / "fork")
    _, found = await train(config, run_id="fork", origin=fork)
    Outcome(found.tensors, found.counters, undisturbed.consumed, found.metrics).assert_equals(undisturbed)


async def test_a_resume_that_is_given_up_stops_repeating_and_writes_nothing(tmp_path, monkeypatch):
    config = config_of(tmp_path, {**REPLAY, "keep": 9})
    run, _ = await train(config, last=4)
    real, begun, repeated = recovery.replayed_minibatches, threading.Event(), []

    def slow(*arguments):
        for minibatches in real(*arguments):
            begun.set()
            time.sleep(0.3)
            yield minibatches
            repeated.append(minibatches)

    monkeypatch.setattr(recovery, "replayed_minibatches", slow)
    opening = asyncio.create_task(open_run(config, origin=RESUME))
    assert await asyncio.to_thread(begun.wait, 60)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await asyncio.sleep(1.5)
    assert len(repeated) <= 1, "three steps were to be repeated"
    monkeypatch.undo()
    before = sorted(file for file in run.folder.path.rglob("*") if file.name != "metrics.jsonl")
    resumed = await open_run(config, origin=RESUME)
    await resumed.close()
    assert (resumed.step, resumed.epoch) == (4, 3)
    assert resumed.recovery.steps == 3
    assert set(before) <= set(run.folder.path.rglob("*"))


def dies(*_):
    """Ends like a process that leaves all as it is."""
    raise KeyboardInterrupt


async def test_other_contents_behind_the_same_settings_are_told_apart(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{number}+1=", "answer": "1"}) + "\n" for number in range(40)))
    config = config_of(tmp_path / "runs", data={"path": str(rows), "evaluation_size": 0})
    await train(config, last=1)
    rows.write_text(rows.read_text().replace("9+1", "9+2"))
    with pytest.raises(ValueError, match="training prompts: had digest"):
        await open_run(config, origin=RESUME)
