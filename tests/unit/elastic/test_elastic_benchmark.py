"""The simulated world of `benchmarks/elastic_vs_fixed.py`, and what the scaling law is to reach in it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "elastic_vs_fixed.py"


def measure(*options):
    command = [sys.executable, str(BENCHMARK), *map(str, options)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])["traces"]


@pytest.fixture
def hour(tmp_path):
    """An hour in which the learner takes 2 samples a second and a worker makes half of one."""
    columns = {
        "t_s": 60 * np.arange(60),
        "demand_samples_s": 2.0,
        "worker_samples_s": 0.5,
        "mean_length_tokens": 400,
        "kill": 0,
    }
    pd.DataFrame(columns).to_csv(tmp_path / "hour.csv", index=False)
    return tmp_path


def test_fixed_numbers_do_what_arithmetic_says(hour):
    found = measure("--traces", hour, "--seeds", 2, "--policy", "fixed:4", "fixed:3", "fixed:8", "oracle")["hour"]
    for policy in ("fixed:4", "oracle"):
        assert found[policy]["throughput"] == found[policy]["over_oracle"] == 1.0
        assert found[policy]["average_workers"] == found[policy]["peak_workers"] == 4.0
    # Three make 1.5 a second; 512 samples in the pool cover the half that is missing for 1,024 s.
    assert found["fixed:3"]["throughput"] == pytest.approx((512 + 1.5 * 3600) / 7200, abs=1e-4)
    assert found["fixed:3"]["stall"] == pytest.approx(0.25 * (3600 - 1024) / 3600, abs=2e-4)
    assert found["fixed:8"]["over_oracle"] == 2.0
    assert found["fixed:8"]["actions_per_day"] == 0.0


def test_a_killed_worker_is_missed_for_as_long_as_its_replacement_takes(hour):
    frame = pd.read_csv(hour / "hour.csv")
    frame.loc[30, "kill"] = 4
    frame.to_csv(hour / "hour.csv", index=False)
    found = measure("--traces", hour, "--seeds", 5, "--policy", "fixed:4")["hour"]["fixed:4"]
    assert found["average_workers"] == 4.0  # lost and starting workers are held
    assert found["throughput"] == 1.0  # four workers' 2 samples a second are missed for 140 s at most, 512 are there


def test_the_law_reaches_its_bars_on_every_trace():
    found = {name: policies["gyre"] for name, policies in measure("--seeds", 2, "--policy", "gyre").items()}
    assert set(found) == {"bursts", "constant", "crash_storm", "drift", "sawtooth", "taper"}
    for name, figures in found.items():
        assert figures["throughput"] >= 0.99, name
        assert figures["stall"] <= 0.005, name
        assert figures["over_oracle"] <= 1.15, name
    assert np.mean([figures["reversals_per_day"] for figures in found.values()]) <= 12
    assert found["taper"]["average_workers"] <= 8


def test_mistakes_are_told_in_a_sentence(tmp_path):
    for options in (["--policy", "fastest"], ["--traces", tmp_path]):
        result = subprocess.run([sys.executable, str(BENCHMARK), *map(str, options)], capture_output=True, text=True)
        assert result.returncode != 0
        assert "Traceback" not in result.stderr
        assert ";" in result.stderr
