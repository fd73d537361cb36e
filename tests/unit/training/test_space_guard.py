"""The storage guard on real runs with a small volume: it makes room, holds steps back, waits, gives up in words."""

import asyncio
import logging
import re
from contextlib import asynccontextmanager

import pytest
from full_disk import give_space, leave_free
from training_configs import tiny_config

from deployments.cli import main
from gyre_core.config import dump_config
from gyre_core.experience.segments import segment_ids
from gyre_core.monitor.metrics import read_metrics
from gyre_core.storage import OutOfSpaceError
from gyre_core.training import stages
from gyre_core.training.build import check_inputs, open_run
from gyre_core.training.resume import NEW
from gyre_core.training.run import FATAL_ERRORS
from gyre_core.training.space_guard import PauseExpiredError
from gyre_core.training.space_law import Level

MIN_FREE = 1_000_000
EVERY_STEP = {"interval": 1e-6}
AT_THE_END = {"interval": 1e6}


@asynccontextmanager
async def opened(folder, **sections):
    given = {"experiment": {"steps": 20}, "experience": {"max_uses": 9}, "storage": {"min_free": MIN_FREE}}
    for name, section in sections.items():
        given[name] = given.get(name, {}) | section
    run = await open_run(tiny_config(folder, **given))
    try:
        yield run
    finally:
        await run.close()


async def step_changed_at_its_end(run, step, change):
    """Take a step, with a change when nothing of it is on its way to storage any more."""
    for stage in (stages.rollout, stages.reward, stages.sample, stages.update):
        await stage(run, step)
    await run.publisher.settled()
    change()
    await run.finish(step)
    await run.turns.release(step)


async def step_with(run, step, room):
    """Take a step at whose end there is room for so many further ones, on the volume that the run lies on."""

    def leave_room():
        need = run.guard._sights[0].need
        leave_free(volume_of(run), MIN_FREE + need.once + round(room * need.step))

    await step_changed_at_its_end(run, step, leave_room)


def volume_of(run):
    return next(parent for parent in run.folder.path.parents if parent.is_mount())


def row_of(run, step):
    return next(row.metrics for row in read_metrics(run.folder.path) if row.step == step)


async def test_with_room_nothing_is_spared(tmp_path, small_volume):
    async with opened(small_volume(16_000), checkpoint=EVERY_STEP) as run:
        for step in (1, 2, 3):
            await stages.take_step(run, step)
        assert run.saver.store.steps() == [2, 3]
        assert len(run.chain.versions()) == 3
        row = row_of(run, 3)
        assert row["experience/samples"] == 3 * 16
        assert row["perf/space_guard"] == 0.0
        assert MIN_FREE < row["perf/free_bytes"] < 16_000 * 1024


async def test_first_old_checkpoints_versions_and_samples_go(tmp_path, small_volume, caplog):
    async with opened(small_volume(16_000), checkpoint=EVERY_STEP) as run:
        for step in (1, 2, 3):
            await stages.take_step(run, step)
        with caplog.at_level(logging.INFO, "gyre_core.training.space_guard"):
            await step_with(run, 4, room=5)
        assert row_of(run, 4)["perf/space_guard"] == 1.0
        assert run.saver.store.steps() == [4]
        assert run.chain.versions() == [run.version]
        left = run.pool.metrics(run.now(4))["experience/samples"]
        assert left < 4 * 16
        # The checkpoint after the step let their segments go.
        assert len(segment_ids(run.storage)) * 16 == left
        assert re.search(
            r"space is short: .* has .* free, the next step and checkpoint take .*, and 977 KiB", caplog.text
        )
        assert "groups left the experience pool" in caplog.text
        # It goes on like this, and tells of it once; with space again it keeps what it did before.
        await step_with(run, 5, room=5)
        assert caplog.text.count("space is short") == 1
        give_space(volume_of(run))
        for step in (6, 7):
            await stages.take_step(run, step)
        assert run.saver.store.steps() == [6, 7]
        assert row_of(run, 7)["perf/space_guard"] == 0.0


async def test_a_checkpoint_is_brought_forward_when_it_frees_as_much_as_it_takes(tmp_path, small_volume):
    async with opened(small_volume(16_000), checkpoint=AT_THE_END, learning={"lr": 1e-3}) as run:
        await stages.take_step(run, 1)
        (segment,) = run.storage.list("pool")
        assert 4.5 < 3 * 4 * 3192 / run.storage.size(segment) < 5.5, "weights and moments are about five segments"
        for step in range(2, 5):
            await step_with(run, step, room=5)
            assert run.saver.store.steps() == []
            assert len(segment_ids(run.storage)) == step
        while not run.saver.store.steps():
            step += 1
            await step_with(run, step, room=5)
        assert run.saver.store.steps() == [step]
        assert step in (5, 6)
        assert segment_ids(run.storage) == []


async def test_then_steps_do_not_overlap(tmp_path, small_volume):
    async with opened(small_volume(16_000), rollout={"max_lag": 1}, checkpoint=AT_THE_END) as run:
        await stages.take_step(run, 1)
        await asyncio.wait_for(run.guard.admit(3), 10)
        await step_with(run, 2, room=2)
        assert row_of(run, 2)["perf/space_guard"] == 2.0
        waiting = asyncio.create_task(run.guard.admit(4))
        await asyncio.wait_for(run.guard.admit(3), 10)
        await asyncio.sleep(0.2)
        assert not waiting.done(), "step 3 is in training"
        await run.turns.release(3)
        await asyncio.wait_for(waiting, 10)


async def test_at_last_the_run_pauses_with_a_checkpoint_until_there_is_space(tmp_path, small_volume, caplog):
    async with opened(small_volume(16_000), checkpoint=AT_THE_END) as run:
        await stages.take_step(run, 1)
        await step_with(run, 2, room=-0.5)
        assert row_of(run, 2)["perf/space_guard"] == 3.0
        assert run.saver.store.steps() == [2]
        leave_free(volume_of(run), MIN_FREE)
        step = asyncio.create_task(stages.take_step(run, 3))
        async with asyncio.timeout(20):
            while "step 3 waits for space, for 1800 s at the most" not in caplog.text:
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.5)
            assert 3 not in run.open_steps
            give_space(volume_of(run))
            await step
        assert row_of(run, 3)["perf/space_guard"] == 0.0
        assert row_of(run, 3)["time/step"] < 1.5, "the pause is none of the step's time"


async def test_a_pause_that_brings_no_space_ends_in_a_sentence(tmp_path, small_volume):
    folder = small_volume(16_000)
    async with opened(folder, storage={"pause_timeout": 0.3}) as run:
        leave_free(folder, MIN_FREE // 2)
        with pytest.raises(PauseExpiredError) as raised:
            await stages.take_step(run, 1)
        assert re.fullmatch(
            rf"{run.folder.path} has 4\d\d KiB free, the next step and checkpoint take [\d.]+ KiB, and 977 KiB are "
            r"to stay free \(storage.min_free\); [\d.]+ KiB more did not come free within 0.3 s "
            r"\(storage.pause_timeout\): free them, or lower storage.min_free, and go on with --resume",
            str(raised.value),
        )
        assert isinstance(raised.value, OutOfSpaceError)
        assert PauseExpiredError in FATAL_ERRORS


async def test_only_the_volume_that_is_short_is_spared(tmp_path, small_volume):
    """With the data elsewhere the run folder holds logs and the export, and nothing there may be spared."""
    folder = small_volume(16_000)
    async with opened(folder, storage={"url": str(tmp_path / "data")}, checkpoint=EVERY_STEP) as run:
        for step in (1, 2, 3):
            await stages.take_step(run, step)
        leave_free(folder, MIN_FREE)
        await run.guard.relieve(3)
        assert run.guard.metrics()["perf/space_guard"] == Level.PAUSE
        assert run.guard.metrics()["perf/free_bytes"] == pytest.approx(MIN_FREE, abs=4096)
        assert run.saver.store.steps() == [2, 3]
        assert run.guard.versions_kept == 3
        assert run.pool.metrics(run.now(3))["experience/samples"] == 3 * 16


async def need_of(folder, **sections):
    """What the next step and checkpoint take on the volume of the run's data, after one step."""
    async with opened(folder, **sections) as run:
        await stages.take_step(run, 1)
        await run.guard.relieve(1)
        (sight,) = [sight for sight in run.guard._sights if sight.place.steps]
        assert run.guard.checkpoint_bytes > 0
        return sight.need.once, run.guard.checkpoint_bytes


async def test_a_volume_is_to_hold_all_that_the_run_puts_on_it(tmp_path, small_volume):
    """Two policy versions and a checkpoint, wherever they lie on it, and the warm copy of the checkpoint as well."""
    folder, never = small_volume(16_000), {"interval": 1e6}
    alone, checkpoint = await need_of(folder, checkpoint=never)
    assert alone == 2 * 4 * 3192 + checkpoint
    parts = {"storage": {"url": str(folder / "data")}, "checkpoint": never | {"url": str(folder / "checkpoints")}}
    assert await need_of(folder, **parts) == (alone, checkpoint)
    dual = never | {"dual_write": True}
    assert await need_of(folder, checkpoint=dual) == (alone + checkpoint, checkpoint)
    assert await need_of(folder, checkpoint=dual | {"warm_url": str(folder / "warm")}) == (
        alone + checkpoint,
        checkpoint,
    )
    assert await need_of(folder, checkpoint=dual | {"warm_url": str(tmp_path / "warm")}) == (alone, checkpoint)


async def test_a_full_warm_store_holds_nothing_back(tmp_path, small_volume):
    """Its copies fail and are counted, the run takes its steps, and with space it is brought up to date."""
    warm = small_volume(1000)
    leave_free(warm, 0)
    settings = EVERY_STEP | {"dual_write": True, "warm_url": str(warm)}
    async with opened(tmp_path, checkpoint=settings) as run:
        for step in (1, 2, 3):
            await stages.take_step(run, step)
            assert run.saver._warm.wait(10)
        assert row_of(run, 3)["perf/space_guard"] == 0.0
        assert row_of(run, 3)["perf/warm_errors"] == 2.0
        assert run.saver.store.steps() == [2, 3]
        give_space(warm)
        await stages.take_step(run, 4)
        assert run.saver._warm.wait(10)
        assert run.saver.metrics()["perf/warm_lag"] == 0.0


def test_a_run_that_cannot_fit_is_refused_before_a_model_loads(tmp_path, small_volume, capsys):
    folder = small_volume(1024)
    config = tiny_config(tmp_path, experiment={"output": str(folder / "runs")}, storage={"min_free": 1_000_000})
    sentence = (
        rf"{folder}/runs has 1 MiB free, and the run takes at least [\d.]+ KiB without its samples \(policy versions "
        r"[\d.]+ KiB, checkpoints [\d.]+ KiB, export [\d.]+ KiB\), beside the 977 KiB of storage.min_free; free some, "
        "set storage.url to a larger volume, or lower storage.min_free"
    )
    with pytest.raises(ValueError, match=sentence):
        asyncio.run(check_inputs(config, run_id=None, origin=NEW))
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    assert main(["train", "--config", str(file)]) == 2
    assert re.search(sentence, capsys.readouterr().err)
    assert list(folder.iterdir()) == []


async def test_a_run_whose_warm_copy_cannot_fit_beside_it_is_refused(tmp_path, small_volume):
    """3,192 parameters of 4 bytes: 2 versions, an export and 2 checkpoints of 3 times that, which are 112 KiB."""
    folder = small_volume(1024)
    parts = {"experiment": {"output": str(folder / "runs")}, "storage": {"min_free": 1024 * (1024 - 150)}}
    await check_inputs(tiny_config(tmp_path, **parts), run_id=None, origin=NEW)
    dual = {"dual_write": True}
    with pytest.raises(ValueError, match=r"at least 187 KiB .*checkpoints 74.8 KiB, export 12.5 KiB, warm copy 74.8"):
        await check_inputs(tiny_config(tmp_path, checkpoint=dual, **parts), run_id=None, origin=NEW)
    apart = dual | {"warm_url": str(tmp_path / "warm")}
    await check_inputs(tiny_config(tmp_path, checkpoint=apart, **parts), run_id=None, origin=NEW)


async def test_a_run_that_may_not_fit_is_warned_of(tmp_path, small_volume, caplog):
    """3,192 parameters of 4 bytes: 2 to 5 versions, 2 or 10 checkpoints of 3 times that, one export."""
    folder = small_volume(1024)
    parts = {"checkpoint": {"keep": 9}, "storage": {"min_free": 700_000}}
    config = tiny_config(tmp_path, experiment={"output": str(folder / "runs")}, **parts)
    await check_inputs(config, run_id=None, origin=NEW)
    assert "takes up to 449 KiB without its samples" in caplog.text
    assert "older checkpoints and policy versions will go early" in caplog.text


async def test_a_guard_that_is_off_lets_the_disk_fill_up(tmp_path, small_volume):
    folder = small_volume(16_000)
    async with opened(folder, storage={"min_free": 0}) as run:
        leave_free(folder, 0)
        with pytest.raises(OutOfSpaceError, match=f"no space left in {run.folder.path}"):
            await stages.take_step(run, 1)
        give_space(folder)
        await stages.take_step(run, 1)


async def test_a_checkpoint_without_space_is_counted_and_training_goes_on(tmp_path, small_volume, caplog):
    folder = small_volume(16_000)
    async with opened(folder, storage={"min_free": 0}, checkpoint=EVERY_STEP) as run:
        await stages.take_step(run, 1)
        real = run.saver.store.save

        def save(checkpoint, created_at):
            leave_free(folder, 8192)
            try:
                return real(checkpoint, created_at)
            finally:
                give_space(folder)

        await step_changed_at_its_end(run, 2, lambda: setattr(run.saver.store, "save", save))
        run.saver.store.save = real
        assert row_of(run, 2)["perf/checkpoint_failed"] == 1.0
        told = r"no checkpoint after step 2, for want of [\d.]+ KiB, and earlier ones stand: no space left in"
        assert re.search(told, caplog.text)
        assert run.saver.store.newest().step == 1
        await stages.take_step(run, 3)
        assert run.saver.store.newest().step == 3
        assert "perf/checkpoint_failed" not in row_of(run, 3)
