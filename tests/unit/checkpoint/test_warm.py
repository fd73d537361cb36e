"""The warm copy keeps up with what it can, whatever the primary drops meanwhile."""

import json

import pyarrow as pa
import pytest
import torch

from gyre_core.checkpoint.retention import Retention
from gyre_core.checkpoint.store import Checkpoint, CheckpointStore, committed_checkpoints
from gyre_core.checkpoint.warm import copy_missing
from gyre_core.cluster.epochs import SupersededError
from gyre_core.storage import LocalStorage


class SlowStorage(LocalStorage):
    """Does something else before an object of a name is read for the first time."""

    def __init__(self, root, name, meanwhile):
        super().__init__(root)
        self._name, self._meanwhile = name, meanwhile

    def local_file(self, name):
        if self._name in name and self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()
        return super().local_file(name)


def checkpoint_of(step, base=None):
    tensors = {"weight": torch.full((4,), float(step))}
    table = pa.table({"row": [step]})
    return Checkpoint(
        step=step, epoch=1, base=base and f"{base:08d}-0001", tensors=tensors, tables={"pool": table}, state={}
    )


@pytest.fixture
def places(tmp_path):
    return [LocalStorage(tmp_path / name) for name in ("primary", "warm", "data")]


def steps(store):
    return [int(name[:8]) for name in committed_checkpoints(store)]


def test_the_newest_is_copied_first_behind_what_it_builds_on(places):
    primary, warm, data = places
    store = CheckpointStore(primary, Retention(9))
    for step, base in ((1, None), (2, 1), (3, None), (4, 3)):
        store.save(checkpoint_of(step, base), 0.0)
    copied = []

    class Watched(LocalStorage):
        def create(self, name, content):
            super().create(name, content)
            if name.endswith("manifest.json"):
                copied.append(json.loads(content)["step"])

    assert copy_missing(primary, Watched(warm.root), data) == (1, 4)
    assert copied == [3, 4, 1, 2]


def test_a_checkpoint_that_is_dropped_while_it_is_copied_holds_nothing_up(places):
    primary, warm, data = places
    store = CheckpointStore(primary, Retention(2))
    for step in (1, 2):
        store.save(checkpoint_of(step), 0.0)
    assert copy_missing(primary, warm, data) == (1, 2)
    store.save(checkpoint_of(3), 0.0)

    def meanwhile():
        for step in (4, 5):
            store.save(checkpoint_of(step), 0.0)

    slow = SlowStorage(primary.root, "00000003-0001", meanwhile)
    # Of what was there when it looked only 2 and 3 were kept, and both went.
    assert copy_missing(slow, warm, data) == (1, 2)
    assert steps(warm) == [2], "what was torn is gone, and so is what the primary had dropped before"
    assert warm.folders("checkpoints") == ["checkpoints/00000002-0001"]
    assert copy_missing(primary, warm, data) == (1, 5)
    assert steps(warm) == [4, 5]


def test_an_error_of_the_stores_is_told(places):
    primary, warm, data = places
    CheckpointStore(primary, Retention(1)).save(checkpoint_of(1), 0.0)
    (primary.root / "checkpoints" / "00000001-0001" / "state.json").unlink()
    assert copy_missing(primary, warm, data) == (0, 0), "it is not whole"
    CheckpointStore(primary, Retention(1)).save(checkpoint_of(2), 0.0)
    lost = primary.root / "checkpoints" / "00000002-0001" / "state.json"
    slow = SlowStorage(primary.root, "00000002-0001/pool", lost.unlink)
    with pytest.raises(FileNotFoundError):
        copy_missing(slow, warm, data)


def test_a_superseded_owner_takes_nothing_from_the_warm_store(places):
    """Not what its primary has dropped, and not the segments that the next owner copies before their manifest."""
    primary, warm, data = places
    store = CheckpointStore(primary, Retention(1))
    store.save(checkpoint_of(1), 0.0)
    copy_missing(primary, warm, data)
    warm.create("pool/00000002-0000.parquet", b"of the next owner")
    store.save(checkpoint_of(2), 0.0)

    def superseded():
        raise SupersededError

    with pytest.raises(SupersededError):
        copy_missing(primary, warm, data, superseded)
    assert (steps(warm), warm.list("pool")) == ([1, 2], ["pool/00000002-0000.parquet"])
    copy_missing(primary, warm, data)
    assert (steps(warm), warm.list("pool")) == ([2], [])
