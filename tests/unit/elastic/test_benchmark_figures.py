"""What benchmarks say of their trials, against values found by hand."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def live_run(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("elastic.live_run")


@pytest.mark.parametrize(("trials", "rank"), [(1, 1), (2, 2), (19, 19), (20, 19), (21, 20), (40, 38), (100, 95)])
def test_the_95th_percentile_is_the_least_value_that_95_of_100_do_not_exceed(live_run, trials, rank):
    """Of 20 trials 19 are 95%, so that the worst one is beyond."""
    assert live_run.percentile_95([float(value) for value in range(trials, 0, -1)]) == rank


def test_trials_are_told_by_median_percentile_and_worst(live_run):
    trials = [9.0, *[1.0] * 9, 2.004, *[3.0] * 9]
    assert live_run.summary(trials) == {"median": 2.5, "p95": 3.0, "most": 9.0}
