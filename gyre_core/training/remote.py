"""Generation by rollout workers, as the train process sees it: its sign of life, its queue, its workers' figures."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from gyre_core.cluster.epochs import require_current
from gyre_core.cluster.fleet import Target, write_target
from gyre_core.cluster.heartbeat import OwnerBeat, WorkerBeat, owner_heart
from gyre_core.cluster.registry import Registry
from gyre_core.config.sections import RolloutConfig
from gyre_core.rollout.dispatch import Dispatcher
from gyre_core.storage import LocalStorage, Storage

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Pause between two looks at the queue; each is a dozen listings, and so one on S3 is a second."""
LOOK_SECONDS_REMOTE = 1.0
LOOKS_PER_VIEW = 8
"""The owner's view is published this often, counted in looks."""
VIEW = "learner/workers.json"


@dataclass(slots=True)
class WorkTotals:
    """What the workers did, summed over all that ever lived; seconds are those of workers."""

    tokens: int = 0
    busy_seconds: float = 0.0
    ready_seconds: float = 0.0

    def since(self, earlier: WorkTotals) -> WorkTotals:
        """What was added since `earlier`."""
        return WorkTotals(
            self.tokens - earlier.tokens,
            self.busy_seconds - earlier.busy_seconds,
            self.ready_seconds - earlier.ready_seconds,
        )

    @property
    def idle_share(self) -> float | None:
        """Share of their time in which the workers had nothing to generate; None when there was no time."""
        return max(0.0, 1.0 - self.busy_seconds / self.ready_seconds) if self.ready_seconds > 0.0 else None


class RemoteRollout:
    """The owner's heartbeat, dispatcher and registry, kept going by a thread and a task until `close`."""

    def __init__(self, storage: Storage, config: RolloutConfig, epoch: int, step: Callable[[], int]) -> None:
        """`step` gives the last committed step."""
        self.registry = Registry(storage, config.heartbeat_timeout, config.start_timeout)
        self.dispatcher = Dispatcher(
            storage,
            self.registry,
            timeout=config.heartbeat_timeout,
            attempts=config.attempts,
            require_owned=partial(require_current, storage, epoch),
        )
        self.totals = WorkTotals()
        self.target = Target(config.worker_count, config.standby)
        """How many workers the run wants; set it, and the next look publishes it."""
        self.most_queued = 0
        """The most requests that nobody had claimed, since the scaling law last asked."""
        self.given_up = 0
        """Workers that are wanted and not started any more, as their starts failed again and again."""
        self.decisions: list[str] = []
        """What was decided about the number of workers, and why; newest last."""
        self._storage = storage
        self._epoch = epoch
        pause = LOOK_SECONDS if isinstance(storage, LocalStorage) else LOOK_SECONDS_REMOTE
        # Often enough that the registry never takes its own pauses for an outage.
        self._pause = min(pause, config.heartbeat_timeout / 6)
        self._published: Target | None = None
        self._counted: dict[str, WorkerBeat] = {}
        self._reported = WorkTotals()
        self.scoring_totals: defaultdict[str, float] = defaultdict(float)
        """What went wrong at the workers' scoring, by metric name."""
        self._scoring_reported: dict[str, float] = {}
        self._ended = False
        self._heart = owner_heart(storage, config.heartbeat_timeout, lambda: OwnerBeat(epoch, step(), self._ended))
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Give the first sign of life and begin to look after the queue; called in the event loop of the run."""
        self._heart.start()
        self._task = asyncio.create_task(self._keep_looking(), name="dispatcher")

    async def close(self) -> None:
        """Tell the workers that the run has ended, and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])  # An error of it is `raise_error`'s to tell.
            self._ended = True
            await asyncio.to_thread(self._heart.stop)

    def raise_error(self) -> None:
        """Raise what ended the look after the queue, if anything did: without it no request is ever answered."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    def metrics(self) -> dict[str, float]:
        """The workers at this moment, and what they did since the last call, under `rollout/`."""
        done, self._reported = self.totals.since(self._reported), replace(self.totals)
        metrics: dict[str, float] = {
            "workers": self.registry.count(("ready",)),
            "workers_starting": self.registry.count(("starting",)),
            "standby": self.registry.count(("standby",)),
            "wanted": self.target.workers,
            "open_requests": len(self.dispatcher.open),
            "reissued": self.dispatcher.reissued,
        }
        if done.idle_share is not None:
            metrics["idle_share"] = done.idle_share
        return {f"rollout/{name}": float(value) for name, value in metrics.items()}

    def scoring_metrics(self) -> dict[str, float]:
        """What `scoring_totals` have grown by since the last call."""
        totals, before = dict(self.scoring_totals), self._scoring_reported
        self._scoring_reported = totals
        return {name: total - before.get(name, 0.0) for name, total in totals.items()}

    def look(self) -> None:
        """Publish a target that is new, and look at the queue and the workers once.

        Raises SupersededError when another process has taken over the run.
        """
        require_current(self._storage, self._epoch)
        if self.target != self._published:
            target = self.target
            write_target(self._storage, target)
            self._published = target
        self.dispatcher.tick()
        self.most_queued = max(self.most_queued, self.dispatcher.queued)
        for worker in self.registry.workers:
            self._count(worker.beat)

    async def _keep_looking(self) -> None:
        looks, failing = 0, False
        while True:
            try:
                await asyncio.to_thread(self.look)
                if looks % LOOKS_PER_VIEW == 0:
                    await asyncio.to_thread(self._storage.replace, VIEW, json.dumps(self.view()).encode())
                failing = False
            except OSError as error:
                if not failing:
                    logger.warning("the queue cannot be read, and is tried again: %s", error)
                failing = True
            looks += 1
            await asyncio.sleep(self._pause)

    def _count(self, beat: WorkerBeat) -> None:
        """Add what a worker did since its last heartbeat that was counted.

        What it did before the first one was for an earlier owner, or while it started, nothing.
        """
        last = self._counted.get(beat.token, beat)
        self.totals.tokens += beat.tokens - last.tokens
        self.totals.busy_seconds += beat.busy_seconds - last.busy_seconds
        self.totals.ready_seconds += beat.ready_seconds - last.ready_seconds
        for name, total in beat.scoring.items():
            self.scoring_totals[name] += total - last.scoring.get(name, 0.0)
        self._counted[beat.token] = beat

    def view(self) -> dict[str, Any]:
        """The workers, the queue and the latest decisions, as JSON values."""
        return {
            "wanted": self.target.workers,
            "workers": [
                {**asdict(worker.beat), "phase": worker.phase, "silent_seconds": worker.silent_seconds}
                for worker in self.registry.workers
            ],
            "open_requests": len(self.dispatcher.open),
            "queued_requests": self.dispatcher.queued,
            "reissued": self.dispatcher.reissued,
            "decisions": self.decisions[-10:],
        }


def read_view(storage: Storage) -> Mapping[str, Any] | None:
    """The owner's view of its workers as it was published last; None for a run without workers."""
    try:
        return json.loads(storage.read(VIEW))
    except FileNotFoundError:
        return None


def workers_table(view: Mapping[str, Any]) -> list[dict[str, str]]:
    """The workers of a view for people, one row each."""
    return [
        {
            "worker": worker["worker"],
            "state": worker["phase"],
            "policy version": worker["version"],
            "tokens/s": f"{worker['tokens'] / worker['busy_seconds']:,.0f}" if worker["busy_seconds"] else "",
            "requests": ", ".join(worker["in_flight"]),
            "served": str(worker["served"]),
            "failures": str(worker["failures"]),
            "last heartbeat": f"{worker['silent_seconds']:.0f} s ago",
            "start": ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in worker["start"].items()),
            "where": f"{worker['host']}, process {worker['pid']}",
            "last error": worker["last_error"],
        }
        for worker in view["workers"]
    ]
