"""The run that this process owns: its parts, its place in time, and how it is saved and restored."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from gyre_core.checkpoint.store import Checkpoint
from gyre_core.cluster.epochs import SupersededError, require_current
from gyre_core.cluster.waiting import Awaited, wait_for_work
from gyre_core.config import GyreConfig
from gyre_core.data.cursor import PromptCursor
from gyre_core.experience.pool import Pool
from gyre_core.experience.segments import drop_tombstones, segment_names
from gyre_core.learner.local import LocalLearner
from gyre_core.monitor.completions import write_completions
from gyre_core.monitor.health import Alarm, Alarms
from gyre_core.monitor.metrics import MetricsWriter
from gyre_core.monitor.timing import peak_memory_bytes, throughput_metrics
from gyre_core.policy.models import Policy
from gyre_core.rewards.outcomes import RewardError
from gyre_core.rollout.serving import Worker
from gyre_core.storage import OutOfSpaceError, Storage
from gyre_core.training.credit import Credit
from gyre_core.training.evaluation import Evaluation, Evaluator
from gyre_core.training.forecast import bytes_text
from gyre_core.training.publisher import Publisher
from gyre_core.training.recovery_report import Recovery
from gyre_core.training.remote import RemoteRollout
from gyre_core.training.run_folder import RunFolder
from gyre_core.training.saver import RANDOM, Saver
from gyre_core.training.space_guard import PauseExpiredError, SpaceGuard
from gyre_core.training.step import OpenStep, StepResult
from gyre_core.training.turns import Turns
from gyre_core.types import PolicyVersion, RolloutRequest
from gyre_core.weights.chain import VersionChain

logger = logging.getLogger(__name__)

T = TypeVar("T")


class NoSignalError(RuntimeError):
    """A step found no group to learn from, however many prompts it tried."""


FATAL_ERRORS = (RewardError, NoSignalError, SupersededError, PauseExpiredError)
"""Errors that a retry of the step cannot mend: the user's own code or data is at fault, the run has another owner, or
it has waited for space for long enough."""


class RunFailedError(RuntimeError):
    """A step failed for good; the run stopped with a checkpoint of the state before that step."""


class RunStoppedError(RuntimeError):
    """An alarm stopped the run, after a whole step and with a checkpoint."""


class TrainingRun:
    """Everything that the train process owns; `gyre_core.training.build.open_run` makes one.

    Tasks and flows name the run by its key and find it with `TrainingRun.of`. `step` is the last committed step
    (steps count from 1, 0 is the start) and `version` the policy version that it left.
    """

    _open: ClassVar[dict[str, TrainingRun]] = {}

    def __init__(
        self,
        *,
        config: GyreConfig,
        folder: RunFolder,
        storage: Storage,
        epoch: int,
        policy: Policy,
        learner: LocalLearner,
        worker: Worker,
        evaluator: Evaluator,
        credit: Credit,
        pool: Pool,
        cursor: PromptCursor,
        saver: Saver,
        metrics: MetricsWriter,
        version: PolicyVersion,
        fingerprint: Mapping[str, str],
        remote: RemoteRollout | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.key = folder.key
        self.storage = storage
        self.epoch = epoch
        self.policy = policy
        self.learner = learner
        self.worker = worker
        self.evaluator = evaluator
        self.credit = credit
        self.pool = pool
        self.cursor = cursor
        self.saver = saver
        self.metrics = metrics
        self.remote = remote
        """The run's rollout workers; None when generation is inline."""
        self.version = self.start_version = version
        """The present version, and what this process began from."""
        self.step = 0
        self.turns, self.reports = Turns(1), Turns(1)
        self.open_steps: dict[int, OpenStep] = {}
        self.results: dict[int, StepResult] = {}
        self.stragglers: dict[str, RolloutRequest] = {}
        """Requests of committed steps that were not answered in time, oldest first."""
        self.alarms = Alarms(config.health)
        self.evaluations: dict[int, Evaluation] = {}
        self.recovery = Recovery()
        """How this process came to go on from a checkpoint, if it did."""
        self.fingerprint = fingerprint
        """What the run learns with, told apart by digests; see `gyre_core.training.resume`."""
        self.fatal: Exception | None = None
        self.samples_seen = self.tokens_seen = 0
        self.tokens_consumed = 0
        """Completion tokens of the steps that this process committed."""
        self.fill_readings: list[float] = []
        """The fill whenever the learner became free, until the scaling law has read it."""
        self.scaling_state: dict[str, Any] = {}
        """What the scaling of workers goes on from; empty without."""
        self._waited = 0.0
        self._reported: float | None = None
        self.engine_free = asyncio.Lock()
        self._active_before = 0.0
        self._opened = time.monotonic()
        self._saved_step: int | None = None
        # One thread, also because torch keeps a pool of threads for each caller.
        self._owner_thread = ThreadPoolExecutor(1, thread_name_prefix="owner")
        saver.owned_by(self.require_owned)
        self.guard = SpaceGuard(self)
        self.publisher = Publisher(self)

    @classmethod
    def of(cls, key: str) -> TrainingRun:
        """The open run of this process with the key NAME/RUN_ID."""
        return cls._open[key]

    def register(self) -> None:
        """Make the run known to `of`."""
        self._open[self.key] = self

    @property
    def chain(self) -> VersionChain:
        """The run's published policy versions."""
        return self.worker.chain

    def now(self, step: int) -> float:
        """Seconds on the pool's clock at `step`."""
        if self.config.experience.clock == "steps":
            return step * self.config.experience.step_seconds
        return self.active_seconds()

    def active_seconds(self) -> float:
        """Seconds that the run was open, over all its processes."""
        return self._active_before + time.monotonic() - self._opened

    def version_for(self, step: int) -> PolicyVersion:
        """What `step` generates with: the version that the step `1 + max_lag` before it left.

        With steps that overlap there may be a newer one by now, but that depends on who was faster, and a run would
        not repeat. Called from any thread, so it only looks steps up, as others may be committed meanwhile.
        """
        for earlier in range(step - 1 - self.config.rollout.max_lag, 0, -1):
            if earlier in self.results:
                return self.results[earlier].version
        return self.start_version

    def arrived(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Those of the open requests that have a segment; inline a step goes on when all of its have."""
        return tuple(request_ids) if self.remote is None else tuple(self.remote.dispatcher.answered(request_ids))

    def samples_ready(self, step: int) -> int:
        """Samples that were never trained on and that steps after `step` find: in the pool or in segments."""
        waiting = 0
        for opened in list(self.open_steps.values()):  # Others may be opened meanwhile.
            if opened.step > step:
                groups = {request.request_id: len(request.groups) for request in opened.requests}
                names = opened.committed if self.remote is None else self.arrived(groups)
                waiting += sum(groups.get(name, 0) for name in names)
        return self.pool.fresh_samples + waiting * self.config.rollout.samples_per_prompt

    def fill(self, step: int) -> float | None:
        """Fresh samples ready for the steps after `step`, of those that generation may be ahead; None where it may not
        be."""
        rollout = self.config.rollout
        ahead = rollout.max_lag * rollout.batch_size * rollout.samples_per_prompt
        return self.samples_ready(step) / ahead if ahead else None

    def learner_waited(self) -> float:
        """Seconds that the learner was free and had no samples, the present wait included."""
        opened = self.open_steps.get(self.turns.current)
        waiting = opened is not None and not opened.produced
        return self._waited + (self.turns.seconds_free() if waiting else 0.0)

    def note_produced(self, opened: OpenStep) -> None:
        """Count how long the learner waited for the samples of a step, now that they are there."""
        if self.turns.current == opened.step and not opened.produced:
            opened.waited = self.turns.seconds_free()
            self._waited += opened.waited
        opened.produced = True
        self.recovery.reached("first_sample")

    @property
    def next_version(self) -> PolicyVersion:
        """What the step in training will publish, once it is committed: so no number is used for two policies."""
        return PolicyVersion(self.epoch, self.version.number + 1)

    async def in_order(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run work on learner, pool or checkpoints in the one thread for it, after what is already there.

        So whoever goes back to an earlier state comes after the work of a step that was cancelled.
        """
        # With the caller's context, by which Prefect knows whose log lines they are.
        work = partial(contextvars.copy_context().run, function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._owner_thread, work)

    @contextmanager
    def recording_fatal_errors(self) -> Generator[None]:
        """Remember an error that no retry can mend, and raise it again at once when a retry comes."""
        if self.fatal is not None:
            raise self.fatal
        try:
            yield
        except FATAL_ERRORS as error:
            self.fatal = error
            raise
        except Exception as error:
            # Who was superseded misses what the new owner has cleared away, before it looks who owns the run.
            try:
                with suppress(OSError):
                    self.require_owned()
            except SupersededError as superseded:
                self.fatal = superseded
                raise superseded from error
            raise

    def require_owned(self) -> None:
        """Raise SupersededError when another process has taken over the run."""
        require_current(self.storage, self.epoch)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the policy as `step` left it and log the result; asked again, returns the same.

        Raises WaitExpiredError after `rollout.timeout`.
        """
        if step not in self.evaluations:
            started = time.perf_counter()
            await self.publisher.settled()
            version = self.results[step].version if step in self.results else self.version
            self.evaluations[step] = await wait_for_work(
                f"the evaluation after step {step} (rollout.timeout)",
                self._evaluate(version, step),
                whom=lambda: [Awaited("the engine of this process")],
                deadline=self.config.rollout.timeout,
            )
            await asyncio.to_thread(self.metrics.write, step, self.evaluations[step].metrics(), time.time())
            self.saver.note_evaluation(step, self.evaluations[step].reward)
            if self.config.rollout.max_lag == 0:  # Else steps went on meanwhile.
                self.leave_out(time.perf_counter() - started)
        return self.evaluations[step].metrics()

    async def _evaluate(self, version: PolicyVersion, step: int) -> Evaluation:
        async with self.engine_free:
            return await self.evaluator.evaluate(version, step)

    async def finish(self, step: int) -> None:
        """Log a committed step and, when one is due, write a checkpoint; tried again, does what is missing.

        In this order, so that whoever resumes from the checkpoint finds the step in the log. Raises SupersededError
        for a run that another process has taken over, whose log it is now.
        """
        await asyncio.to_thread(self.require_owned)
        await self.guard.relieve(step)
        self.report(step)
        if self.saver.due or self.guard.wants_checkpoint:
            started = time.perf_counter()
            failed = not await self._save_if_it_fits(step)
            seconds = time.perf_counter() - started
            failure = {"perf/checkpoint_failed": 1.0} if failed else {}
            metrics = {"time/checkpoint": seconds, **failure}
            await asyncio.to_thread(self.metrics.write, step, metrics, time.time())
            self.leave_out(seconds)

    async def _save_if_it_fits(self, step: int) -> bool:
        """Write a checkpoint; False for no space, which is no reason to stop, as nothing is lost yet."""
        try:
            await self.save()
        except OutOfSpaceError as error:
            size = bytes_text(self.guard.checkpoint_bytes)
            logger.warning("no checkpoint after step %d, for want of %s, and earlier ones stand: %s", step, size, error)
            return False
        return True

    def report(self, step: int) -> None:
        """Log a committed step, with its time up to now, and the alarms that it raises; once."""
        result = self.results[step]
        if result.reported:
            return
        seconds = result.timer.metrics(self._reported)
        if self.remote is not None:  # What the workers took is no orchestration.
            seconds["time/orchestration"] = max(0.0, seconds["time/orchestration"] - result.waited)
        ended = time.perf_counter()
        metrics = {
            **result.metrics,
            **seconds,
            "time/wait_for_batch": result.waited,
            **throughput_metrics(result.samples, result.completion_tokens, seconds),
            "perf/peak_memory_bytes": float(peak_memory_bytes()),
            "perf/storage_repeated": float(sum(self.storage.repeated().values())),
            **self.saver.metrics(),
            **self.recovery.metrics(),
            **self.guard.metrics(),
        }
        for alarm in self.alarms.observe(step, metrics):
            logger.warning("alarm %s at step %d: %s; %s", alarm.name, alarm.step, alarm.sentence, alarm.remedy)
        metrics["health/alarms"] = float(len(self.alarms.raised))
        self.metrics.write(step, metrics, time.time())
        count = self.config.monitor.completions_per_step
        write_completions(self.folder.path, step, result.generated, result.advantages, count)
        self.recovery.told()
        self.results[step] = replace(result, metrics=metrics, generated=(), advantages={}, reported=True)
        self._reported = ended

    def leave_out(self, seconds: float) -> None:
        """Keep what just took `seconds` out of the next step's time."""
        if self._reported is not None:
            self._reported += seconds

    def alarms_at(self, step: int) -> list[Alarm]:
        """The alarms that `step` raised and that have not cleared."""
        return [alarm for alarm in self.alarms.raised if alarm.step == step]

    async def abandon(self, step: int) -> None:
        """Bring learner and pool back to the state before a step that was not committed."""
        opened = self.open_steps.pop(step, None)
        if opened is not None:
            if self.remote is not None:
                self.remote.dispatcher.forget(request.request_id for request in opened.requests)
            await self.in_order(self._go_back, opened)

    def _go_back(self, opened: OpenStep) -> None:
        if opened.pool_before is not None:
            table = opened.pool_before.to_table()
            self.pool = Pool.restore(
                self.storage, self.config.experience, self.epoch, table, self.credit.smallest_group
            )
            self.credit.load_state(opened.credit_before)
        if opened.updating:
            self.learner.restore()

    def skip(self, step: int) -> None:
        """Count a step as passed that failed for good and was abandoned; it leaves nothing but the time it took."""
        self.step = max(self.step, step)

    async def save(self, quick: bool = False) -> None:
        """Write a checkpoint of the state after the last committed step, unless this process wrote it before.

        `quick` is for who has little time: an increment, whenever there is a full checkpoint to build on.
        """
        if self.step == self._saved_step:
            return
        await asyncio.to_thread(self.require_owned)
        await asyncio.to_thread(self.metrics.sync)
        await self.in_order(self.save_now, quick)

    def save_now(self, quick: bool = False) -> None:
        """Write a checkpoint of the present state, in the thread of the caller, which no other work may overlap."""
        tensors, counters = self.learner.state()
        pool = self.pool.snapshot(self.step).to_table()
        replayed = self.saver.replayed_requests(self.step, quick)
        requests = dict.fromkeys((*self.pool.held_requests(), *(replayed or ())))
        checkpoint = Checkpoint(
            step=self.step,
            epoch=self.epoch,
            tensors={RANDOM: torch.get_rng_state()},
            tables={"pool": pool},
            state={
                "version": {"epoch": self.version.epoch, "number": self.version.number},
                "credit": self.credit.state(),
                "alarms": self.alarms.state(),
                "active_seconds": self.active_seconds(),
                "samples_seen": self.samples_seen,
                "tokens_seen": self.tokens_seen,
                "stragglers": list(self.stragglers),
                "scaling": self.scaling_state,
                "fingerprint": dict(self.fingerprint),
            },
            segments=tuple(segment_names(self.storage, requests)),
        )
        self.guard.note_checkpoint(self.saver.save(checkpoint, tensors, counters, full=replayed is None).size)
        self._saved_step = self.step
        self.release_segments()

    def release_segments(self) -> None:
        """Let the segments go that only older checkpoints need; those that do not go for want of space go later."""
        if (step := self.saver.store.exact_from) is not None:
            try:
                self.pool.pin_from(step)
            except OutOfSpaceError as error:  # Each deletion is noted down first.
                logger.warning("not all that could go was deleted: %s", error)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint, exactly, but for the learner; the version is of this epoch, yet to be published."""
        state = checkpoint.state
        torch.set_rng_state(checkpoint.tensors[RANDOM])
        self.credit.load_state(state["credit"])
        self.alarms.load_state(state["alarms"])
        table, smallest = checkpoint.tables["pool"], self.credit.smallest_group
        self.pool = Pool.restore(self.storage, self.config.experience, self.epoch, table, smallest)
        drop_tombstones(self.storage, self.pool.admitted)
        self._active_before = state["active_seconds"]
        self.samples_seen, self.tokens_seen = state["samples_seen"], state["tokens_seen"]
        self.scaling_state = state["scaling"]
        self.step = checkpoint.step
        self.version = self.start_version = PolicyVersion(self.epoch, state["version"]["number"])
        self.turns, self.reports = Turns(self.step + 1), Turns(self.step + 1)

    async def close(self) -> None:
        """End the parts and give up the run; the state on storage stays."""
        self._open.pop(self.key, None)
        if self.remote is not None:
            await self.remote.close()
        await self.worker.close()
        await asyncio.to_thread(self.publisher.close)
        self._owner_thread.shutdown(wait=True)
        await asyncio.to_thread(self.saver.close)
        self.metrics.close()
        self.folder.release()
