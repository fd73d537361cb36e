"""A disk full at any write of a run loses nothing: the run goes on, or stops in words and resumes, bit for bit."""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from full_disk import FillingDisk, give_space, leave_free, unfinished_files
from tiny_runs import EVERY_STEP, STAGES, opened_runs, outcome, tiny_config

from flows.train import train
from gyre_core.config import GyreConfig
from gyre_core.storage import OutOfSpaceError
from gyre_core.training.build import open_run
from gyre_core.training.export import export_run
from gyre_core.training.resume import RESUME
from gyre_core.training.run import RunFailedError, TrainingRun

UNGUARDED = {"min_free": 0}
WRITES = {
    "start": ("config.yaml", "owner.lock", "start_policy", "learner/epochs/", "policy/"),
    "resume": ("owner.lock", "config.new", "learner/epochs/", "policy/"),
    "2": (
        *("requests/", "claims/", "pool/", "/admit-", "/consume-", "policy/", "metrics.jsonl", "completions/"),
        *("tensors.safetensors", "pool.parquet", "state.json", "manifest.json"),
    ),
}
"""What is written by phases of a run, some of it at the least."""
FILLED_STEP = 2
RUN_ID = "walk"
"""The same for all tries, so that a file counts as the same kind in each."""


def check_walk(disk: FillingDisk, phases: tuple[str, ...]) -> None:
    """Every kind of write met a full disk."""
    for phase in phases:
        kinds = [kind for met, kind in disk.met if met == phase]
        missing = [part for part in WRITES[phase] if not any(part in kind for kind in kinds)]
        assert not missing, f"{missing} of {kinds} in phase {phase}"


def check_told(error: OSError, folder) -> None:
    """The error is a sentence with the place, and nothing that was begun is left."""
    assert isinstance(error, OutOfSpaceError), repr(error)
    assert str(error).startswith(f"no space left in {folder}"), error
    assert unfinished_files(folder) == []


async def take_step(run: TrainingRun, step: int) -> None:
    """One write after the other, so that each meets a full disk of its own."""
    for stage in STAGES:
        await stage(run, step)
    await run.publisher.settled()
    await run.finish(step)


async def open_on(disk: FillingDisk, config: GyreConfig) -> TrainingRun:
    """Open a run, again and again while the disk is full; until it is open nothing is left."""
    while True:
        disk.phase = "start"
        try:
            return await open_run(config, run_id=RUN_ID)
        except OSError as error:
            check_told(error, disk.folder)
            give_space(disk.folder)
            assert [path for path in disk.folder.rglob("*") if path.is_file()] == []
        finally:
            disk.phase = None


async def test_a_run_goes_on_when_there_is_space_again(small_volume, reference):
    disk = FillingDisk(small_volume(32_000))
    run = await open_on(disk, tiny_config(disk.folder, checkpoint=EVERY_STEP, storage=UNGUARDED))
    failures = 0
    for step in (1, 2, 3):
        disk.phase = "2" if step == FILLED_STEP else None
        while run.step < step or run.saver.store.steps()[-1] < step:
            try:
                await take_step(run, step)
            except OSError as error:
                check_told(error, disk.folder)
                failures += 1
            give_space(disk.folder)
    disk.phase = None
    check_walk(disk, ("start", "2"))
    assert failures >= 8
    outcome(run).assert_equals(reference)
    await run.close()


async def test_a_run_stops_and_resumes_as_often_as_the_disk_is_full(small_volume, reference):
    disk = FillingDisk(small_volume(32_000))
    config = tiny_config(disk.folder, checkpoint=EVERY_STEP, storage=UNGUARDED)
    run = await open_run(config, run_id=RUN_ID)
    stops = 0
    while True:
        try:
            while run.step < 3:
                step = run.step + 1
                disk.phase = "2" if step == FILLED_STEP else None
                await take_step(run, step)
            await run.save()
            break
        except OSError as error:
            check_told(error, disk.folder)
            stops += 1
        for step in list(run.open_steps):
            await run.abandon(step)
        with contextlib.suppress(OutOfSpaceError):
            await run.save()
        await run.close()
        give_space(disk.folder)
        run = await resumed_on(disk, config)
    disk.phase = None
    check_walk(disk, ("2", "resume"))
    assert stops >= 8
    assert run.epoch > stops
    outcome(run).assert_equals(reference)
    await run.close()


async def resumed_on(disk: FillingDisk, config: GyreConfig) -> TrainingRun:
    """Resume a run, again and again while the disk is full."""
    while True:
        disk.phase = "resume"
        try:
            return await open_run(config, origin=RESUME)
        except OSError as error:
            check_told(error, disk.folder)
            give_space(disk.folder)
        finally:
            disk.phase = None


def filling_at(step: int, size: int, *, space_after: float | None = None):
    """Prepares a run so that its volume has no more than `size` bytes free from the beginning of a step on.

    `space_after` seconds later there is space again.
    """

    def prepare(run: TrainingRun) -> None:
        real, folder, filled = run.guard.admit, volume_of(run), False

        async def admit(number: int) -> None:
            nonlocal filled
            if number == step and not filled:
                filled = True
                leave_free(folder, size)
                if space_after is not None:
                    asyncio.get_running_loop().call_later(space_after, give_space, folder)
            await real(number)

        run.guard.admit = admit

    return prepare


def volume_of(run: TrainingRun) -> Path:
    return next(parent for parent in run.folder.path.parents if parent.is_mount())


def summary(run: TrainingRun) -> dict:
    return json.loads((run.folder.path / "summary.json").read_text())


@pytest.mark.usefixtures("prefect_server")
async def test_the_flow_stops_in_words_and_resumes(small_volume, monkeypatch, reference):
    config = tiny_config(small_volume(32_000), storage=UNGUARDED)
    with (
        opened_runs(monkeypatch, filling_at(2, 0)) as runs,
        pytest.raises(
            RunFailedError, match=r"after step 1: OutOfSpaceError: no space left in .*/requests for 0{7}2-0000\.1"
        ),
    ):
        await train(config)
    assert runs[0].fatal is None, "it was tried again"
    assert runs[0].saver.store.steps() == []
    give_space(volume_of(runs[0]))
    with opened_runs(monkeypatch) as runs:
        await train(config, resume=True)
    assert summary(runs[0])["status"] == "completed"
    outcome(runs[0]).assert_equals(reference)


@pytest.mark.usefixtures("prefect_server")
async def test_a_guarded_flow_waits_for_space_and_goes_on(small_volume, monkeypatch, reference, caplog):
    config = tiny_config(small_volume(32_000), storage={"min_free": 1_000_000})
    with opened_runs(monkeypatch, filling_at(2, 500_000, space_after=1.5)) as runs:
        await train(config)
    assert caplog.text.count("step 2 waits for space") == 1
    assert summary(runs[0])["status"] == "completed"
    outcome(runs[0]).assert_equals(reference)


@pytest.mark.usefixtures("prefect_server")
async def test_a_guarded_flow_that_waits_in_vain_stops_with_what_it_has(small_volume, monkeypatch, reference):
    config = tiny_config(small_volume(32_000), storage={"min_free": 1_000_000, "pause_timeout": 0.5})
    told = r"after step 1: PauseExpiredError: .* has 4.. KiB free, .* more did not come free within 0\.5 s .* --resume"
    with (
        opened_runs(monkeypatch, filling_at(2, 500_000)) as runs,
        pytest.raises(RunFailedError, match=told),
    ):
        await train(config)
    assert runs[0].saver.store.steps() == [1], "the reserve holds the last checkpoint"
    assert (summary(runs[0])["status"], summary(runs[0])["steps"]) == ("failed", 1)
    give_space(volume_of(runs[0]))
    with opened_runs(monkeypatch) as runs:
        await train(config, resume=True)
    assert sorted(runs[0].results) == [2, 3]
    outcome(runs[0]).assert_equals(reference)


@pytest.mark.usefixtures("prefect_server")
async def test_without_space_for_the_export_the_trained_policy_is_kept(small_volume, monkeypatch):
    config = tiny_config(small_volume(32_000), experiment={"steps": 1}, storage=UNGUARDED)

    def fill_after_last_save(run: TrainingRun) -> None:
        real = run.save

        async def save() -> None:
            await real()
            leave_free(volume_of(run), 0)

        run.save = save

    with (
        opened_runs(monkeypatch, fill_after_last_save) as runs,
        pytest.raises(RunFailedError, match=r"after step 1: OutOfSpaceError: no space left in .* for export"),
    ):
        await train(config)
    (run,) = runs
    assert unfinished_files(run.folder.path) == []
    give_space(volume_of(run))
    assert run.saver.store.steps() == [1]
    assert (export_run(run.key, config.experiment.output) / "model.safetensors").is_file()
