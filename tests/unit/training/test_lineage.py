"""Which checkpoints a run may go on from, when owners took over from one another and some of them woke up late."""

import pytest

from gyre_core.storage import open_storage
from gyre_core.training.lineage import note_beginning, on_lineage


def name(step, epoch):
    return f"{step:08d}-{epoch:04d}"


@pytest.fixture
def storage(tmp_path):
    return open_storage(tmp_path)


def test_without_notes_all_are_on_the_lineage(storage):
    names = [name(2, 1), name(4, 1), name(3, 2)]
    assert on_lineage(storage, names) == names


def test_what_comes_late_from_an_owner_that_was_superseded_is_given_up(storage):
    """The second owner begins from step 4 and dies before it has saved; the first one thaws and saves step 6."""
    note_beginning(storage, 1, None)
    note_beginning(storage, 2, name(4, 1))
    assert on_lineage(storage, [name(2, 1), name(4, 1), name(6, 1)]) == [name(2, 1), name(4, 1)]


def test_who_goes_back_gives_up_what_was_newer(storage):
    note_beginning(storage, 1, None)
    note_beginning(storage, 2, name(2, 1))
    names = [name(2, 1), name(4, 1), name(6, 1), name(3, 2), name(5, 2)]
    assert on_lineage(storage, names) == [name(2, 1), name(3, 2), name(5, 2)]


def test_who_starts_again_gives_up_everything_before(storage):
    note_beginning(storage, 2, None)
    assert on_lineage(storage, [name(2, 1), name(1, 2)]) == [name(1, 2)]


def test_an_owner_that_nobody_went_on_from_gives_nothing_up(storage):
    """The second one was frozen while it opened the run, before the third one did, and notes its beginning late."""
    note_beginning(storage, 3, name(4, 1))
    note_beginning(storage, 2, name(2, 1))
    names = [name(2, 1), name(4, 1), name(5, 3)]
    assert on_lineage(storage, [*names, name(6, 1), name(3, 2)]) == names


def test_a_fork_goes_on_from_what_it_copied(storage):
    note_beginning(storage, 8, name(4, 7))
    names = [name(2, 7), name(4, 7), name(5, 8)]
    assert on_lineage(storage, names) == names
