"""Keeps a run's storages from filling up, by the law of `space_law`: looks at them, makes room, holds steps back."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Never

from gyre_core.cluster.waiting import Awaited, WaitExpiredError, wait
from gyre_core.config import GyreConfig
from gyre_core.policy.models import PolicySummary
from gyre_core.storage import LocalStorage, OutOfSpaceError, Storage, open_storage
from gyre_core.training.forecast import (
    FEWEST_VERSIONS_KEPT,
    VERSIONS_KEPT,
    bytes_text,
    disk_forecast,
    least_disk_forecast,
)
from gyre_core.training.run_folder import checkpoint_storage, data_storage, warm_storage
from gyre_core.training.space_law import Level, Need, bytes_to_leave, judge, samples_to_keep

if TYPE_CHECKING:
    from gyre_core.training.run import TrainingRun

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Pause between two looks at the free bytes while a run is paused."""
_SPARED = "older checkpoints, spare policy versions and the oldest samples go"
_MEASURES = {
    Level.EXPIRE: _SPARED,
    Level.SLOW: f"{_SPARED}, and no step begins before the one in training has ended",
    Level.PAUSE: f"{_SPARED}, and no step begins until there is space",
}


class PauseExpiredError(OutOfSpaceError):
    """A run was paused for want of space, and none came within `storage.pause_timeout`."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A volume that the run writes to, by a storage on it, and what of the run lies there."""

    storage: Storage
    steps: bool = False
    checkpoints: bool = False
    export: bool = False
    warm_copy: bool = False


@dataclass(frozen=True, slots=True)
class _Sight:
    """A place as it was seen last."""

    place: _Place
    free: int
    need: Need
    level: Level

    def bytes_missing(self, level: Level, min_free: int) -> int:
        """What must come free until the level is left; none or less when it is."""
        return bytes_to_leave(level, self.need, min_free) - self.free


class SpaceGuard:
    """The guard of one run; asked at the beginning of a step's every try, and once the step was committed."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._places = _places(run)
        self._min_free = run.config.storage.min_free
        self._level = Level.GO_ON
        self._sights: tuple[_Sight, ...] = ()
        self._looking = threading.Lock()
        # Measured from here on; a policy version is never larger than the weights.
        self._version_bytes = sum(parameter.nbytes for parameter in run.policy.model.parameters())
        self.checkpoint_bytes = sum(tensor.nbytes for tensor in run.learner.state()[0].values())
        """Bytes that the next checkpoint will take."""
        self._segment_bytes = 0
        self._written_bytes = 0  # Of segments since the last checkpoint.
        self._held_bytes = 0  # Of segments that the pool refers to.
        self._held_at_checkpoint: int | None = None

    async def admit(self, step: int) -> None:
        """Hold a try of a step back while space is short.

        Raises PauseExpiredError when there is none for `storage.pause_timeout` seconds.
        """
        if await asyncio.to_thread(self._look) < Level.SLOW:
            return
        await self._run.turns.wait(step)
        if await asyncio.to_thread(self._look) == Level.PAUSE:
            await self._pause(step)

    async def relieve(self, step: int) -> None:
        """Look at the storages once `step` was committed, and make room where it is short."""
        self._measure(step)
        if self._run.publisher.busy and await asyncio.to_thread(self._is_tight):
            await self._run.publisher.settled()
        if await asyncio.to_thread(self._look) >= Level.EXPIRE:
            await self._run.in_order(self._make_room)
        else:
            self._run.saver.store.sparing = False

    def metrics(self) -> dict[str, float]:
        """What was seen last."""
        free = {"perf/free_bytes": float(self._sights[0].free)} if self._sights else {}
        return {"perf/space_guard": float(self._level), **free}

    @property
    def versions_kept(self) -> int:
        """How many published policy versions stay, the newest ones."""
        # Who answers a request that was left over from an older step still asks for that step's version.
        spare = any(sight.place.steps for sight in self._short()) and not self._run.stragglers
        return (FEWEST_VERSIONS_KEPT if spare else VERSIONS_KEPT) + self._run.config.rollout.max_lag

    @property
    def wants_checkpoint(self) -> bool:
        """Whether to write a checkpoint now, as the run is about to pause or what it lets go of is worth it."""
        fits = all(sight.free > self.checkpoint_bytes for sight in self._sights if sight.place.checkpoints)
        pays = self._freed_by_checkpoint >= self.checkpoint_bytes
        return fits and (self._level == Level.PAUSE or (self._level >= Level.EXPIRE and pays))

    def note_checkpoint(self, size: int) -> None:
        """Take note of a checkpoint of `size` bytes that was written."""
        self.checkpoint_bytes = max(size, self.checkpoint_bytes)
        self._written_bytes, self._held_at_checkpoint = 0, self._held_bytes

    @property
    def _freed_by_checkpoint(self) -> int:
        """Bytes of the segments that only the last checkpoint refers to, or nothing does."""
        return (self._held_at_checkpoint or 0) + self._written_bytes - self._held_bytes

    def _measure(self, step: int) -> None:
        """Learn from a committed step what the next one will write."""
        config, metrics = self._run.config, self._run.results[step].metrics
        if metrics["experience/segments"]:
            requests = -(-config.rollout.batch_size // config.rollout.groups_per_request)
            self._segment_bytes = round(requests * metrics["perf/pool_bytes"] / metrics["experience/segments"])
        self._written_bytes += self._segment_bytes
        self._held_bytes = round(metrics["perf/pool_bytes"])
        if self._held_at_checkpoint is None:  # What a resumed run began with.
            self._held_at_checkpoint = max(0, self._held_bytes - self._written_bytes)

    def _need(self, place: _Place) -> Need:
        ahead = self._run.config.rollout.max_lag * self._segment_bytes
        versions = (place.steps + place.export) * self._version_bytes
        checkpoints = (place.checkpoints + place.warm_copy) * self.checkpoint_bytes
        return Need(versions + checkpoints + place.steps * ahead, place.steps * self._segment_bytes)

    def _is_tight(self) -> bool:
        """Whether space could be short once the policy version that is on its way has been written."""
        frees = ((place, place.storage.free_bytes()) for place in self._places if place.steps)
        return any(
            judge(free - self._version_bytes, self._need(place), self._min_free, Level.GO_ON) > Level.GO_ON
            for place, free in frees
            if free is not None
        )

    def _look(self) -> Level:
        """See where all places stand, and tell when the worst level has changed."""
        with self._looking:
            before = {sight.place: sight.level for sight in self._sights}
            sights: list[_Sight] = []
            for place in self._places:
                free, need = place.storage.free_bytes(), self._need(place)
                if free is not None:
                    level = judge(free, need, self._min_free, before.get(place, Level.GO_ON))
                    sights.append(_Sight(place, free, need, level))
            self._sights = tuple(sorted(sights, key=lambda sight: (-sight.level, sight.free)))
            level = self._sights[0].level if self._sights else Level.GO_ON
            if level != self._level:
                self._tell(level)
            self._level = level
            return level

    def _tell(self, level: Level) -> None:
        worst = self._sights[0]
        if level == Level.GO_ON:
            logger.info("space is no longer short: %s has %s free", worst.place.storage.url, bytes_text(worst.free))
        else:
            logger.warning("space is short: %s; %s", self._describe(worst), _MEASURES[level])

    def _describe(self, sight: _Sight) -> str:
        return (
            f"{sight.place.storage.url} has {bytes_text(sight.free)} free, the next step and checkpoint take "
            f"{bytes_text(sight.need.once + sight.need.step)}, and {bytes_text(self._min_free)} are to stay free "
            "(storage.min_free)"
        )

    def _short(self) -> list[_Sight]:
        """The places where room is to be made."""
        return [sight for sight in self._sights if sight.level >= Level.EXPIRE]

    def _make_room(self) -> None:
        """Delete what may be spared, where it is that space is short. Nothing is in the middle of a step."""
        run, short = self._run, self._short()
        if any(sight.place.checkpoints or sight.place.warm_copy for sight in short):
            run.saver.store.sparing = True
            run.saver.make_room()
        pool = next((sight for sight in short if sight.place.steps), None)
        if pool is None:
            return
        run.release_segments()
        run.chain.retain(self.versions_kept)
        self._shrink_pool(pool.bytes_missing(Level.EXPIRE, self._min_free) - self._freed_by_checkpoint)

    def _shrink_pool(self, missing: int) -> None:
        """Have the oldest live groups leave the pool; the next checkpoint lets their segments go."""
        run, rollout = self._run, self._run.config.rollout
        samples = int(run.pool.metrics(run.now(run.step))["experience/samples"])
        # On-policy steps draw nothing that was there before them.
        least = rollout.batch_size * rollout.samples_per_prompt if rollout.max_lag else 0
        keep = samples_to_keep(samples, self._held_bytes, missing, least)
        if keep < samples:
            groups = run.pool.shrink(keep)
            self._held_bytes = round(run.pool.metrics(run.now(run.step))["perf/pool_bytes"])
            logger.info("%d groups left the experience pool to make room", groups)

    async def _pause(self, step: int) -> None:
        timeout, started = self._run.config.storage.pause_timeout, time.perf_counter()
        logger.warning("step %d waits for space, for %g s at the most (storage.pause_timeout)", step, timeout)
        await wait(
            "free space",
            lambda: True if self._look() < Level.PAUSE else None,
            whom=lambda: [Awaited(sight.place.storage.url) for sight in self._sights[:1]],
            deadline=timeout,
            policy=self._give_up,
            poll=POLL_SECONDS,
        )
        self._run.leave_out(time.perf_counter() - started)

    def _give_up(self, error: WaitExpiredError) -> Never:
        worst = self._sights[0]
        missing = bytes_text(worst.bytes_missing(Level.PAUSE, self._min_free))
        raise PauseExpiredError(
            f"{self._describe(worst)}; {missing} more did not come free within "
            f"{self._run.config.storage.pause_timeout:g} s (storage.pause_timeout): free them, or lower "
            "storage.min_free, and go on with --resume"
        ) from error


def _places(run: TrainingRun) -> tuple[_Place, ...]:
    """The volumes that a run writes to, that of its data first.

    A warm store with a volume to itself is none of them: a copy that does not fit is counted, and training goes on.
    """
    stored = {
        "steps": run.storage,
        "checkpoints": checkpoint_storage(run.config, run.folder),
        "export": open_storage(run.folder.path),
        "warm_copy": warm_storage(run.config, run.folder),
    }
    volumes: dict[int | str, _Place] = {}
    for part, storage in stored.items():
        if storage is None:
            continue
        volume = storage.device() if isinstance(storage, LocalStorage) else storage.url
        if volume in volumes or part != "warm_copy":
            volumes[volume] = replace(volumes.get(volume, _Place(storage)), **{part: True})
    return tuple(volumes.values())


def check_space(config: GyreConfig, policy: PolicySummary, critic_parameters: int) -> None:
    """Compare what a new run will write, its samples left out, with the free bytes; reads no model.

    Raises ValueError when even the least of it does not fit beside `storage.min_free`, and warns when the most does
    not. S3 has no limit to be read, and a `min_free` of 0 asks for none of this.
    """
    min_free = config.storage.min_free
    if min_free == 0 or (config.storage.url or "").startswith("s3://"):
        return
    storage = data_storage(config)
    free = storage.free_bytes()
    if free is None:
        return
    least = least_disk_forecast(config, policy, critic_parameters)
    most = disk_forecast(config, policy, VERSIONS_KEPT + config.rollout.max_lag, None, critic_parameters)
    if sum(least.values()) + min_free > free:
        raise ValueError(
            f"{_too_little(storage, free, 'at least', least, min_free)}; free some, set storage.url to a larger "
            "volume, or lower storage.min_free"
        )
    if sum(most.values()) + min_free > free:
        logger.warning(
            "%s; older checkpoints and policy versions will go early",
            _too_little(storage, free, "up to", most, min_free),
        )


def _too_little(storage: Storage, free: int, bound: str, forecast: Mapping[str, float], min_free: int) -> str:
    parts = ", ".join(f"{part} {bytes_text(size)}" for part, size in forecast.items())
    return (
        f"{storage.url} has {bytes_text(free)} free, and the run takes {bound} {bytes_text(sum(forecast.values()))} "
        f"without its samples ({parts}), beside the {bytes_text(min_free)} of storage.min_free"
    )
