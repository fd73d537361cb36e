"""The consume record is read as it was written, once per step and epoch."""

import numpy as np
import pytest
from experience_samples import plain

from gyre_core.experience.consumption import (
    ConsumeRecord,
    DrawnGroup,
    DrawnMinibatch,
    read_consumption,
    write_consumption,
)
from gyre_core.experience.tables import CorruptObjectError
from gyre_core.storage import open_storage

NAME = "learner/0002/consume-00000009.parquet"


@pytest.fixture
def storage(tmp_path):
    return open_storage(tmp_path)


def random_record(seed, step=9):
    rng = np.random.default_rng(seed)
    minibatches = tuple(
        DrawnMinibatch(
            tuple(
                DrawnGroup(
                    f"g{part}-{index}", float(rng.random()), rng.normal(size=rng.integers(2, 9)).astype("float32")
                )
                for index in range(rng.integers(1, 6))
            ),
            float(rng.random()),
            float(rng.random()),
        )
        for part in range(rng.integers(0, 5))
    )
    return ConsumeRecord(step, minibatches)


@pytest.mark.parametrize("seed", range(15))
def test_round_trip(storage, seed):
    record = random_record(seed)
    write_consumption(storage, 2, record)
    write_consumption(storage, 2, record)
    assert plain(read_consumption(storage, 2, 9)) == plain(record)


def test_equal_neighbours_stay_two_minibatches(storage):
    group = DrawnGroup("a", 1.0, np.array([1, -1], np.float32))
    record = ConsumeRecord(9, (DrawnMinibatch((group,), 0.1, 0.0), DrawnMinibatch((group,), 0.1, 0.0)))
    write_consumption(storage, 2, record)
    assert len(read_consumption(storage, 2, 9).minibatches) == 2


def test_a_step_is_drawn_once_per_epoch(storage):
    write_consumption(storage, 2, random_record(1))
    with pytest.raises(FileExistsError):
        write_consumption(storage, 2, random_record(2))
    assert read_consumption(storage, 3, 9) is None
    assert read_consumption(storage, 2, 8) is None


def test_a_damaged_or_foreign_record_is_refused(storage):
    write_consumption(storage, 2, random_record(1, step=8))
    foreign = storage.read("learner/0002/consume-00000008.parquet")
    storage.create(NAME, foreign)
    with pytest.raises(CorruptObjectError, match="the record of step 8"):
        read_consumption(storage, 2, 9)
    storage.replace(NAME, foreign[:-20])
    with pytest.raises(CorruptObjectError, match=NAME):
        read_consumption(storage, 2, 9)
