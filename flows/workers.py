"""The rollout workers of a training run: kept at the number that it wants, which the scaling law moves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import httpx
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound

from flows.fleet import PrefectFleet, Sign, request_scale
from flows.names import LEARNER_IS_LIMIT, ROLLOUT_DEPLOYMENT
from flows.termination import to_the_end
from gyre_core.cluster.epochs import SupersededError
from gyre_core.cluster.planning import FleetPlan
from gyre_core.cluster.registry import RegisteredWorker
from gyre_core.elastic.scaler import Decision
from gyre_core.training.remote import RemoteRollout
from gyre_core.training.run import TrainingRun
from gyre_core.training.scaling import Scaling, decision_line

logger = logging.getLogger(__name__)

RECONCILE_SECONDS = 2.0
"""Pause between two comparisons of the workers that are wanted with those that are there, unless one ends meanwhile."""
NOTICE_SECONDS = 0.4
"""Pause between two questions whether one has ended: its requests wait for others until then."""
DRAIN_TIMEOUT = 60.0
"""Seconds that a worker has to finish what it holds; then its flow run is cancelled."""


class WorkersFailedError(RuntimeError):
    """No worker can be started; carries the last words of the one that failed last."""


@asynccontextmanager
async def rollout_workers(run: TrainingRun) -> AsyncGenerator[None]:
    """Keep the run's workers going for the length of the block, and end them after it.

    Without a pool of workers the block runs as it is. When every worker fails at its start the block is cancelled
    and WorkersFailedError raised.
    """
    if run.remote is None:
        yield
        return
    workers = _Workers(run, run.remote)
    async with asyncio.TaskGroup() as group:
        keeping = [group.create_task(workers.keep_reconciled(), name="reconciler")]
        if run.config.elastic.enabled:
            keeping.append(group.create_task(workers.keep_scaling(), name="scaler"))
        try:
            yield
        except BaseException:
            _cancel(keeping)
            await to_the_end(workers.end(wait=False))
            raise
        _cancel(keeping)
        await workers.end(wait=True)


def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()


class _Workers:
    def __init__(self, run: TrainingRun, remote: RemoteRollout) -> None:
        self._run = run
        self._remote = remote
        self._scaling = Scaling(run, remote)
        self._fleet = PrefectFleet(run.key, run.storage, run.epoch, DRAIN_TIMEOUT)
        self._away = False
        self._limit_told = False

    async def keep_reconciled(self) -> None:
        """Bring the workers to the target again and again."""
        while True:
            self._remote.raise_error()
            plan = await self._reconcile()
            if plan is not None:
                await self._tell_given_up(plan)
            await self._pause()

    async def _pause(self) -> None:
        """Wait for the next pass, or for the end of a worker."""
        deadline = time.monotonic() + RECONCILE_SECONDS
        async with get_client() as client:
            while time.monotonic() < deadline:
                await asyncio.sleep(NOTICE_SECONDS)
                with suppress(httpx.HTTPError):  # The next pass tells that Prefect is away.
                    if await self._fleet.any_ended(client):
                        return

    async def keep_scaling(self) -> None:
        """Decide every `elastic.scale_interval` how many workers are wanted."""
        while True:
            await asyncio.sleep(self._run.config.elastic.scale_interval)
            before = self._remote.target
            decision = await self._run.in_order(self._scaling.decide)
            self._tell(decision)
            if self._remote.target != before:
                request_scale(self._run.key, self._run.storage, self._remote.target)

    async def end(self, wait: bool) -> None:
        """Tell the workers that the run has ended, `wait` for them, and cancel those that stay.

        A run that fails or is asked to end has no time to wait: its state is still to be saved. Those of a run with
        another owner by now are left to it.
        """
        await self._remote.close()
        try:
            with suppress(OSError):
                await asyncio.to_thread(self._run.require_owned)
        except SupersededError:
            return  # They are the next owner's.
        deadline = time.monotonic() + DRAIN_TIMEOUT
        try:
            while await self._fleet.open_workers() and wait and time.monotonic() < deadline:
                await asyncio.sleep(0.5)
            await self._fleet.cancel_all()
        except (httpx.HTTPError, OSError) as error:
            logger.warning("the rollout workers' flow runs could not be followed to their end: %s", error)

    async def _reconcile(self) -> FleetPlan | None:
        """One pass; None while Prefect or the storage is away, which is told once."""
        signs = {worker.beat.worker: _sign(worker) for worker in self._remote.registry.workers}
        try:
            plan = await self._fleet.reconcile(self._remote.target, signs)
        except ObjectNotFound as error:
            raise WorkersFailedError(
                f"the Prefect server knows no deployment {ROLLOUT_DEPLOYMENT}, of which rollout workers are made; run "
                "`python -m deployments.deploy` against it, or `gyre up` for a server on this machine"
            ) from error
        except (httpx.HTTPError, OSError) as error:
            if not self._away:
                logger.warning("the workers cannot be looked after, and are tried again: %r", error)
            self._away = True
            return None
        self._away = False
        # Prefect sees a process end sooner than its heartbeat is missed.
        self._remote.registry.report_gone(self._fleet.ended_workers)
        return plan

    async def _tell_given_up(self, plan: FleetPlan) -> None:
        """Log places that stay empty when there are more of them; raise when nobody is left nor will come."""
        if len(plan.given_up) > self._remote.given_up:
            slots = ", ".join(f"{slot:03d}" for slot in plan.given_up)
            words = await self._last_words(plan.given_up[-1])
            logger.error("the workers' places %s stay empty after repeated failures; the last end:\n%s", slots, words)
        self._remote.given_up = len(plan.given_up)
        if plan.given_up and not (plan.start or plan.waiting or self._fleet.any_open):
            raise WorkersFailedError(
                f"no rollout worker comes up: {len(plan.given_up)} places were given up after repeated failures; "
                f"the last worker's end:\n{await self._last_words(plan.given_up[0])}"
            )

    async def _last_words(self, slot: int) -> str:
        try:
            return await self._fleet.last_words(slot)
        except httpx.HTTPError as error:
            return f"unknown, as Prefect does not answer: {error!r}"

    def _tell(self, decision: Decision) -> None:
        line = decision_line(decision, self._run.step)
        self._remote.decisions.append(line)
        if decision.direction != "hold":
            logger.info("scaling at %s", line)
        if decision.learner_is_limit and not self._limit_told:
            logger.warning("the learner is the limit: %s", decision.reasons[-1])
            emit_event(
                LEARNER_IS_LIMIT,
                resource={"prefect.resource.id": f"gyre.run.{self._run.key}"},
                payload={"run": self._run.key, "reasons": list(decision.reasons)},
            )
        self._limit_told = decision.learner_is_limit


def _sign(worker: RegisteredWorker) -> Sign:
    phase = "ready" if worker.phase == "standby" else worker.phase
    return Sign(phase, worker.beat.came_up)
