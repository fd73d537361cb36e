"""The law of the storage guard, by numbers worked out by hand and by what must hold of any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_core.training.space_law import Level, Need, bytes_to_leave, judge, samples_to_keep

NEED = Need(once=100, step=10)
MIN_FREE = 1000
SIZES = st.integers(0, 10_000)
NEEDS = st.builds(Need, SIZES, SIZES)
LEVELS = st.sampled_from(Level)


@pytest.mark.parametrize(
    ("free", "level"),
    [
        (1200, Level.GO_ON),
        (1199, Level.EXPIRE),
        (1130, Level.EXPIRE),
        (1129, Level.SLOW),
        (1110, Level.SLOW),
        (1109, Level.PAUSE),
        (0, Level.PAUSE),
        (None, Level.GO_ON),
    ],
)
def test_a_level_is_entered_with_room_for_ten_three_and_one_steps(free, level):
    assert judge(free, NEED, MIN_FREE, Level.GO_ON) == level


@pytest.mark.parametrize(("level", "left"), [(Level.EXPIRE, 1300), (Level.SLOW, 1160), (Level.PAUSE, 1120)])
def test_a_level_is_left_with_twice_the_room(level, left):
    assert bytes_to_leave(level, NEED, MIN_FREE) == left
    assert judge(left - 1, NEED, MIN_FREE, level) == level
    assert judge(left, NEED, MIN_FREE, level) < level


def test_a_guard_that_is_off_and_a_storage_without_a_limit_let_go_on():
    assert judge(0, NEED, 0, Level.PAUSE) == Level.GO_ON
    assert judge(None, NEED, MIN_FREE, Level.PAUSE) == Level.GO_ON


@given(free=SIZES, more=SIZES, need=NEEDS, min_free=st.integers(1, 10_000), before=LEVELS)
def test_more_space_is_never_worse_and_the_next_step_always_fits_beside_the_reserve(free, more, need, min_free, before):
    level = judge(free, need, min_free, before)
    assert judge(free + more, need, min_free, before) <= level
    assert judge(free, need, min_free, Level.GO_ON) <= level, "a level that was reached is not left sooner"
    if level < Level.PAUSE:
        assert free >= min_free + need.once + need.step


@pytest.mark.parametrize(
    ("missing", "least", "kept"),
    [(0, 0, 100), (-5, 0, 100), (250, 0, 75), (250, 80, 80), (1000, 0, 0), (5000, 16, 16)],
)
def test_of_100_samples_in_1000_bytes_those_go_whose_bytes_are_missing(missing, least, kept):
    assert samples_to_keep(100, 1000, missing, least) == kept


def test_an_empty_pool_gives_nothing_up():
    assert samples_to_keep(0, 0, 1000, 0) == 0
