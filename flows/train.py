"""A whole training run as one flow: steps that overlap by at most `max_lag`, evaluations, an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Generator
from contextlib import contextmanager
from uuid import UUID

import httpx
import prefect.runtime.flow_run
from prefect import flow, tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from blocks.storage import load_access
from flows.artifacts import RunArtifacts
from flows.closing import close_steps
from flows.evaluate import evaluate
from flows.forms import FormConfig
from flows.outage import outlasting
from flows.rl_step import rl_step
from flows.scoring import function_runner
from flows.termination import cancelled_by_sigterm, to_the_end
from flows.workers import rollout_workers
from gyre_core.cluster.epochs import SupersededError
from gyre_core.config.runnable import refuse_unbuilt
from gyre_core.monitor.progress import ProgressDisplay
from gyre_core.storage import OutOfSpaceError
from gyre_core.training.build import open_run
from gyre_core.training.ending import Status, export_policy, write_run_summary
from gyre_core.training.resume import Origin
from gyre_core.training.run import RunFailedError, RunStoppedError, TrainingRun

logger = logging.getLogger(__name__)


def _flow_run_name() -> str:
    return f"train-{prefect.runtime.flow_run.parameters['config'].experiment.name}"


@flow(flow_run_name=_flow_run_name, persist_result=False)
async def train(
    config: FormConfig,
    run_id: str | None = None,
    resume: bool = False,
    resume_step: int | None = None,
    resume_from: str | None = None,
) -> str | State[None]:
    """Train a policy as configured; returns the run's key, NAME/RUN_ID.

    `run_id` names the run beside its experiment (default: made from the time); `resume` goes on from the newest
    checkpoint of that run (default: the newest of the name), `resume_step` from the one after that step;
    `resume_from` begins a new run from a checkpoint of another one. A run that is interrupted, stopped by an alarm, or
    fails in a step for good leaves a checkpoint to resume from; the last two raise.
    """
    refuse_unbuilt(config)
    await load_access(config.storage.block)
    origin = Origin(resume, resume_step, resume_from)
    run = await open_run(config, run_id=run_id, origin=origin, runner=function_runner(config))
    try:
        names = {config.experiment.name, run.key, *config.experiment.tags}
        await _tag_this_run(names)
        with tags(*names), cancelled_by_sigterm():
            return await _Training(run).train()
    finally:
        await run.close()


async def _tag_this_run(names: set[str]) -> None:
    """Have this flow run found by the run's names, as all that it starts is."""
    async with get_client() as client:
        await client.update_flow_run(prefect.runtime.flow_run.id, tags=names | {*prefect.runtime.flow_run.tags})


class _Training:
    """The course of one run, from the evaluation before its first step to the export after its last."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._total = run.config.experiment.steps
        self._artifacts = RunArtifacts(run)
        self._step = rl_step.with_options(retries=run.config.experiment.step_retries)
        self._places = asyncio.Semaphore(1 + run.config.rollout.max_lag)
        self._progress = ProgressDisplay(self._total, run.step)
        self._interrupted = False
        self._stopped_by: str | None = None

    async def train(self) -> str | State[None]:
        """Take the steps, as far as they go, and leave the run complete or resumable."""
        run = self._run
        try:
            await self._summarise("running")
            with self._progress, self._finishing_on_interrupt():
                async with rollout_workers(run):
                    if run.step == 0 or self._is_to_evaluate(run.step):
                        await self._evaluate(run.step)
                    await self._take_steps()
            await run.publisher.settled()
            await run.save()
            if run.step < self._total:
                return await self._end_early()
            await self._evaluate(run.step)
            await export_policy(run)
            await to_the_end(asyncio.to_thread(write_run_summary, run, "completed"))
            await self._show()
        except RunStoppedError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever ends the run, its state is kept first
            cause = _first_cause(error)
            await to_the_end(self._keep_what_is_done(cause))
            await to_the_end(close_steps(UUID(prefect.runtime.flow_run.id)))
            if isinstance(cause, Exception):
                raise RunFailedError(f"after step {run.step}: {type(cause).__name__}: {cause}") from cause
            raise cause from None
        return run.key

    async def _take_steps(self) -> None:
        async with asyncio.TaskGroup() as open_steps:
            for step in range(self._run.step + 1, self._total + 1):
                await self._places.acquire()
                if self._interrupted or self._stopped_by:
                    break
                open_steps.create_task(self._take_step(step), name=f"step-{step:06d}")

    async def _take_step(self, step: int) -> None:
        """One step with its retries, and what follows it; the steps behind it go on in any case but a raised one."""
        run = self._run
        try:
            # Done before, it answers at once.
            await outlasting(lambda: self._step(run.key, step))
        except Exception as error:
            await run.abandon(step)
            stop = run.config.experiment.on_step_failure == "stop"
            # A full disk, or a server that stays away, fails the next step too.
            if stop or run.fatal is not None or isinstance(error, OutOfSpaceError | httpx.TransportError):
                raise
            logger.error("step %d failed for good and is skipped: %s", step, error)
            # The steps before it are counted first.
            await run.turns.wait(step)
            run.skip(step)
        await run.turns.release(step)
        await run.reports.wait(step)
        await self._follow_up(step)
        await run.reports.release(step)
        self._places.release()

    async def _follow_up(self, step: int) -> None:
        run = self._run
        config = run.config
        if step in run.results:
            alarms = run.alarms_at(step)
            self._progress.update(step, run.results[step].metrics)
            if alarms and config.health.action == "stop":
                self._stopped_by = f"alarm {alarms[0].name} at step {step}: {alarms[0].sentence}"
        if self._is_to_evaluate(step):
            await self._evaluate(step)
        if step % config.monitor.artifact_every == 0:
            await self._summarise("running")
            await self._show()

    def _is_to_evaluate(self, step: int) -> bool:
        every = self._run.config.evaluation.every
        return every > 0 and step % every == 0 and step < self._total

    async def _evaluate(self, step: int) -> None:
        """Evaluate in a flow of its own; one that fails is logged in a line and leaves the training alone."""
        if not self._run.evaluator.prompts:
            return
        try:
            await outlasting(lambda: evaluate(self._run.key, step))
        except Exception as error:  # noqa: BLE001 - Prefect has the traceback of its flow
            cause = f"{type(error).__name__}: {error}"
            logger.error("the evaluation after step %d failed; training goes on: %s", step, cause.partition("\n")[0])

    async def _show(self) -> None:
        """Renew the artifacts; ones that cannot be renewed are logged and leave the training alone."""
        try:
            await self._artifacts.update()
        except Exception:
            logger.exception("the artifacts in Prefect could not be renewed; training goes on")

    async def _summarise(self, status: Status, error: BaseException | None = None) -> None:
        """Write `summary.json`; where that fails the old one stays, as nothing depends on it."""
        try:
            # An earlier one must not come behind a later one.
            await to_the_end(asyncio.to_thread(write_run_summary, self._run, status, error))
        except Exception as failure:  # noqa: BLE001 - a bad line in the metrics, no space, no folder
            cause = f"{type(failure).__name__}: {failure}"
            logger.warning("summary.json does not say that the run is %s: %s", status, cause)

    async def _end_early(self) -> State[None]:
        if self._stopped_by is not None:
            error = RunStoppedError(f"{self._stopped_by}; go on with --resume")
            await self._summarise("stopped", error)
            raise error
        await self._summarise("interrupted")
        return Cancelled(message=f"interrupted after step {self._run.step}; go on with --resume")

    async def _keep_what_is_done(self, error: BaseException) -> None:
        """Go back to the state after the last committed step, save it, and say what ended the run.

        A run that is another's is left alone.
        """
        run = self._run
        if isinstance(error, SupersededError):
            return
        try:
            for step in list(run.open_steps):
                await run.abandon(step)
            await run.save(quick=True)
        except SupersededError as superseded:
            logger.warning("the state after step %d is not saved: %s", run.step, superseded)
            return
        except OutOfSpaceError as full:
            logger.warning(
                "the state after step %d is not saved, so a resume repeats the steps since the last checkpoint: %s",
                run.step,
                full,
            )
        except Exception:
            # What ended the run matters more than that its last steps could not be kept; both are told.
            logger.exception("the state after step %d could not be saved; an earlier checkpoint stands", run.step)
        await self._summarise("failed" if isinstance(error, Exception) else "interrupted", error)

    @contextmanager
    def _finishing_on_interrupt(self) -> Generator[None]:
        """Make the first interrupt (Ctrl-C) end the run after its open steps; a second one ends it at once."""
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            self._interrupted = True
            loop.remove_signal_handler(signal.SIGINT)
            self._progress.print("interrupted: finishing the open steps, then saving; Ctrl-C again ends at once")

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)


def _first_cause(error: BaseException) -> BaseException:
    """The first error of a group of tasks that failed together, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
