"""Checkpoints: restored bit for bit, whole or not at all, and one complete one at every instant."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from recorded_storage import RecordedStorage, StopError

from gyre_core.checkpoint.manifest import CheckpointManifest
from gyre_core.checkpoint.retention import Retention
from gyre_core.checkpoint.store import Checkpoint, CheckpointStore, CorruptCheckpointError
from gyre_core.cluster.epochs import SupersededError
from gyre_core.storage import LocalStorage, MemoryStorage, OutOfSpaceError

OBJECTS = ("tensors.safetensors", "pool.parquet", "state.json", "manifest.json")


def checkpoint_of(step, epoch=1, size=100):
    """A checkpoint that is a function of its step and epoch."""
    generator = torch.Generator().manual_seed(1000 * epoch + step)
    tensors = {
        "weight": torch.randn(size, generator=generator),
        "rounded": torch.randn(size, generator=generator).bfloat16(),
        "random": torch.randint(256, (size,), generator=generator, dtype=torch.uint8),
        "special": torch.tensor([torch.nan, torch.inf, -0.0, 1e-45]),
        "scalar": torch.tensor(step),
        "empty": torch.zeros(0, 3),
    }
    rng = np.random.default_rng([step, epoch])
    table = pa.table(
        {"row": np.arange(size), "reward": rng.normal(size=size), "name": [str(row) for row in range(size)]}
    )
    state = {"version": {"number": step}, "ratio": 0.1, "name": "ä"}
    return Checkpoint(step=step, epoch=epoch, tensors=tensors, tables={"pool": table}, state=state)


def raw(tensor):
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def check_equal(found, expected):
    assert (found.step, found.epoch) == (expected.step, expected.epoch)
    assert {name: raw(tensor) for name, tensor in found.tensors.items()} == {
        name: raw(tensor) for name, tensor in expected.tensors.items()
    }
    assert found.state == expected.state
    assert found.tables.keys() == expected.tables.keys()
    for name, table in found.tables.items():
        assert table.equals(expected.tables[name])


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    return LocalStorage(tmp_path) if request.param == "local" else MemoryStorage(f"checkpoint/{tmp_path.name}")


def test_a_checkpoint_comes_back_bit_for_bit(storage):
    store = CheckpointStore(storage, Retention(2))
    assert store.newest() is None
    manifest = store.save(checkpoint_of(7), created_at=123.0)
    check_equal(CheckpointStore(storage, Retention(2)).newest(), checkpoint_of(7))
    folder = "checkpoints/00000007-0001"
    assert sorted(storage.list(folder)) == sorted(f"{folder}/{name}" for name in OBJECTS)
    assert manifest.size == sum(storage.size(f"{folder}/{name}") for name in OBJECTS if name != "manifest.json")


def test_saving_a_step_again_changes_nothing(tmp_path):
    storage = RecordedStorage(tmp_path)
    store = CheckpointStore(storage, Retention(2))
    size = store.save(checkpoint_of(1), 0.0)
    storage.changes.clear()
    assert store.save(checkpoint_of(1), 1.0) == size
    assert storage.changes == []


def test_a_store_that_does_not_answer_is_not_an_empty_one(tmp_path):
    (tmp_path / "file").write_text("where the store's folder should be")
    blocked, whole = LocalStorage(tmp_path / "file"), LocalStorage(tmp_path / "whole")
    CheckpointStore(whole, Retention(2)).save(checkpoint_of(3), 0.0)
    with pytest.raises(OSError, match="Not a directory"):
        CheckpointStore(blocked, Retention(2)).names()
    for store in (CheckpointStore(blocked, Retention(2), whole), CheckpointStore(whole, Retention(2), blocked)):
        assert store.names() == ["00000003-0001"]
        check_equal(store.newest(), checkpoint_of(3))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_are_kept(storage, keep):
    store = CheckpointStore(storage, Retention(keep))
    for step in range(1, 6):
        store.save(checkpoint_of(step), 0.0)
        assert store.steps() == list(range(max(1, step - keep + 1), step + 1))
        check_equal(store.newest(), checkpoint_of(step))
    assert len(storage.folders("checkpoints")) == keep


def test_a_superseded_owner_deletes_nothing(storage):
    """The next one may have begun to build on what this one would delete."""
    store = CheckpointStore(storage, Retention(1))
    store.save(checkpoint_of(1), 0.0)

    def superseded():
        raise SupersededError

    store.require_owned = superseded
    with pytest.raises(SupersededError):
        store.save(checkpoint_of(2), 0.0)
    check_equal(store.load("00000001-0001"), checkpoint_of(1))


def test_what_an_owner_deletes_was_needed_by_nobody_when_it_last_looked(storage):
    """Another one takes over after the look: it goes on from what was the newest before."""
    store = CheckpointStore(storage, Retention(1))
    store.save(checkpoint_of(1), 0.0)

    def overtaken():
        other = CheckpointStore(storage, Retention(1))
        other.save(replace(checkpoint_of(3, 2), base="00000002-0001"), 0.0)

    store.require_owned = overtaken
    store.save(checkpoint_of(2), 0.0)
    assert [name[:8] for name in store.names()] == ["00000002", "00000003"]


def test_a_later_epoch_is_newer_whatever_its_step(storage):
    """Whoever takes over after a damaged checkpoint goes back, and goes on from there."""
    store = CheckpointStore(storage, Retention(2))
    for step, epoch in ((10, 1), (20, 1), (15, 2)):
        store.save(checkpoint_of(step, epoch), 0.0)
    check_equal(store.newest(), checkpoint_of(15, 2))
    assert store.steps() == [20, 15]


def test_one_complete_checkpoint_is_there_at_every_instant(tmp_path):
    """After every change of the storage, whoever restores finds the last committed checkpoint, whole."""
    committed = []

    def check(operation, name):
        if name.endswith("manifest.json") and operation == "create":
            committed.append(int(name.split("/")[1][:8]))
        found = CheckpointStore(LocalStorage(tmp_path), Retention(1)).newest()
        if committed:
            check_equal(found, checkpoint_of(committed[-1]))
        else:
            assert found is None

    storage = RecordedStorage(tmp_path, check)
    store = CheckpointStore(storage, Retention(1))
    for step in range(1, 4):
        store.save(checkpoint_of(step), 0.0)
    assert committed == [1, 2, 3]
    assert len(storage.changes) > 12


@pytest.mark.parametrize("stop_at", range(7))
def test_a_save_that_stops_anywhere_is_repeated_by_whoever_comes_next(tmp_path, stop_at):
    """Seven changes make a save: the place is cleared, four objects, and the older checkpoint goes in two."""
    CheckpointStore(LocalStorage(tmp_path), Retention(1)).save(checkpoint_of(1), 0.0)
    storage = RecordedStorage(tmp_path, stop_at=stop_at)
    with pytest.raises(StopError):
        CheckpointStore(storage, Retention(1)).save(checkpoint_of(2), 0.0)
    store = CheckpointStore(LocalStorage(tmp_path), Retention(1))
    check_equal(store.newest(), checkpoint_of(1 if stop_at <= 4 else 2))
    store.save(checkpoint_of(2, epoch=2), 0.0)
    check_equal(store.newest(), checkpoint_of(2, epoch=2))
    assert LocalStorage(tmp_path).folders("checkpoints") == ["checkpoints/00000002-0002"]


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def lengthen(file):
    file.write_bytes(file.read_bytes() + b"\0")


@pytest.mark.parametrize("damage", [cut, flip, lengthen, Path.unlink])
@pytest.mark.parametrize("name", OBJECTS[:3])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, caplog, name, damage):
    store = CheckpointStore(LocalStorage(tmp_path), Retention(3))
    for step in (1, 2):
        store.save(checkpoint_of(step), 0.0)
    damage(tmp_path / "checkpoints" / "00000002-0001" / name)
    with caplog.at_level(logging.WARNING):
        check_equal(store.newest(), checkpoint_of(1))
    assert "00000002-0001" in caplog.text
    assert name in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": 99}', b'{"format": 1}'])
def test_a_damaged_manifest_is_skipped_with_a_warning(tmp_path, caplog, content):
    store = CheckpointStore(LocalStorage(tmp_path), Retention(3))
    for step in (1, 2):
        store.save(checkpoint_of(step), 0.0)
    (tmp_path / "checkpoints" / "00000002-0001" / "manifest.json").write_bytes(content)
    check_equal(store.newest(), checkpoint_of(1))
    assert "00000002-0001" in caplog.text


@pytest.mark.parametrize("damage", [cut, lengthen, Path.unlink])
def test_a_damaged_checkpoint_takes_no_place_among_those_kept(tmp_path, damage):
    store = CheckpointStore(LocalStorage(tmp_path), Retention(2))
    store.save(checkpoint_of(1), 0.0)
    store.save(checkpoint_of(2), 0.0)
    damage(tmp_path / "checkpoints" / "00000002-0001" / OBJECTS[0])
    store.save(checkpoint_of(3), 0.0)
    assert store.steps() == [1, 2, 3]
    flip(tmp_path / "checkpoints" / "00000003-0001" / OBJECTS[0])
    check_equal(store.newest(), checkpoint_of(1))


def test_without_a_whole_checkpoint_nothing_is_restored(tmp_path):
    store = CheckpointStore(LocalStorage(tmp_path), Retention(3))
    for step in (1, 2):
        store.save(checkpoint_of(step), 0.0)
        flip(tmp_path / "checkpoints" / f"{step:08d}-0001" / "tensors.safetensors")
    with pytest.raises(CorruptCheckpointError, match="none of the 2 checkpoints"):
        store.newest()


def test_fewer_may_be_kept_from_now_on(storage):
    store = CheckpointStore(storage, Retention(3))
    store.retain()
    for step in (1, 2, 3):
        store.save(checkpoint_of(step), 0.0)
    store.retain()
    assert store.steps() == [1, 2, 3]
    store.sparing = True
    store.retain()
    assert store.steps() == [3]
    check_equal(store.newest(), checkpoint_of(3))


def test_a_manifest_reads_what_it_wrote(tmp_path):
    store = CheckpointStore(LocalStorage(tmp_path), Retention(1))
    store.save(checkpoint_of(1), created_at=5.0)
    data = (tmp_path / "checkpoints" / "00000001-0001" / "manifest.json").read_bytes()
    manifest = CheckpointManifest.from_json(data)
    assert manifest.to_json() == data
    assert (manifest.step, manifest.epoch, manifest.created_at) == (1, 1, 5.0)
    assert sorted(manifest.objects) == sorted(OBJECTS[:3])


def test_a_full_disk_is_told_and_leaves_the_older_checkpoint(small_volume):
    folder = small_volume(1400)
    store = CheckpointStore(LocalStorage(folder), Retention(1))
    store.save(checkpoint_of(1, size=30_000), 0.0)
    filling = folder / "filling"
    filling.write_bytes(b"\0" * 600_000)
    with pytest.raises(OutOfSpaceError, match="no space left"):
        store.save(checkpoint_of(2, size=30_000), 0.0)
    check_equal(store.newest(), checkpoint_of(1, size=30_000))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["00000001-0001"]
    filling.unlink()
    store.save(checkpoint_of(2, size=30_000), 0.0)
    check_equal(store.newest(), checkpoint_of(2, size=30_000))


def test_a_table_that_does_not_fit_is_told(small_volume):
    table = pa.table({"value": np.random.default_rng(0).integers(0, 2**62, 50_000)})
    tensors = {"weight": torch.zeros(1)}
    checkpoint = Checkpoint(step=1, epoch=1, tensors=tensors, tables={"pool": table}, state={})
    with pytest.raises(OutOfSpaceError, match=r"pool\.parquet"):
        CheckpointStore(LocalStorage(small_volume(256)), Retention(1)).save(checkpoint, 0.0)


BIG = 400_000
SAVER = """
import os
import sys
from pathlib import Path

sys.path[:0] = sys.argv[2:]
from test_checkpoint_store import BIG, checkpoint_of

from gyre_core.checkpoint.retention import Retention
from gyre_core.checkpoint.store import CheckpointStore
from gyre_core.storage import LocalStorage

for line in sys.stdin:
    checkpoint = checkpoint_of(int(line), size=BIG)
    child = os.fork()
    if child == 0:
        CheckpointStore(LocalStorage(Path(sys.argv[1])), Retention(2)).save(checkpoint, 0.0)
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""
"""For each step on stdin, saves a checkpoint of some megabytes in a process of its own: prints its id, and its end."""


@pytest.fixture
def saver(tmp_path):
    here = Path(__file__).parent
    command = [sys.executable, "-c", SAVER, str(tmp_path), str(here), str(here.parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:

        def save(step, seconds):
            """Save, but kill the saving process after so many seconds; returns its status and the seconds it had."""
            process.stdin.write(f"{step}\n")
            child = int(process.stdout.readline())
            started = time.monotonic()
            if seconds is not None:
                time.sleep(seconds)
                with contextlib.suppress(ProcessLookupError):  # It was quicker this time.
                    os.kill(child, signal.SIGKILL)
            return int(process.stdout.readline()), time.monotonic() - started

        yield save
        process.stdin.close()


def test_a_killed_save_leaves_the_newest_complete_checkpoint(tmp_path, saver):
    """Killed at 20, 50 and 90 percent of the time that an undisturbed save took."""
    status, duration = saver(1, None)
    assert status == 0
    store = CheckpointStore(LocalStorage(tmp_path), Retention(2))
    newest = 1
    for step, share in ((2, 0.2), (3, 0.5), (4, 0.9)):
        status, _ = saver(step, share * duration)
        found = store.newest()
        assert found.step in ((newest, step) if status else (step,))
        check_equal(found, checkpoint_of(found.step, size=BIG))
        newest = found.step
    # Whoever takes over cleans up behind the next checkpoints.
    for step in (5, 6):
        store.save(checkpoint_of(step, epoch=2), 0.0)
    assert LocalStorage(tmp_path).folders("checkpoints") == ["checkpoints/00000005-0002", "checkpoints/00000006-0002"]
    assert not list(tmp_path.rglob("*.tmp"))
