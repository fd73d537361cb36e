import json
import math
import struct
from io import BytesIO
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from gyre_core.monitor.health import Alarm
from gyre_core.monitor.metrics import MetricsWriter, StepMetrics, read_metrics
from gyre_core.monitor.report import (
    build_summary,
    curves_png,
    metrics_table,
    smoothed,
    time_shares,
    write_summary,
)


def rows(*steps: dict[str, float]) -> list[StepMetrics]:
    return [StepMetrics(step, float(step), metrics) for step, metrics in enumerate(steps)]


RUN = rows(
    {"eval/heldout/reward": 0.25, "eval/heldout/reward_se": 0.03, "eval/heldout/greedy_reward": 0.5},
    {
        "reward": 0.3,
        "perf/throughput": 100.0,
        "perf/samples_per_second": 8.0,
        "time/step": 10.0,
        "time/generation": 5.0,
        "time/update": 3.0,
        "time/sample": 0.5,
        "time/orchestration": 1.5,
        "perf/peak_memory_bytes": 2e9,
    },
    {
        "reward": 0.4,
        "perf/throughput": 50.0,
        "perf/samples_per_second": 4.0,
        "time/step": 30.0,
        "time/generation": 15.0,
        "time/reward": 10.0,
        "time/update": 5.0,
        "perf/peak_memory_bytes": 3e9,
        "eval/heldout/reward": 0.75,
        "eval/heldout/reward_se": 0.02,
    },
)


def test_the_summary_of_a_run_worked_out_by_hand():
    alarm = Alarm("kl_spike", 2, "kl is high", "lower learning.lr")
    assert build_summary("completed", RUN, 2, [alarm]) == {
        "status": "completed",
        "steps": 2,
        "evaluation": {
            "before": {"step": 0, "reward": 0.25, "reward_se": 0.03, "greedy_reward": 0.5},
            "after": {"step": 2, "reward": 0.75, "reward_se": 0.02},
        },
        "training_seconds": 40.0,
        "samples_per_second": pytest.approx(200 / 40),
        "tokens_per_second": pytest.approx(2500 / 40),
        "time_share": {
            "generation": pytest.approx(20 / 40),
            "reward": pytest.approx(10 / 40),
            "update": pytest.approx(8 / 40),
            "orchestration": pytest.approx(1.5 / 40),
        },
        "peak_memory_bytes": 3_000_000_000,
        "alarms": [{"name": "kl_spike", "step": 2, "sentence": "kl is high", "remedy": "lower learning.lr"}],
    }


def test_a_run_that_never_began_has_nulls_and_no_numbers():
    summary = build_summary("failed", [], 0, [])
    assert summary["evaluation"] == {"before": None, "after": None}
    assert [summary[name] for name in ("samples_per_second", "tokens_per_second", "peak_memory_bytes")] == [None] * 3
    assert set(summary["time_share"].values()) == {None}


def test_a_single_evaluation_is_before_and_never_after():
    assert build_summary("stopped", RUN[:2], 1, [])["evaluation"]["after"] is None


@pytest.mark.parametrize("seed", range(10))
def test_time_shares_never_exceed_one_even_when_steps_overlap(seed: int):
    rng = np.random.default_rng(seed)
    phases = ("step", "generation", "reward", "update", "orchestration", "sample")
    steps = [{f"time/{phase}": float(rng.exponential()) for phase in phases} for _ in range(20)]
    shares = build_summary("completed", rows(*steps), 20, [])["time_share"]
    assert 0 < math.fsum(shares.values()) <= 1 + 1e-12


def test_a_value_that_is_not_finite_stays_out_of_the_summary(tmp_path: Path):
    broken = rows({"eval/heldout/reward": math.nan, "time/step": 2.0, "perf/throughput": math.nan}, {"time/step": 2.0})
    summary = build_summary("failed", broken, 2, [])
    assert summary["evaluation"]["before"] == {"step": 0, "reward": None}
    assert summary["tokens_per_second"] is None
    write_summary(tmp_path, summary)
    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail) == summary


def test_the_summary_is_a_function_of_the_metrics_file(tmp_path: Path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for row in RUN:
        writer.write(row.step, row.metrics, row.time)
    assert build_summary("completed", read_metrics(tmp_path), 2, []) == build_summary("completed", RUN, 2, [])
    for _ in range(2):
        write_summary(tmp_path, build_summary("completed", RUN, 2, []))
    assert json.loads((tmp_path / "summary.json").read_text())["evaluation"]["after"]["reward"] == 0.75
    writer.close()


def test_the_table_shows_the_last_steps_first_and_no_empty_column():
    steps = rows(
        *({"reward": 0.123456 * step, "time/step": 2.0, "loss": 1.0} for step in range(5)), {"reward": math.nan}
    )
    assert metrics_table(steps, last=3) == [
        {"step": 5, "reward": None, "seconds": None},
        {"step": 4, "reward": 0.4938, "seconds": 2.0},
        {"step": 3, "reward": 0.3704, "seconds": 2.0},
    ]
    assert metrics_table([]) == []


def test_smoothing_keeps_constants_gaps_and_short_series():
    values = np.full(100, 3.0)
    values[10] = math.nan
    np.testing.assert_allclose(smoothed(values), values)
    np.testing.assert_array_equal(smoothed(np.array([1.0, 5.0])), [1.0, 5.0])
    spike = np.zeros(100)
    spike[50] = 5.0
    np.testing.assert_allclose(smoothed(spike)[47:54], [0, 1, 1, 1, 1, 1, 0])


def test_shares_of_time_add_up_to_one_each_step():
    shares = time_shares([row for row in RUN if "time/step" in row.metrics])
    assert list(shares) == ["generation", "reward", "sample", "update", "orchestration"]
    np.testing.assert_allclose(sum(shares.values()), [1.0, 1.0])
    np.testing.assert_allclose(shares["generation"], [0.5, 0.5])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_picture_is_a_png_of_any_run(count: int):
    data = curves_png(RUN[:count], "run")
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1430, 726)


def test_a_metric_that_was_measured_changes_the_picture():
    def panels(steps: list[StepMetrics]) -> np.ndarray:
        return matplotlib.image.imread(BytesIO(curves_png(steps, "run")), format="png")

    with_kl = rows(*({"reward": 0.1 * step, "kl": 0.01 * step} for step in range(4)))
    without = rows(*({"reward": 0.1 * step, "kl": math.nan} for step in range(4)))
    difference = np.abs(panels(with_kl) - panels(without)).max(axis=(0, 2))
    assert difference[-480:].any(), "the KL panel is the third of three"
