"""What `gyre status` says of runs: one line each, or one run in full."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from gyre_core.monitor.metrics import StepMetrics, read_metrics
from gyre_core.rollout.shared import CONFIG
from gyre_core.training.recovery_report import recovery_lines
from gyre_core.training.remote import read_view, workers_table
from gyre_core.training.run_folder import RunFolder, run_storage

_SHOWN = ("reward", "reward_std", "kl", "entropy", "completions/mean_length", "perf/throughput", "time/step")


def describe_runs(output: str, run: str | None = None) -> str:
    """A line for each run under `output`, or the state of one run in full.

    Raises ValueError when `run` is not there.
    """
    if run is not None:
        return _describe(RunFolder.find(run, output))
    folders = [RunFolder(file.parent) for file in sorted(Path(output).glob(f"*/*/{CONFIG}"))]
    if not folders:
        return f"no runs under {Path(output)}"
    return "\n".join(
        _columns([("run", "status", "steps", "reward", "last step"), *(_row(folder) for folder in folders)])
    )


def run_status(folder: RunFolder) -> str:
    """The run's status by its summary; `crashed` for one that says `running` while no process owns it."""
    status = str(folder.summary().get("status", "starting"))
    return "crashed" if status in ("starting", "running") and not folder.owned() else status


def _row(folder: RunFolder) -> tuple[str, ...]:
    last = _last_step(folder)
    total = folder.config().experiment.steps
    reward = last.metrics.get("reward") if last else None
    return (
        folder.key,
        run_status(folder),
        f"{last.step if last else 0}/{total}",
        "" if reward is None else f"{reward:.3f}",
        f"{time.time() - last.time:.0f} s ago" if last else "",
    )


def _describe(folder: RunFolder) -> str:
    rows, status = read_metrics(folder.path), run_status(folder)
    last = rows[-1] if rows else None
    summary = folder.summary()
    lines = [
        f"run     {folder.key}",
        f"folder  {folder.path}",
        f"status  {status}",
        *(["        a platform starts its own runs again; any other goes on with --resume"] * (status == "crashed")),
        f"steps   {last.step if last else 0} of {folder.config().experiment.steps}",
    ]
    lines += [f"        {name} {last.metrics[name]:.4g}" for name in _SHOWN if last and name in last.metrics]
    evaluation = cast(dict[str, dict[str, Any] | None], summary.get("evaluation") or {})
    for label, result in evaluation.items():
        if result:
            error = result.get("reward_se")  # A single prompt has none.
            margin = "" if error is None else f" ± {error:.4f}"
            when = f"{label} training" if label == "before" else f"after step {result['step']}"
            lines.append(f"held-out reward {when}: {result['reward']:.4f}{margin}")
    alarms = cast(list[dict[str, Any]], summary.get("alarms") or [])
    lines += [f"alarm   {alarm['name']} since step {alarm['step']}: {alarm['sentence']}" for alarm in alarms]
    lines += [f"recovered {line}" for line in recovery_lines(rows)[-3:]]
    if error := summary.get("error"):
        lines.append(f"error   {error}")
    # What an owner saw last says nothing of the workers once it has ended.
    alive = status in ("starting", "running")
    view = read_view(run_storage(folder.config(), folder)) if alive else None
    return "\n".join([*lines, *(_describe_workers(view) if view is not None else ())])


def _describe_workers(view: Mapping[str, Any]) -> list[str]:
    """The scheduler's table: the workers as their owner saw them last, its queue, and its decisions."""
    lines = [
        f"workers {view['wanted']} wanted; {view['open_requests']} requests open, {view['queued_requests']} of them "
        f"unclaimed; {view['reissued']} attempts given to another worker"
    ]
    rows = workers_table(view)
    if rows:
        lines += [f"        {line}" for line in _columns([tuple(rows[0]), *(tuple(row.values()) for row in rows)])]
    return lines + [f"scaled  {line}" for line in view["decisions"]]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows with their cells below each other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _last_step(folder: RunFolder) -> StepMetrics | None:
    rows = read_metrics(folder.path)
    return rows[-1] if rows else None
