"""Ages, decay, expiry and eviction."""

import numpy as np
import pytest

from gyre_core.experience import window


def test_ages_and_a_clock_that_was_set_back():
    np.testing.assert_array_equal(window.ages(np.array([0.0, 5.0, 12.0]), now=10.0), [10.0, 5.0, 0.0])


def test_weights_fall_to_a_twentieth_at_the_end_of_the_window():
    weights = window.staleness_weights(np.array([0.0, 600.0, 1800.0]), time_window=1800.0)
    np.testing.assert_allclose(weights, [1.0, np.exp(-1.0), 0.0497871], rtol=1e-5)


def test_expiry_is_strictly_beyond_the_window():
    assert window.expired(np.array([9.9, 10.0, 10.1]), 10.0).tolist() == [False, False, True]


def test_the_oldest_leave_and_no_more_than_needed():
    admitted_at, samples = np.array([3.0, 1.0, 2.0, 4.0]), np.array([4, 4, 4, 4], np.int32)
    assert window.evicted(admitted_at, samples, buffer_size=16).tolist() == [False] * 4
    assert window.evicted(admitted_at, samples, buffer_size=15).tolist() == [False, True, False, False]
    assert window.evicted(admitted_at, samples, buffer_size=8).tolist() == [False, True, True, False]


def test_among_equals_the_first_is_the_oldest():
    assert window.evicted(np.zeros(3), np.array([2, 2, 2], np.int32), 4).tolist() == [True, False, False]


def test_stale_share_is_by_samples():
    age, samples = np.array([1.0, 6.0, 9.0]), np.array([6, 1, 1], np.int32)
    assert window.stale_share(age, samples, time_window=10.0) == pytest.approx(0.25)
    assert window.stale_share(np.empty(0), np.empty(0, np.int32), 10.0) == 0.0
