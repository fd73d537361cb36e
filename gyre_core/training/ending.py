"""What a run leaves for people: `summary.json` as it goes, and the exported policy at its end."""

from __future__ import annotations

import asyncio
from typing import Literal

from gyre_core.monitor.metrics import read_metrics
from gyre_core.monitor.report import build_summary, write_summary
from gyre_core.policy.models import copy_policy, copy_weights
from gyre_core.training.export import EXPORT, write_export
from gyre_core.training.run import TrainingRun

Status = Literal["running", "completed", "stopped", "interrupted", "failed"]


def write_run_summary(run: TrainingRun, status: Status, error: BaseException | None = None) -> None:
    """Write `summary.json` as the run stands, with the error that ended it; raises SupersededError."""
    summary = build_summary(status, read_metrics(run.folder.path), run.step, run.alarms.raised)
    summary |= {"run": run.key, "total_steps": run.config.experiment.steps, "version": str(run.version)}
    if error is not None:
        summary["error"] = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    write_summary(run.folder.path, summary, run.require_owned)


async def export_policy(run: TrainingRun) -> None:
    """Write the policy as the last step left it to `export/` in the run folder; raises SupersededError."""
    weights = await asyncio.to_thread(run.chain.load, run.version)
    policy = copy_policy(run.policy, next(iter(weights.values())).dtype)
    copy_weights(policy.model, weights)
    await asyncio.to_thread(write_export, policy, run.folder, run.version, run.folder.path / EXPORT, run.require_owned)
