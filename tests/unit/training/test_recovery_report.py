"""The phases of a recovery: each counted once, told once, and added up."""

import contextlib
import time

import pytest

from gyre_core.monitor.metrics import StepMetrics
from gyre_core.training.recovery_report import PHASES, Recovery, recovery_lines


def test_a_new_run_has_nothing_to_tell():
    recovery = Recovery()
    with recovery.timed("publish"):
        pass
    recovery.opened()
    recovery.reached("first_sample")
    recovery.reached("first_update")
    assert recovery.metrics() == {}


def test_the_phases_add_up_and_one_within_another_counts_once():
    began = time.time()
    recovery = Recovery()
    recovery.begin(died_at=began - 5.0, started_at=began - 2.0)
    with recovery.timed("restore"):
        time.sleep(0.02)
        with recovery.timed("replay"):
            time.sleep(0.05)
    recovery.opened()
    recovery.told()
    assert recovery.metrics() == {}
    for phase in ("first_sample", "first_update", "first_sample"):
        time.sleep(0.01)
        recovery.reached(phase)
    metrics = recovery.metrics()
    assert metrics["recovery/detect"] == pytest.approx(3.0)
    assert 2.0 <= metrics["recovery/start"] < 2.5
    assert 0.02 <= metrics["recovery/restore"] < 0.05 <= metrics["recovery/replay"]
    assert metrics["recovery/total"] == pytest.approx(sum(metrics[f"recovery/{phase}"] for phase in PHASES))
    assert recovery.metrics() == metrics
    recovery.told()
    assert recovery.metrics() == {}


def test_what_failed_on_the_way_took_its_time_too():
    recovery = Recovery()
    recovery.begin(died_at=time.time(), started_at=time.time())
    with contextlib.suppress(RuntimeError), recovery.timed("restore"), recovery.timed("replay"):
        time.sleep(0.05)
        raise RuntimeError
    assert recovery.seconds["replay"] >= 0.05 > recovery.seconds["restore"]


def test_recoveries_are_told_in_a_line_each():
    phases = {f"recovery/{phase}": number for number, phase in enumerate(PHASES, 1)}
    told = {**phases, "recovery/total": 28.0, "recovery/replayed_steps": 4.0, "reward": 0.5}
    assert recovery_lines([StepMetrics(1, 0.0, {"reward": 0.5}), StepMetrics(8, 0.0, told)]) == [
        "before step 8, 28.0 s: detect 1.0, start 2.0, restore 3.0, replay 4.0, publish 5.0, first sample 6.0, "
        "first update 7.0; 4 steps repeated"
    ]
