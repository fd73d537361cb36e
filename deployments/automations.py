"""What Prefect does by itself: events start flows, so that scaling is carried out and crashed training goes on.

Nothing depends on them alone: events may be late, or lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefect.client.orchestration import PrefectClient
from prefect.events import ResourceSpecification
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture

from flows.names import RECOVER_DEPLOYMENT, RESIZE_DEPLOYMENT, SCALE_REQUESTED, TRAIN_DEPLOYMENT

RESIZE_AUTOMATION = "gyre-resize"
"""Name of the automation that answers scaling decisions."""
RECOVER_AUTOMATION = "gyre-recover"
"""Name of the automation that answers the crash of a training run."""


async def ensure_automations(client: PrefectClient) -> None:
    """Make the automations, or bring them up to date; the deployments that they run must be registered."""
    for wanted in (await _resize_automation(client), await _recover_automation(client)):
        present = await client.read_automations_by_name(wanted.name)
        if present:
            await client.update_automation(present[0].id, wanted)
        else:
            await client.create_automation(wanted)
        await _delete(client, present[1:])


async def remove_automations(client: PrefectClient) -> None:
    """Delete the automations; ones that are not there are no error."""
    for name in (RESIZE_AUTOMATION, RECOVER_AUTOMATION):
        await _delete(client, await client.read_automations_by_name(name))


async def _delete(client: PrefectClient, automations: Sequence[Automation]) -> None:
    for automation in automations:
        assert automation.id is not None, "the server gave it an id"
        await client.delete_automation(automation.id)


async def _resize_automation(client: PrefectClient) -> AutomationCore:
    deployment = await client.read_deployment_by_name(RESIZE_DEPLOYMENT)
    return AutomationCore(
        name=RESIZE_AUTOMATION,
        description="Carries out the scaling decisions of runs.",
        trigger=EventTrigger(expect={SCALE_REQUESTED}, for_each={"prefect.resource.id"}, posture=Posture.Reactive),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=deployment.id,
                parameters={name: f"{{{{ event.payload.{name} }}}}" for name in ("run", "storage", "decision")},
                job_variables=None,
            )
        ],
    )


async def _recover_automation(client: PrefectClient) -> AutomationCore:
    training = await client.read_deployment_by_name(TRAIN_DEPLOYMENT)
    deployment = await client.read_deployment_by_name(RECOVER_DEPLOYMENT)
    return AutomationCore(
        name=RECOVER_AUTOMATION,
        description="Starts training again that has crashed.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Crashed"},
            match_related=ResourceSpecification(
                {"prefect.resource.id": f"prefect.deployment.{training.id}", "prefect.resource.role": "deployment"}
            ),
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=deployment.id,
                parameters={"flow_run": "{{ flow_run.id | string }}"},
                job_variables=None,
            )
        ],
    )
