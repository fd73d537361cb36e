"""Registers Gyre's flows as deployments, with their parameters as a form, and makes the pools and automations.

    python -m deployments.deploy

does it on the Prefect API in use; `gyre up` runs it. It may be repeated: what is there is brought up to date. The
flows are imported from the installed package where they run, so nothing is uploaded or downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import generate_parameter_schema

from blocks.storage import S3Access
from deployments.automations import ensure_automations
from deployments.environment import package_version
from deployments.exit_codes import USER_ERROR
from deployments.flow_processes import process_variables
from deployments.pools import ensure_pools
from deployments.signatures import read_signature
from flows.names import CONTROL_POOL, DEPLOYMENT, LEARNER_POOL, RECURRING_FLOW, ROLLOUT_POOL

DEPENDENT_DEFAULTS = {"RolloutConfig": ("launcher",), "ExperienceConfig": ("clock",), "RewardConfig": ("functions",)}
"""Settings whose default depends on others: a form that filled them in would decide them."""


@dataclass(frozen=True, slots=True)
class FlowDeployment:
    """A flow as Prefect is told of it: its name, where it lies and runs, and what its parameters mean."""

    flow: str
    entrypoint: str
    pool: str
    description: str
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])


_RUN = {
    "run": "Key of the run, NAME/RUN_ID.",
    "storage": "Folder or URL of the run's own data.",
}
DEPLOYMENTS = (
    FlowDeployment(
        "train",
        "flows.train.train",
        LEARNER_POOL,
        "Trains a policy as configured, from its first evaluation to its export.",
        {
            "config": "The whole configuration of the run.",
            "run_id": "Id of the run below its name; made from the time if absent.",
            "resume": "Go on from the newest checkpoint of the run.",
            "resume_step": "Go on from the checkpoint after this step; what came later is given up.",
            "resume_from": "Begin a new run from a checkpoint of this one, NAME or NAME/RUN_ID.",
        },
    ),
    FlowDeployment(
        "rollout_worker",
        "flows.rollout_worker.rollout_worker",
        ROLLOUT_POOL,
        "Generates and scores completions for one run, as long as that run wants it. Runs start it by themselves.",
        {
            **_RUN,
            "slot": "Place among the workers of the run.",
            "generation": "How often the place was filled before, and once more.",
            "standby": "Load everything and wait to be promoted.",
        },
    ),
    FlowDeployment(
        "resize",
        "flows.resize.resize",
        CONTROL_POOL,
        "Brings the rollout workers of a run to the number that the run wants, once.",
        {**_RUN, "decision": "Number of the scaling decision that asked for it."},
    ),
    FlowDeployment(
        "recover",
        "flows.recover.recover",
        CONTROL_POOL,
        "Starts a training run again whose flow run has crashed, unless that was done or it crashes again and again.",
        {"flow_run": "Id of the crashed flow run."},
    ),
    FlowDeployment(
        RECURRING_FLOW,
        "flows.recurring.recurring",
        CONTROL_POOL,
        "Trains a run of a series; `gyre schedule` makes a deployment with a schedule of each series.",
        {
            "config": "The whole configuration of each run; experiment.name is the series.",
            "overlap": "While a run of the series still trains: `skip` this firing, `queue` it, or `refuse` and fail.",
            "start": "Start from the configured `model`, or from the `last_export` of the series.",
        },
    ),
    FlowDeployment(
        "evaluate",
        "flows.evaluate.evaluate_newest",
        CONTROL_POOL,
        "Evaluates the newest policy of a run on its held-out prompts.",
        {"run": "NAME, which means its newest run, or NAME/RUN_ID.", "output": "Folder that holds the run folders."},
    ),
)
"""All flows that may be started through Prefect."""


async def deploy(client: PrefectClient, deployments: Sequence[FlowDeployment] = DEPLOYMENTS) -> None:
    """Make the pools, register the flows and the block of S3 access, and set up the automations.

    Raises ValueError like `ensure_pools`.
    """
    await ensure_pools(client)
    await S3Access.aregister_type_and_schema(client=client)
    for deployment in deployments:
        await register(client, deployment)
    await ensure_automations(client)


async def register(
    client: PrefectClient,
    deployment: FlowDeployment,
    name: str = DEPLOYMENT,
    parameters: Mapping[str, Any] | None = None,
    schedules: Sequence[DeploymentScheduleCreate] | None = None,
) -> None:
    """Register one flow for process workers, or bring its deployment up to date.

    Without `parameters` and `schedules`, those that the deployment was given in Prefect stay.
    """
    present = await _present(client, f"{deployment.flow}/{name}")
    if present is not None:
        parameters = present.parameters if parameters is None else parameters
        schedules = [_again(schedule) for schedule in present.schedules] if schedules is None else schedules
    await client.create_deployment(
        await client.create_flow_from_name(deployment.flow),
        name,
        parameters=dict(parameters or {}),
        schedules=list(schedules or ()),
        version=package_version("gyre"),
        description=deployment.description,
        tags=["gyre"],
        work_pool_name=deployment.pool,
        entrypoint=deployment.entrypoint,
        pull_steps=[],
        parameter_openapi_schema=form_schema(deployment),
        enforce_parameter_schema=True,
        job_variables=process_variables(),
    )


async def _present(client: PrefectClient, name: str) -> DeploymentResponse | None:
    try:
        return await client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def _again(schedule: DeploymentSchedule) -> DeploymentScheduleCreate:
    """What makes a schedule that is there once more: Prefect drops all when it registers a deployment again."""
    return DeploymentScheduleCreate(
        schedule=schedule.schedule, active=schedule.active, parameters=schedule.parameters, slug=schedule.slug
    )


def form_schema(deployment: FlowDeployment) -> dict[str, Any]:
    """The parameters of a flow as Prefect's form shows them, each with its help text.

    Defaults that depend on other settings are left out, and so are those of whole sections: a form sends what it shows.
    """
    schema = generate_parameter_schema(read_signature(deployment.entrypoint), {}).model_dump(mode="json")
    for name, text in deployment.parameters.items():
        schema["properties"][name]["description"] = text
    for name, definition in schema["definitions"].items():
        for key, value in definition.get("properties", {}).items():
            if "$ref" in value or key in DEPENDENT_DEFAULTS.get(name, ()):
                value.pop("default", None)
    return schema


def main() -> int:
    """Deploy to the Prefect API in use; returns the exit code."""
    argparse.ArgumentParser(prog="python -m deployments.deploy", description=__doc__).parse_args()
    try:
        asyncio.run(_deploy())
    except ValueError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    return 0


async def _deploy() -> None:
    async with get_client() as client:
        await deploy(client)


if __name__ == "__main__":
    sys.exit(main())
