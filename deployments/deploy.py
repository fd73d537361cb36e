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
from prefect.utilities.callables import generate_parameter_schema

from blocks.storage import S3Access
from deployments.automations import ensure_automations
from deployments.environment import package_version
from deployments.exit_codes import USER_ERROR
from deployments.flow_processes import process_variables
from deployments.pools import ensure_pools
from deployments.signatures import read_signature
from flows.names import CONTROL_POOL, DEPLOYMENT, LEARNER_POOL, ROLLOUT_POOL

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


async def register(client: PrefectClient, deployment: FlowDeployment) -> None:
    """Register one flow for process workers, or bring its deployment up to date."""
    await client.create_deployment(
        await client.create_flow_from_name(deployment.flow),
        DEPLOYMENT,
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
