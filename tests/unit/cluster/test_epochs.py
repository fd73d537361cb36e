"""One owner per epoch, and an owner that was superseded learns it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from gyre_core.cluster.epochs import SupersededError, claim_epoch, current_epoch, require_current
from gyre_core.storage import open_storage


def test_epochs_count_from_one(tmp_path):
    storage = open_storage(tmp_path)
    assert current_epoch(storage) == 0
    assert [claim_epoch(storage, "host a"), claim_epoch(storage, "host b")] == [1, 2]
    assert current_epoch(storage) == 2


def test_more_than_four_digits_still_count(tmp_path):
    storage = open_storage(tmp_path)
    for epoch in (9999, 10000):
        storage.create(f"learner/epochs/{epoch:04d}", b"{}")
    assert claim_epoch(storage, "a") == 10001


def test_a_superseded_owner_is_told_by_whom(tmp_path):
    storage = open_storage(tmp_path)
    epoch = claim_epoch(storage, "host a, process 7")
    require_current(storage, epoch)
    claim_epoch(storage, "host b, process 9")
    with pytest.raises(
        SupersededError, match="epoch 1 of this run was superseded by epoch 2, owned by host b, process 9"
    ):
        require_current(storage, epoch)


def test_owners_of_one_name_do_not_share_an_epoch(tmp_path):
    storage = open_storage(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        epochs = list(threads.map(lambda _: claim_epoch(storage, "same name"), range(16)))
    assert sorted(epochs) == list(range(1, 17))


def test_a_new_run_has_no_owner_before(tmp_path):
    """Whoever is the second to begin it was frozen, and must not take it over again."""
    storage = open_storage(tmp_path)
    assert claim_epoch(storage, "host a", after=4, new=True) == 5
    for after in (0, 4):
        with pytest.raises(
            SupersededError, match="this run, not yet begun, was superseded by epoch 5, owned by host a"
        ):
            claim_epoch(storage, "host b", after=after, new=True)
    assert current_epoch(storage) == 5


def test_of_many_that_begin_a_new_run_one_owns_it(tmp_path):
    storage = open_storage(tmp_path)

    def begin(number):
        try:
            return claim_epoch(storage, f"host {number}", new=True)
        except SupersededError:
            return None

    with ThreadPoolExecutor(8) as threads:
        epochs = list(threads.map(begin, range(16)))
    assert [epoch for epoch in epochs if epoch is not None] == [1]
