"""What a run shows in Prefect: its progress, a table of the last steps, and a picture of the curves."""

from __future__ import annotations

import asyncio
import base64
import re
from uuid import UUID

from prefect.artifacts import (
    acreate_image_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)

from gyre_core.monitor.metrics import read_metrics
from gyre_core.monitor.report import curves_png, metrics_table
from gyre_core.training.recovery_report import recovery_lines
from gyre_core.training.remote import workers_table
from gyre_core.training.run import TrainingRun


class RunArtifacts:
    """The artifacts of one run; their keys carry the run's name and id, so that each update is a new version."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._key = re.sub(r"[^a-z0-9]+", "-", run.key.lower()).strip("-")
        self._progress: UUID | None = None

    async def update(self) -> None:
        """Show the run as it stands."""
        run = self._run
        percent = 100.0 * run.step / run.config.experiment.steps
        if self._progress is None:
            self._progress = await acreate_progress_artifact(
                percent, key=f"progress-{self._key}", description=f"Steps of {run.key}"
            )
        else:
            await aupdate_progress_artifact(self._progress, percent)
        rows = await asyncio.to_thread(read_metrics, run.folder.path)
        if not rows:
            return
        await acreate_table_artifact(
            metrics_table(rows), key=f"steps-{self._key}", description=f"The last steps of {run.key}"
        )
        if run.remote is not None:
            view = run.remote.view()
            decisions = "\n".join(f"- {line}" for line in view["decisions"]) or "- none yet"
            await acreate_table_artifact(
                workers_table(view),
                key=f"workers-{self._key}",
                description=f"Rollout workers of {run.key}; {view['wanted']} wanted. Latest decisions:\n\n{decisions}",
            )
        if recoveries := recovery_lines(rows):
            await acreate_markdown_artifact(
                "\n".join(f"- {line}" for line in recoveries),
                key=f"recoveries-{self._key}",
                description=f"Recoveries of {run.key}, in seconds",
            )
        picture = base64.b64encode(await asyncio.to_thread(curves_png, rows)).decode()
        await acreate_image_artifact(
            f"data:image/png;base64,{picture}", key=f"curves-{self._key}", description=f"Curves of {run.key}"
        )
