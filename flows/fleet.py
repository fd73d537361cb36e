"""The rollout workers of a run as Prefect flow runs: who there is, and how a plan is carried out."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterId,
    FlowRunFilterTags,
    LogFilter,
    LogFilterFlowRunId,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort, LogSort
from prefect.events import emit_event
from prefect.states import Cancelling

from flows.names import ROLLOUT_DEPLOYMENT, ROLLOUT_POOL, SCALE_REQUESTED
from flows.states import OPEN_STATES, in_states, state_of
from gyre_core.cluster.epochs import current_epoch
from gyre_core.cluster.fleet import Target, promote, read_target, request_drain, worker_name
from gyre_core.cluster.heartbeat import WorkerBeat
from gyre_core.cluster.planning import FleetPlan, Member, Phase, Start, plan_fleet
from gyre_core.storage import Storage

logger = logging.getLogger(__name__)

_PAGE = 200
# Flow runs that the server gives in one answer.


@dataclass(frozen=True, slots=True)
class Sign:
    """What a worker's heartbeats say of it; `was_ready` once it could take requests, or wait as a warm spare."""

    phase: Phase
    was_ready: bool


class PrefectFleet:
    """The workers of the run `key`, whose data lies in `storage`, as the owner of `epoch` sees them.

    Several may look after one run: what they start carries a key that Prefect takes once. All methods raise
    httpx.HTTPError while the Prefect server is away.
    """

    def __init__(self, key: str, storage: Storage, epoch: int, drain_timeout: float) -> None:
        """`drain_timeout` is the time, in seconds, after which a worker that was asked to go is cancelled."""
        self._key = key
        self._storage = storage
        self._epoch = epoch
        self._drain_timeout = drain_timeout
        self._deployment: UUID | None = None
        self._open: dict[str, FlowRun] = {}
        self._ended: dict[UUID, FlowRun] = {}
        self._draining_since: dict[str, float] = {}

    async def reconcile(self, target: Target, signs: Mapping[str, Sign] | None = None) -> FleetPlan:
        """Look at the workers and bring them to `target`; returns what was done.

        `signs` are the workers' heartbeats as the caller judges them; without them, what the workers wrote last.
        """
        if signs is None:
            signs = await asyncio.to_thread(read_signs, self._storage)
        members = await self.members(signs)
        plan = plan_fleet(target.workers, target.standby, members, time.time())
        await self.apply(plan)
        return plan

    async def members(self, signs: Mapping[str, Sign]) -> list[Member]:
        """All workers that were ever started for the run; raises ObjectNotFound when nobody registered any flows."""
        async with get_client() as client:
            open_runs = await self._read_runs(client)
        draining = await asyncio.to_thread(self._flagged, "drain")
        promoted = await asyncio.to_thread(self._flagged, "promote")
        runs = {run.id: run for run in (*self._ended.values(), *open_runs)}
        members = {run.id: self._member(run, signs, draining, promoted) for run in runs.values()}
        self._open = {members[run.id].name: run for run in open_runs}
        return list(members.values())

    async def apply(self, plan: FleetPlan) -> None:
        """Carry out a plan that was made of the last `members`; doing it twice starts nobody twice."""
        for name in plan.promote:
            await asyncio.to_thread(promote, self._storage, name)
        for name in plan.drain:
            await asyncio.to_thread(request_drain, self._storage, name)
        async with get_client() as client:
            for name in (*plan.cancel, *self._overdue()):
                await client.set_flow_run_state(self._open[name].id, Cancelling())
            # At every pass: another run on this server may have counted without this one's workers.
            await _set_limit(client, len(plan.start))
            for start in plan.start:
                await self._start(client, start)
        if plan.start or plan.promote or plan.drain or plan.cancel:
            logger.info("rollout workers of %s: %s", self._key, describe(plan))

    @property
    def any_open(self) -> bool:
        """Whether the flow run of any worker had not ended at the last look."""
        return bool(self._open)

    @property
    def ended_workers(self) -> list[str]:
        """The names of the workers whose flow runs had ended at the last look."""
        return [worker_name(run.parameters["slot"], run.parameters["generation"]) for run in self._ended.values()]

    async def any_ended(self, client: PrefectClient) -> bool:
        """Whether the flow run of a worker has ended since the last look; one light question to the server."""
        if not self._open:
            return False
        known = FlowRunFilterId(any_=[run.id for run in self._open.values()])
        ended = FlowRunFilter(id=known, state=in_states(TERMINAL_STATES))
        return await client.count_flow_runs(flow_run_filter=ended) > 0

    async def open_workers(self) -> list[str]:
        """The names of the workers whose flow runs have not ended."""
        await self.members({})
        return sorted(self._open)

    async def cancel_all(self) -> None:
        """Cancel every worker whose flow run had not ended at the last look."""
        async with get_client() as client:
            for run in self._open.values():
                if state_of(run) != StateType.CANCELLING:
                    await client.set_flow_run_state(run.id, Cancelling())

    async def last_words(self, slot: int) -> str:
        """What the last worker that ended in a slot left: how it ended, and the end of its log."""
        ended = [run for run in self._ended.values() if run.parameters["slot"] == slot]
        run = max(ended, key=lambda run: run.parameters["generation"])
        async with get_client() as client:
            logs = await client.read_logs(
                LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])), limit=20, sort=LogSort.TIMESTAMP_DESC
            )
        ending = f"{run.state.name}: {run.state.message}" if run.state else "no state"
        return "\n".join([ending, *(log.message for log in reversed(logs))])

    def _member(
        self, run: FlowRun, signs: Mapping[str, Sign], draining: frozenset[str], promoted: frozenset[str]
    ) -> Member:
        slot, generation = run.parameters["slot"], run.parameters["generation"]
        named = Member(slot, generation, "active", "ended")
        sign = signs.get(named.name)
        standby = run.parameters["standby"] and named.name not in promoted
        phase = _phase(run, sign)
        if phase in ("starting", "ready") and named.name in draining:
            phase = "draining"
        if phase == "draining":
            self._draining_since.setdefault(named.name, time.monotonic())
        failed = self._started_here(run) and _failed(run) and (sign is None or not sign.was_ready)
        failed_at = run.end_time.timestamp() if failed and run.end_time is not None else None
        return Member(slot, generation, "standby" if standby else "active", phase, failed_at)

    def _started_here(self, run: FlowRun) -> bool:
        """Whether this owner started it: what failed under an earlier one may have been mended since."""
        return (run.idempotency_key or "").startswith(f"{self._key}/{self._epoch}/")

    def _overdue(self) -> list[str]:
        """Workers that were asked to go long ago, and are not being cancelled yet."""
        now = time.monotonic()
        self._draining_since = {name: since for name, since in self._draining_since.items() if name in self._open}
        late = [name for name, since in self._draining_since.items() if now - since > self._drain_timeout]
        return [name for name in late if state_of(self._open[name]) != StateType.CANCELLING]

    async def _start(self, client: PrefectClient, start: Start) -> None:
        assert self._deployment is not None, "it was read with the members"
        run = await client.create_flow_run_from_deployment(
            self._deployment,
            parameters={
                "run": self._key,
                "storage": self._storage.url,
                "slot": start.slot,
                "generation": start.generation,
                "standby": start.standby,
            },
            name=f"worker-{start.slot:03d}.{start.generation}",
            tags=[self._key],
            idempotency_key=f"{self._key}/{self._epoch}/{start.slot}.{start.generation}",
        )
        if state_of(run) in TERMINAL_STATES:
            # Another reconciler started it, and it ended before anybody looked.
            self._ended[run.id] = run

    def _flagged(self, what: str) -> frozenset[str]:
        return frozenset(name.rpartition("/")[2] for name in self._storage.list(f"fleet/{what}"))

    async def _read_runs(self, client: PrefectClient) -> list[FlowRun]:
        """The open flow runs; those that ended since the last look are added to the others."""
        if self._deployment is None:
            self._deployment = (await client.read_deployment_by_name(ROLLOUT_DEPLOYMENT)).id
            self._ended = {run.id: run for run in await self._read(client, state=in_states(TERMINAL_STATES))}
        open_runs = await self._read(client, state=in_states(OPEN_STATES))
        gone = {run.id for run in self._open.values()} - {run.id for run in open_runs}
        for run in await self._read(client, id=FlowRunFilterId(any_=list(gone))) if gone else []:
            if state_of(run) in TERMINAL_STATES:
                self._ended[run.id] = run
            else:
                open_runs.append(run)
        return open_runs

    async def _read(self, client: PrefectClient, **which: Any) -> list[FlowRun]:
        runs: list[FlowRun] = []
        while True:
            page = await client.read_flow_runs(
                flow_run_filter=FlowRunFilter(
                    deployment_id=FlowRunFilterDeploymentId(any_=[self._deployment] if self._deployment else []),
                    tags=FlowRunFilterTags(all_=[self._key]),
                    **which,
                ),
                sort=FlowRunSort.ID_DESC,
                limit=_PAGE,
                offset=len(runs),
            )
            runs += page
            if len(page) < _PAGE:
                return runs


async def reconcile_once(key: str, storage: Storage) -> FleetPlan:
    """Bring the workers of a run to what its owner wants, from what lies in its storage; returns what was done."""
    target = await asyncio.to_thread(read_target, storage)
    epoch = await asyncio.to_thread(current_epoch, storage)
    return await PrefectFleet(key, storage, epoch, drain_timeout=float("inf")).reconcile(target)


def request_scale(key: str, storage: Storage, target: Target) -> None:
    """Tell Prefect of a scaling decision, so that the automation carries it out; nothing depends on it alone."""
    emit_event(
        SCALE_REQUESTED,
        resource={"prefect.resource.id": f"gyre.run.{key}", "prefect.resource.name": key},
        payload={
            "run": key,
            "storage": storage.url,
            "decision": target.decision,
            "workers": target.workers,
            "standby": target.standby,
            "reason": target.reason,
        },
    )


def read_signs(storage: Storage) -> dict[str, Sign]:
    """What the workers wrote last about themselves; it does not say whether they still live."""
    signs: dict[str, Sign] = {}
    for name in storage.list("workers"):
        try:
            beat = WorkerBeat.from_json(storage.read(name))
        except (FileNotFoundError, ValueError, TypeError, json.JSONDecodeError):
            continue
        signs[beat.worker] = Sign("ready" if beat.state == "standby" else beat.state, beat.came_up)
    return signs


def describe(plan: FleetPlan) -> str:
    """A plan in a line, for people."""
    starts = [f"{start.slot:03d}.{start.generation}{' (standby)' if start.standby else ''}" for start in plan.start]
    parts = [("start", starts), ("promote", plan.promote), ("drain", plan.drain), ("cancel", plan.cancel)]
    return "; ".join(f"{verb} {', '.join(names)}" for verb, names in parts if names) or "nothing to do"


def _failed(run: FlowRun) -> bool:
    return state_of(run) in (StateType.FAILED, StateType.CRASHED)


def _phase(run: FlowRun, sign: Sign | None) -> Phase:
    state = state_of(run)
    if state in TERMINAL_STATES:
        return "ended"
    if state in (StateType.CANCELLING, StateType.PAUSED):
        return "draining"
    if state != StateType.RUNNING:
        return "pending"
    if sign is None:
        return "starting"
    # It said its last word, and its flow run is about to end.
    return "draining" if sign.phase == "ended" else sign.phase


async def _set_limit(client: PrefectClient, starting: int) -> None:
    """Move the pool's concurrency limit to what is open in it, of all runs, and what is about to start."""
    opened = await client.count_flow_runs(
        flow_run_filter=FlowRunFilter(state=in_states(OPEN_STATES)),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[ROLLOUT_POOL])),
    )
    limit = max(1, opened + starting)
    if (await client.read_work_pool(ROLLOUT_POOL)).concurrency_limit != limit:
        await client.update_work_pool(ROLLOUT_POOL, WorkPoolUpdate(concurrency_limit=limit))
