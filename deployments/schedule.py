"""`gyre schedule`: a series of runs as a deployment of its own, with a schedule."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from pydantic import ValidationError

from deployments.deploy import DEPLOYMENTS, register
from deployments.local import configured_api, using_api
from deployments.platform import running_platform
from flows.names import RECURRING_FLOW
from gyre_core.config import GyreConfig


def schedule_runs(config: GyreConfig, cron: str, timezone: str, overlap: str, start: str) -> str:
    """Register the series `config.experiment.name` to run at the times of `cron`; returns the deployment's name.

    Done again, it replaces configuration and schedule. Raises ValueError for a cron line or timezone that cannot be
    read, and when there is no Prefect server to tell.
    """
    platform = running_platform()
    api = configured_api() or (platform.api_url if platform else None)
    if api is None:
        raise ValueError("there is no Prefect server to keep the schedule; start one with `gyre up`")
    try:
        schedule = DeploymentScheduleCreate(schedule=CronSchedule(cron=cron, timezone=timezone), slug="gyre")
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ValueError(
            f"the schedule cannot be read ({reason}); write minute, hour, day of month, month and day of week, such as "
            '"0 3 * * *" for three o\'clock every night, and a timezone such as Europe/Vienna'
        ) from None
    settings = config.model_dump(mode="json", exclude_unset=True)
    output = str(Path(config.experiment.output).absolute())
    settings["experiment"] = {**settings.get("experiment", {}), "name": config.experiment.name, "output": output}
    with using_api(api):
        asyncio.run(_register(settings, schedule, overlap, start))
    return f"{RECURRING_FLOW}/{config.experiment.name}"


async def _register(settings: dict[str, object], schedule: DeploymentScheduleCreate, overlap: str, start: str) -> None:
    (deployment,) = [deployment for deployment in DEPLOYMENTS if deployment.flow == RECURRING_FLOW]
    experiment = settings["experiment"]
    assert isinstance(experiment, dict), "it was made one"
    async with get_client() as client:
        await register(
            client,
            deployment,
            name=experiment["name"],
            parameters={"config": settings, "overlap": overlap, "start": start},
            schedules=[schedule],
        )
