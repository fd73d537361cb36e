"""Reward functions on a Ray cluster: the rows of a request become tasks of Prefect's RayTaskRunner."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import httpx
import ray
from prefect import Task, flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options
from prefect_ray.task_runners import PrefectRayFuture
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayTaskError, WorkerCrashedError

from flows.ray_cluster import RayCluster
from gyre_core.config.sections import RewardConfig
from gyre_core.rewards.calls import CallResult, FunctionCall, calls_to_json, joined, results_from_json
from gyre_core.rewards.loader import Signature
from gyre_core.rewards.process import START_SECONDS
from gyre_core.rewards.runner import FunctionSet
from tasks.score_rows import load_functions, score_rows

logger = logging.getLogger(__name__)

LOST = (WorkerCrashedError, OutOfMemoryError, NodeDiedError, ObjectLostError)
"""Ends of a Ray task by no fault of what it ran."""
API_AWAY = "Failed to reach API"
"""What Prefect says in a process of Ray that cannot reach the server."""
API_SECONDS = 600.0
"""Seconds for which rows wait while Ray's processes cannot reach the Prefect server."""
LOOK_SECONDS = 1.0
"""Pause between two looks at the cluster while a task is awaited."""


class ShortageError(RuntimeError):
    """No node of the Ray cluster is large enough for a task, and none came in time."""


@flow(name="score-rows", persist_result=False)
def _stand_in() -> None:
    """Stands for the flow whose rows are scored, in whose place Ray's processes would import all that it imports."""


class RayRunner:
    """Runs the reward functions on a Ray cluster, a request's rows shared out between `reward.ray.tasks` Ray tasks.

    Each Ray task runs all functions on its rows in a process beside it, with the deadlines and retries of local ones.
    Ray retries nothing by itself. Rows whose Ray task was lost, as its process or node died, are given to another one
    up to `reward.retries` times.
    """

    def __init__(self, config: RewardConfig, base_folder: Path) -> None:
        self._config = config
        self._functions = FunctionSet.of(config, base_folder)
        self._cluster = RayCluster(config.ray)
        self._tasks = RayTaskRunner[Any](address=config.ray.address)
        self._connection = ExitStack()

    async def start(self) -> Mapping[str, Signature]:
        """Connect, and load the functions on the cluster.

        Raises ValueError for a function that cannot be loaded there, and for a cluster that does not answer or has no
        node for a task within `reward.ray.timeout`.
        """
        if not self._functions.functions:
            return {}
        await self._cluster.connect()
        self._connection.callback(self._cluster.close)
        self._connection.enter_context(self._tasks)
        seconds = self._config.ray.timeout + START_SECONDS
        try:
            async with asyncio.timeout(seconds):
                text = await self._run(load_functions, functions=self._functions.to_json())
        except TimeoutError:
            raise ValueError(
                f"reward.ray: the cluster did not load the reward functions within {seconds:g} s, although it has a "
                "node that is large enough for a task; it may have no room, or an import hangs"
            ) from None
        except ShortageError as error:
            raise ValueError(str(error)) from None
        except RayTaskError as error:
            raise ValueError(f"reward.ray: the cluster cannot load the reward functions: {error.cause}") from error
        return {name: Signature(**fields) for name, fields in json.loads(text).items()}

    async def run(self, calls: Sequence[FunctionCall]) -> list[CallResult]:
        """The calls' results; raises ShortageError when the cluster has lost the nodes for a task for too long."""
        parts = list(zip(*(call.split(self._config.ray.tasks) for call in calls), strict=True))
        running = [asyncio.create_task(self._run_part(part)) for part in parts]
        try:
            results = await asyncio.gather(*running)
        finally:
            for part in running:
                part.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return [joined(of_call) for of_call in zip(*results, strict=True)]

    def close(self) -> None:
        """Disconnect, and end the cluster if it was this process's own; calls under way raise RewardError."""
        self._connection.close()

    async def _run_part(self, calls: Sequence[FunctionCall]) -> list[CallResult]:
        """The results of calls on one part of the rows, given to another process when theirs dies."""
        config = self._config
        arguments = {
            "functions": self._functions.to_json(),
            "calls": calls_to_json(calls),
            "timeout": config.timeout,
            "retries": config.retries,
        }
        losses = 0
        while True:
            try:
                results = results_from_json(await self._score(arguments))
            except LOST as error:
                if losses < config.retries:
                    losses += 1
                    continue
                results = [_lost(call, error) for call in calls]
            for call, result in zip(calls, results, strict=True):
                result.counts.retried += losses * call.rows
            return results

    async def _score(self, arguments: Mapping[str, Any]) -> str:
        """What `score_rows` returns; while Ray's processes cannot reach the Prefect server, the rows wait for it."""
        deadline = time.monotonic() + API_SECONDS
        while True:
            try:
                return await self._run(score_rows, **arguments)
            except RayTaskError as error:
                if API_AWAY not in str(error.cause) or time.monotonic() > deadline:
                    raise
                logger.warning("the Prefect server is away from Ray (%s); trying again", error.cause)
            await asyncio.sleep(1.0)

    async def _run(self, task: Task[..., str], **arguments: Any) -> str:
        """What a task returns that runs on the cluster; cancelled, it is ended there."""
        future = await self._submitted(task, arguments)
        reference = future.wrapped_future
        done: asyncio.Future[State[Any]] = asyncio.wrap_future(reference.future())
        done.add_done_callback(_note_error)
        try:
            await self._wait(done)
            state = done.result()
        except LOST as error:
            await _tell_lost(future.task_run_id, error)
            raise
        finally:
            _end(reference, done)
        return await state.aresult()

    async def _submitted(self, task: Task[..., str], arguments: dict[str, Any]) -> PrefectRayFuture[Any]:
        """A task on its way; one that is cancelled meanwhile is ended when it is there."""
        submission = asyncio.ensure_future(asyncio.to_thread(self._submit, task, arguments))
        try:
            return await asyncio.shield(submission)
        except asyncio.CancelledError:
            submission.add_done_callback(_end_submitted)
            raise

    def _submit(self, task: Task[..., str], arguments: dict[str, Any]) -> PrefectRayFuture[Any]:
        """Submit a task below the present flow run; called in a thread, whose context is a copy."""
        config = self._config.ray
        cast(Any, TaskRunContext.__var__).set(None)  # See `_stand_in`; it would travel along, too.
        flow_run = FlowRunContext.get()
        below = flow_run.model_copy(update={"flow": _stand_in, "parameters": {}}) if flow_run else nullcontext()
        with below, remote_options(num_cpus=config.num_cpus, num_gpus=config.num_gpus, max_retries=0):
            return self._tasks.submit(task, arguments)

    async def _wait(self, done: asyncio.Future[Any]) -> None:
        """Wait until a Ray task has ended, and at most `reward.ray.timeout` for a node that could run it."""
        timeout = self._config.ray.timeout
        sufficed = time.monotonic()
        while not (await asyncio.wait([done], timeout=LOOK_SECONDS))[0]:
            self._cluster.check_open()
            shortage = await asyncio.to_thread(self._cluster.shortage)
            if not shortage:
                sufficed = time.monotonic()
            elif time.monotonic() - sufficed > timeout:
                raise ShortageError(
                    f"reward.ray: {shortage}; lower num_cpus or num_gpus, or add a node (waited {timeout:g} s for one, "
                    "reward.ray.timeout)"
                )


def _lost(call: FunctionCall, error: Exception) -> CallResult:
    """The result of a call whose Ray tasks were lost, the last of them by `error`."""
    reason = f"the Ray task that called it was lost: {type(error).__name__}: {error}"
    result = CallResult([reason] * call.rows)
    result.counts.add_outcomes(result.outcomes)
    return result


async def _tell_lost(task_run: UUID, error: Exception) -> None:
    """Set a task run to Crashed, whose own process can no longer say so."""
    state = Crashed(message=f"its Ray task was lost: {type(error).__name__}")
    try:
        async with get_client() as client:
            await client.set_task_run_state(task_run, state, force=True)
    except ObjectNotFound:  # Its process died before it could tell that it began.
        return
    except httpx.HTTPError as failure:  # It matters to those who look at the run, and to no row.
        logger.warning("the task run %s cannot be set to Crashed: %s", task_run, failure)


def _note_error(done: asyncio.Future[Any]) -> None:
    """Look at how a Ray task ended that nobody waits for any more, or asyncio calls it forgotten."""
    if not done.cancelled():
        done.exception()


def _end(reference: ray.ObjectRef[Any], done: asyncio.Future[Any]) -> None:
    """End a Ray task unless it has ended."""
    if not done.done() and ray.is_initialized():
        ray.cancel(reference, force=True)


def _end_submitted(submission: asyncio.Future[PrefectRayFuture[Any]]) -> None:
    if not submission.cancelled() and submission.exception() is None and ray.is_initialized():
        ray.cancel(submission.result().wrapped_future, force=True)
