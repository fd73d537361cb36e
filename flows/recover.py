"""A training run whose process died comes back as a new flow run of the same run key.

Several may see that a run has crashed: the supervisor of its machine, and Prefect's automation. What both start carries
a key that Prefect takes once, and the run folder's lock makes them decide one after the other. How often, and after
which pauses, is the law in `gyre_core.training.crashes`.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

from prefect import flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId, FlowRunFilterEndTime
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events import emit_event
from prefect.states import Crashed, Scheduled
from pydantic import TypeAdapter

from blocks.storage import load_access
from flows.closing import close_below
from flows.forms import FormConfig
from flows.names import RUN_GIVEN_UP, TRAIN_DEPLOYMENT, successor_key
from flows.states import in_states, state_of
from gyre_core.cluster.epochs import current_epoch
from gyre_core.config import GyreConfig
from gyre_core.monitor.metrics import read_metrics
from gyre_core.training.crashes import Crashes, without_count
from gyre_core.training.run_folder import RunFolder, RunFolderError, run_storage

logger = logging.getLogger(__name__)

SETTLED = "gyre.settled"
"""Tag of a crashed flow run about which all is decided: it has come back, or will not."""
LOOK_BACK = timedelta(days=1)
"""A run that crashed longer ago than this, unseen by anybody, stays as it is."""

_CONFIG: TypeAdapter[GyreConfig] = TypeAdapter(FormConfig)


@flow(flow_run_name="recover-{flow_run}", persist_result=False)
async def recover(flow_run: UUID) -> str:
    """Start the training again whose flow run has crashed, unless that was done or it is given up; says what was done.

    It may run at any time, more than once, and beside the supervisor, which does the same.
    """
    async with get_client() as client:
        successor = await recover_run(client, await client.read_flow_run(flow_run))
    return "nothing to start" if successor is None else f"goes on as flow run {successor.id}"


async def crashed_runs(client: PrefectClient) -> list[FlowRun]:
    """The crashed flow runs of the train deployment about which nothing was decided, those that crashed last first."""
    deployment = await client.read_deployment_by_name(TRAIN_DEPLOYMENT)
    crashed = await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]),
            state=in_states([StateType.CRASHED]),
            end_time=FlowRunFilterEndTime.model_validate({"after_": datetime.now(UTC) - LOOK_BACK}),
        ),
        sort=FlowRunSort.END_TIME_DESC,
    )
    return [run for run in crashed if SETTLED not in run.tags]


async def recover_run(client: PrefectClient, dead_flow_run: FlowRun) -> FlowRun | None:
    """Start a crashed run of the train deployment again; returns the new flow run, None where there is none to start.

    There is none for a run that did not crash, was settled, is complete, trained by a live process, or given up: that
    is logged as an error, told as an event, and written to the run's summary. The run folder must be on this machine.
    Raises httpx.HTTPError while the Prefect server is away; then it may be called again.
    """
    try:
        remains = Remains.of(dead_flow_run)
    except ValueError:
        return None  # Started again, it would be refused.
    folder = remains.folder
    if not _is_open_question(await client.read_flow_run(dead_flow_run.id)):
        return None  # Nobody is to be kept from the folder for this.
    try:
        if folder is not None:
            await asyncio.to_thread(folder.acquire)
    except (RunFolderError, FileNotFoundError):
        return None  # Somebody trains it, or decides about it just now.
    try:
        return await _decide(client, await client.read_flow_run(dead_flow_run.id), remains)
    finally:
        if folder is not None:
            folder.release()


async def _decide(client: PrefectClient, dead: FlowRun, remains: Remains) -> FlowRun | None:
    deployment = await client.read_deployment_by_name(TRAIN_DEPLOYMENT)
    if dead.deployment_id != deployment.id or not _is_open_question(dead):
        return None
    if remains.opened and remains.folder is None:
        return None  # It is on another machine.
    await close_below(client, dead.id, Crashed(message="The process of its run died."))
    successor = None if remains.complete else await _start_again(client, dead, remains)
    await client.update_flow_run(dead.id, tags=[*dead.tags, SETTLED])
    return successor


def _is_open_question(dead: FlowRun) -> bool:
    return state_of(dead) == StateType.CRASHED and SETTLED not in dead.tags


async def _start_again(client: PrefectClient, dead: FlowRun, remains: Remains) -> FlowRun | None:
    crashes = Crashes.from_tags(dead.tags).after(remains.last_step())
    if crashes.exhausted:
        _give_up(dead, remains, crashes)
        return None
    assert dead.deployment_id is not None, "it is a run of the train deployment"
    successor = await client.create_flow_run_from_deployment(
        dead.deployment_id,
        parameters=await remains.parameters(dead.parameters),
        state=Scheduled(scheduled_time=datetime.now(UTC) + timedelta(seconds=crashes.pause)),
        tags=[*without_count(dead.tags), crashes.tag],
        idempotency_key=successor_key(dead.id),
        work_queue_name=dead.work_queue_name,
        job_variables=dead.job_variables,
    )
    logger.warning("%s %s and goes on as flow run %s", remains.key, crashes, successor.id)
    return successor


def _give_up(dead: FlowRun, remains: Remains, crashes: Crashes) -> None:
    logger.error("%s %s and is given up; its last flow run was %s", remains.key, crashes, dead.id)
    if remains.folder is not None:
        remains.folder.give_up(f"{crashes}; once the cause is mended, go on with --resume")
    emit_event(
        RUN_GIVEN_UP,
        resource={"prefect.resource.id": f"gyre.run.{remains.key}", "prefect.resource.name": remains.key},
        payload={"run": remains.key, "flow_run": str(dead.id), "crashes": crashes.count, "step": crashes.step},
        id=uuid5(NAMESPACE_OID, f"{RUN_GIVEN_UP}/{dead.id}"),
    )


@dataclass(frozen=True, slots=True)
class Remains:
    """What a flow run that died has left of its run."""

    config: GyreConfig
    key: str
    """The run's key; of one that was not named, and died before it was open, its name alone."""
    folder: RunFolder | None
    """None where there is none on this machine."""
    opened: bool
    """Whether the run was open, so that its flow run is tagged with its key: what it was to begin from is in the
    run."""

    @classmethod
    def of(cls, dead: FlowRun) -> Remains:
        """Look; raises ValueError for a configuration that cannot be read."""
        config = _CONFIG.validate_python(dead.parameters.get("config"))
        name, run_id = config.experiment.name, dead.parameters.get("run_id")
        tags = [tag for tag in dead.tags if tag.startswith(f"{name}/")]
        named = [f"{name}/{run_id}"] if run_id else []
        # Tags of the user's may look like a key, but have no folder.
        folders = [RunFolder(Path(config.experiment.output) / key) for key in tags or named]
        folder = next((folder for folder in folders if folder.present()), None)
        return cls(config, folder.key if folder else (tags or named or [name])[0], folder, opened=bool(tags))

    @property
    def complete(self) -> bool:
        """Whether all that the run was to do is done."""
        return self.folder is not None and self.folder.summary().get("status") == "completed"

    def last_step(self) -> int:
        """The last step in the run's metrics; 0 before there is one."""
        rows = read_metrics(self.folder.path) if self.folder is not None else []
        return rows[-1].step if rows else 0

    async def parameters(self, own: dict[str, Any]) -> dict[str, Any]:
        """What a flow run is given to go on after one with the parameters `own`.

        They are the same once more when the dead one had not come to do what they say; what it may have left of a new
        run is then removed.
        """
        if self.folder is None:
            return own
        if not self.opened:
            if own.get("resume") or (own.get("resume_step") is not None and not own.get("resume_from")):
                return own
            await load_access(self.config.storage.block)
            if not await asyncio.to_thread(current_epoch, run_storage(self.config, self.folder)):
                await asyncio.to_thread(shutil.rmtree, self.folder.path)
                return own
        run_id = self.folder.path.name
        return {**own, "run_id": run_id, "resume": True, "resume_step": None, "resume_from": None}
