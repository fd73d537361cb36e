"""What `gyre status` says of runs: one line each, or one run in full."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

from gyre_core.monitor.metrics import StepMetrics, read_metrics
from gyre_core.rollout.shared import CONFIG
from gyre_core.training.run_folder import RunFolder

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
    rows = [("run", "status", "steps", "reward", "last step"), *(_row(folder) for folder in folders)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
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
    last = _last_step(folder)
    summary = folder.summary()
    lines = [
        f"run     {folder.key}",
        f"folder  {folder.path}",
        f"status  {run_status(folder)}",
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
    if error := summary.get("error"):
        lines.append(f"error   {error}")
    return "\n".join(lines)


def _last_step(folder: RunFolder) -> StepMetrics | None:
    rows = read_metrics(folder.path)
    return rows[-1] if rows else None
