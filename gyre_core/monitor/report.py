"""What a run amounts to: the table of its last steps, `summary.json` and the picture, made from its metrics alone."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from gyre_core.monitor.health import Alarm
from gyre_core.monitor.metrics import StepMetrics
from gyre_core.monitor.timing import PHASES
from gyre_core.storage import put_file, unwatched

Series = NDArray[np.float64]

SUMMARY_FILE = "summary.json"
EVALUATION = "eval/heldout/"
"""Prefix of the metrics of the held-out evaluation."""
TABLE_COLUMNS = {
    "reward": "reward",
    "reward_std": "reward std",
    "kl": "KL",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "frac_reward_zero_std": "dead groups",
    "perf/throughput": "tokens/s",
    "time/step": "seconds",
    "eval/heldout/reward": "held out",
}
"""Metrics of the table, with their headings."""
SHARED_PHASES = ("generation", "reward", "update", "orchestration")
"""Phases of `time_share` in the summary."""

BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f6fb5", "#d9772b", "#3f9a5c", "#8159a8", "#6b7280"
PHASE_COLOURS = ("#2f6fb5", "#d9772b", "#e3b341", "#3f9a5c", "#8159a8", "#d5d9e0")
SMOOTHING_SHARE = 0.05
"""Share of the run that one smoothed point averages over."""


def metrics_table(rows: Sequence[StepMetrics], last: int = 10) -> list[dict[str, float | int | None]]:
    """The last steps as rows of a table, newest first, rounded to 4 digits; None where a step lacks a metric.

    A column that none of these steps has is left out.
    """
    shown = rows[-last:][::-1]
    names = [name for name in TABLE_COLUMNS if any(name in row.metrics for row in shown)]
    return [
        {"step": row.step, **{TABLE_COLUMNS[name]: _rounded(row.metrics.get(name)) for name in names}} for row in shown
    ]


def build_summary(status: str, rows: Sequence[StepMetrics], steps: int, alarms: Sequence[Alarm]) -> dict[str, Any]:
    """The content of `summary.json` for a run with `steps` finished steps.

    `evaluation.before` is the first evaluation and `after` the last later one (null without one). Rates are means
    over the time in steps. `time_share` is each phase's share of that time, or of the sum of all phases where
    overlapping steps make it longer, so that the shares add up to 1 at the most. An empty value is null.
    """
    evaluations = [row for row in rows if f"{EVALUATION}reward" in row.metrics]
    return {
        "status": status,
        "steps": steps,
        "evaluation": {
            "before": _evaluation(evaluations[0]) if evaluations else None,
            "after": _evaluation(evaluations[-1]) if len(evaluations) > 1 else None,
        },
        "training_seconds": _finite(_total(rows, "time/step")),
        "samples_per_second": _mean_rate(rows, "perf/samples_per_second"),
        "tokens_per_second": _mean_rate(rows, "perf/throughput"),
        "time_share": _time_share(rows),
        "peak_memory_bytes": _peak_memory(rows),
        "alarms": [asdict(alarm) for alarm in alarms],
    }


def write_summary(folder: Path, summary: Mapping[str, Any], require_owned: Callable[[], None] = unwatched) -> None:
    """Publish `summary.json` in the run folder: readers see the old or the new one, never a part.

    What `require_owned` raises leaves the old one.
    """
    data = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    put_file(folder / SUMMARY_FILE, data.encode(), require_owned).close()


def _evaluation(row: StepMetrics) -> dict[str, float | int | None]:
    values = {
        name.removeprefix(EVALUATION): value for name, value in row.metrics.items() if name.startswith(EVALUATION)
    }
    return {"step": row.step, **{name: _finite(value) for name, value in values.items()}}


def _total(rows: Sequence[StepMetrics], name: str) -> float:
    return math.fsum(value for row in rows if math.isfinite(value := row.metrics.get(name, 0.0)))


def _mean_rate(rows: Sequence[StepMetrics], name: str) -> float | None:
    """A rate's mean, weighted by the steps' seconds: all that was made over all the time it took."""
    timed = [(row.metrics[name], row.metrics["time/step"]) for row in rows if {name, "time/step"} <= row.metrics.keys()]
    finite = [(rate, seconds) for rate, seconds in timed if math.isfinite(rate * seconds)]
    total = math.fsum(seconds for _, seconds in finite)
    return math.fsum(rate * seconds for rate, seconds in finite) / total if total > 0 else None


def _time_share(rows: Sequence[StepMetrics]) -> dict[str, float | None]:
    phases = math.fsum(_total(rows, f"time/{phase}") for phase in (*PHASES, "orchestration"))
    whole = max(_total(rows, "time/step"), phases)
    return {phase: _total(rows, f"time/{phase}") / whole if whole > 0 else None for phase in SHARED_PHASES}


def _peak_memory(rows: Sequence[StepMetrics]) -> int | None:
    peaks = [row.metrics["perf/peak_memory_bytes"] for row in rows if "perf/peak_memory_bytes" in row.metrics]
    return int(max(peaks)) if peaks else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def curves_png(rows: Sequence[StepMetrics], title: str = "") -> bytes:
    """A PNG of six panels with the course of a run; a panel without data says so. Uses no global plot state."""
    figure = Figure(figsize=(13.0, 6.6), dpi=110, layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08))
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    panels: list[Axes] = list(figure.subplots(2, 3, sharex=True).flat)
    steps = np.array([row.step for row in rows], dtype=np.float64)
    _draw_reward(panels[0], rows, steps)
    _draw_length(panels[1], rows, steps)
    kl_name = "kl" if np.isfinite(_series(rows, "kl")).any() else "policy_kl"
    kl_title = "KL from the reference" if kl_name == "kl" else "KL within the step"
    _draw_line(panels[2], steps, _series(rows, kl_name), f"{kl_title}, nats a token", ORANGE)
    _draw_line(panels[3], steps, _series(rows, "entropy"), "Entropy, nats a token", PURPLE)
    _draw_line(panels[4], steps, _series(rows, "perf/throughput"), "Throughput, completion tokens/s", GREEN)
    panels[4].yaxis.set_major_formatter(EngFormatter(sep=""))
    _draw_time(panels[5], rows, steps)
    for panel in panels:
        _finish(panel)
    for panel in panels[1:]:
        panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
    last = max(1.0, steps.max(initial=0.0))
    panels[0].set_xlim(-0.02 * last, 1.02 * last)
    for panel in panels[3:]:
        panel.set_xlabel("step", fontsize=9, color=GREY)
    output = io.BytesIO()
    figure.savefig(output, format="png")
    return output.getvalue()


def smoothed(values: Series) -> Series:
    """Centred moving mean over 5% of the run, `[steps]` in and out; NaN counts for nothing and stays."""
    width = max(1, round(len(values) * SMOOTHING_SHARE))
    kernel = np.ones(2 * (width // 2) + 1)
    known = np.isfinite(values)
    padding = len(kernel) // 2
    sums = np.convolve(np.pad(np.where(known, values, 0.0), padding), kernel, mode="valid")
    counts = np.convolve(np.pad(known.astype(np.float64), padding), kernel, mode="valid")
    return np.where(known, sums / np.maximum(counts, 1.0), math.nan)


def time_shares(rows: Sequence[StepMetrics]) -> Mapping[str, Series]:
    """Share of each phase in the sum of a step's phases, by name, each `[steps]`; absent phases are left out."""
    seconds = {name: np.nan_to_num(_series(rows, f"time/{name}")) for name in (*PHASES, "orchestration")}
    total = np.maximum(np.sum(list(seconds.values()), axis=0), 1e-9)
    return {name: values / total for name, values in seconds.items() if values.any()}


def _series(rows: Sequence[StepMetrics], name: str) -> Series:
    """The values of a metric, `[steps]`, NaN where a step lacks it."""
    values = np.array([row.metrics.get(name, math.nan) for row in rows], dtype=np.float64)
    values[~np.isfinite(values)] = math.nan
    return values


def _draw_line(panel: Axes, steps: Series, values: Series, title: str, colour: str, label: str | None = None) -> None:
    """One metric: its values faint, their smoothed course strong."""
    panel.set_title(title, fontsize=10, loc="left")
    known = np.isfinite(values)
    if not known.any():
        panel.text(0.5, 0.5, "not measured", ha="center", va="center", color=GREY, transform=panel.transAxes)
        return
    panel.plot(steps, values, color=colour, alpha=0.3, linewidth=1.0)
    marker = "o" if known.sum() == 1 else None
    panel.plot(steps[known], smoothed(values[known]), color=colour, linewidth=1.8, marker=marker, label=label)


def _draw_reward(panel: Axes, rows: Sequence[StepMetrics], steps: Series) -> None:
    _draw_line(panel, steps, _series(rows, "reward"), "Reward", BLUE, label="training")
    for name, colour, label in (("reward", ORANGE, "held out, sampled"), ("greedy_reward", GREEN, "held out, greedy")):
        values, errors = _series(rows, f"{EVALUATION}{name}"), _series(rows, f"{EVALUATION}{name}_se")
        known = np.isfinite(values)
        if known.any():
            bars = np.nan_to_num(errors[known])
            panel.errorbar(
                steps[known], values[known], bars, color=colour, fmt="o-", ms=4, lw=1, capsize=2, label=label
            )
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8, frameon=False, loc="best")


def _draw_length(panel: Axes, rows: Sequence[StepMetrics], steps: Series) -> None:
    shortest, longest = _series(rows, "completions/min_length"), _series(rows, "completions/max_length")
    _draw_line(panel, steps, _series(rows, "completions/mean_length"), "Completion length, tokens", BLUE, label="mean")
    if np.isfinite(shortest + longest).any():
        panel.fill_between(steps, shortest, longest, color=BLUE, alpha=0.12, linewidth=0, label="min to max")
        panel.legend(fontsize=8, frameon=False, loc="best")


def _draw_time(panel: Axes, rows: Sequence[StepMetrics], steps: Series) -> None:
    timed = np.array(["time/step" in row.metrics for row in rows], dtype=bool)
    shares = time_shares([row for row in rows if "time/step" in row.metrics])
    if not shares:
        _draw_line(panel, steps, np.full(len(rows), math.nan), "Share of time", GREY)
        return
    panel.set_title("Share of time", fontsize=10, loc="left")
    colours: dict[str, str] = dict(zip((*PHASES, "orchestration"), PHASE_COLOURS, strict=True))
    names = [name.replace("_", " ") for name in shares]
    panel.stackplot(
        steps[timed], list(shares.values()), labels=names, colors=[colours[name] for name in shares], linewidth=0
    )
    panel.set_ylim(0, 1)
    panel.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)


def _finish(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#c3c7cf")
    panel.tick_params(labelsize=8, colors=GREY, length=3)
    panel.grid(axis="y", color="#e6e8ec", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
