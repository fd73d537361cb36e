"""A series of runs of one name, each of which may go on from what the last one left."""

from __future__ import annotations

import json
from pathlib import Path

from gyre_core.config import GyreConfig
from gyre_core.training.run_folder import SUMMARY

EXPORT_CONFIG = "export/config.json"
"""What shows that a run left its policy."""


def last_export(config: GyreConfig) -> Path | None:
    """The policy that the newest completed run of the configured name exported; None when there is none."""
    folder = Path(config.experiment.output, config.experiment.name)
    summaries = sorted(folder.glob(f"*/{SUMMARY}"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for summary in summaries:
        completed = json.loads(summary.read_text()).get("status") == "completed"
        if completed and (summary.parent / EXPORT_CONFIG).is_file():
            return (summary.parent / EXPORT_CONFIG).parent.absolute()
    return None


def continued(config: GyreConfig) -> GyreConfig:
    """The configuration with the last export of its series as the policy; as it is for the first of a series."""
    export = last_export(config)
    if export is None:
        return config
    settings = config.model_dump(exclude_unset=True)
    return GyreConfig.model_validate({**settings, "models": {**settings.get("models", {}), "policy": str(export)}})
