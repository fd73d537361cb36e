"""A recurring job that fires while it still trains: each firing is a run of its own, waits its turn, or yields."""

import asyncio

import pytest
import yaml
from platform_tools import reaches, start
from prefect.client.orchestration import get_client

from deployments.deploy import deploy
from deployments.schedule import schedule_runs
from gyre_core.config import GyreConfig

SMALL = {
    "models": {"tiny": {"hidden_size": 16, "layers": 1}, "warm_start": {"max_steps": 0}},
    "data": {"evaluation_size": 0, "size": 16},
    "rollout": {"batch_size": 4, "samples_per_prompt": 2, "max_tokens": 2},
    "monitor": {"tensorboard": False},
}
NEW_YEAR = "0 3 1 1 *"


@pytest.fixture
def config(tmp_path):
    return GyreConfig.model_validate(
        {**SMALL, "experiment": {"name": "series", "steps": 2, "threads": 1, "output": str(tmp_path)}}
    )


async def test_firings_that_overlap_wait_yield_or_fail_and_go_on_from_the_last_export(platform, config, tmp_path):
    name = await asyncio.to_thread(schedule_runs, config, NEW_YEAR, "UTC", "queue", "last_export")
    assert name == "recurring/series"
    first = await reaches(await start(name), "Running")
    second, yielding, failing = [
        await start(name, **options) for options in ({}, {"overlap": "skip"}, {"overlap": "refuse"})
    ]
    assert "still trains" in (await reaches(yielding, "Skipped")).state.message
    assert "refuses to overlap" in (await reaches(failing, "Failed")).state.message
    await reaches(first, "Completed")
    await reaches(second, "Completed")
    runs = sorted(tmp_path.glob("series/*"), key=lambda run: (run / "summary.json").stat().st_mtime_ns)
    assert [run.name[-4:] for run in runs] == [str(first.id)[-4:], str(second.id)[-4:]]
    policies = [yaml.safe_load((run / "config.yaml").read_text())["models"]["policy"] for run in runs]
    assert policies == ["tiny-qwen3", str(runs[0] / "export")]


async def test_a_schedule_stays_when_gyre_comes_up_again(platform, config):
    name = await asyncio.to_thread(schedule_runs, config, NEW_YEAR, "Europe/Vienna", "skip", "model")
    async with get_client() as client:
        await deploy(client)
        deployment = await client.read_deployment_by_name(name)
    (schedule,) = deployment.schedules
    assert (schedule.schedule.cron, schedule.schedule.timezone) == (NEW_YEAR, "Europe/Vienna")
    assert deployment.parameters["overlap"] == "skip"
    assert GyreConfig.model_validate(deployment.parameters["config"]) == config


@pytest.mark.parametrize(("cron", "timezone"), [("at three", "UTC"), (NEW_YEAR, "Mars/Olympus")])
def test_a_schedule_that_cannot_be_read_is_one_sentence(platform, config, cron, timezone):
    with pytest.raises(ValueError, match=r"^the schedule cannot be read \(.*\); write minute, hour, .*$"):
        schedule_runs(config, cron, timezone, "skip", "model")
