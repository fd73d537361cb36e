import math

import pytest

from gyre_core.config.sections import LearningConfig
from gyre_core.learner.schedule import learning_rate


def course(total, **settings):
    config = LearningConfig(lr=1.0, **settings)
    return [learning_rate(step, total, config) for step in range(total)]


def test_linear_falls_in_equal_parts_to_the_final_fraction():
    assert course(4, schedule="linear", final_lr_fraction=0.1) == pytest.approx([1.0, 0.7, 0.4, 0.1])


def test_warm_up_rises_in_equal_parts_then_the_schedule_begins_at_the_peak():
    assert course(7, schedule="linear", warmup_steps=4, final_lr_fraction=0.0) == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0]
    )
    assert course(3, schedule="constant", warmup_steps=1) == [1.0, 1.0, 1.0]


def test_cosine_follows_half_a_wave():
    expected = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(5)]
    assert course(5, schedule="cosine", final_lr_fraction=0.2) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 50])
def test_short_runs_stay_within_bounds(schedule, warmup):
    for total in (1, 2, 3, 4, 9):
        rates = course(total, schedule=schedule, warmup_steps=warmup)
        assert all(0.0 < rate <= 1.0 for rate in rates)
