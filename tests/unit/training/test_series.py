"""The last export of a series, and the configuration that goes on from it."""

import json
import os
from pathlib import Path

import pytest

from gyre_core.config import GyreConfig
from gyre_core.training.series import continued, last_export


@pytest.fixture
def config(tmp_path):
    return GyreConfig.model_validate(
        {"experiment": {"name": "series", "output": str(tmp_path)}, "elastic": {"enabled": True}}
    )


def leave(config, run_id, time, status="completed", exported=True):
    """What a run left at `time`; returns its export."""
    folder = Path(config.experiment.output, config.experiment.name, run_id)
    (folder / "export").mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    os.utime(folder / "summary.json", (time, time))
    if exported:
        (folder / "export" / "config.json").write_text("{}")
    return str(folder / "export")


def test_the_first_of_a_series_starts_from_its_model(config):
    assert last_export(config) is None
    assert continued(config) is config


def test_the_next_one_starts_from_what_the_newest_completed_run_exported(config):
    leave(config, "b", 1000.0)
    newest = leave(config, "a", 2000.0)
    leave(config, "c", 3000.0, status="interrupted")
    leave(config, "d", 4000.0, exported=False)
    follower = continued(config)
    assert follower.models.policy == newest
    # Everything else is as it was, defaults that depend on other settings included.
    assert follower.rollout.launcher == "pool"
    assert follower.model_copy(update={"models": config.models}) == config
