"""The experience pool: what was generated, what was trained on, and what may be drawn next.

The owner keeps one `Pool`; its index lives in memory and its rows in segments, each of which is decoded once. Every
change of the index follows a durable object: a ledger entry before an admission, a consume record before a use. So
a crash at any point leaves a storage from which the pool of the last checkpoint is restored and the rest repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gyre_core.algorithms.advantages import for_each_group
from gyre_core.cluster.epochs import require_current
from gyre_core.cluster.requests import prune_requests, request_step
from gyre_core.config.sections import ExperienceConfig
from gyre_core.experience import window
from gyre_core.experience.admission import Admission, Advantages
from gyre_core.experience.cleaning import SMALLEST_GROUP, CleanResult, clean
from gyre_core.experience.consumption import ConsumeRecord, DrawnGroup
from gyre_core.experience.contents import SegmentState, training_group
from gyre_core.experience.draw import choose, deal
from gyre_core.experience.index import GroupIndex, GroupState, prompt_key
from gyre_core.experience.ledger import AdmissionLedger
from gyre_core.experience.priority import effective_sampling_rate, importance_weights, mean_deviations, signals
from gyre_core.experience.segments import (
    ABANDONED_BRANCH,
    CommittedSegment,
    CorruptSegmentError,
    delete_segment,
    prune_tombstones,
    quarantine,
    read_segment,
    segment_ids,
    segment_name,
)
from gyre_core.experience.snapshot import PoolState, Snapshot, decode_snapshot
from gyre_core.storage import Storage
from gyre_core.types import Minibatch, PolicyVersion, TrainingGroup


class Pool:
    """The owner's view of the experience pool.

    `now` is always seconds on the pool's clock. Nothing here is safe for concurrent use: one owner, one thread at a
    time.
    """

    def __init__(
        self, storage: Storage, config: ExperienceConfig, epoch: int, smallest_group: int = SMALLEST_GROUP
    ) -> None:
        """An empty pool of `epoch`; groups with fewer than `smallest_group` clean rows are dropped as they come in."""
        self._smallest_group = smallest_group
        self._storage = storage
        self._config = config
        self._epoch = epoch
        self._ledger = AdmissionLedger(storage, epoch)
        self._index = GroupIndex()
        self._segments: dict[int, SegmentState] = {}
        self._next_segment = 0
        self._admissions: dict[str, Admission] = {}
        self._consumed = -1
        self._quarantined = 0
        self._draw_metrics: dict[str, float] = {}
        # Requests whose segments the index has left, with the first snapshot (by step) that does without them.
        self._retired: dict[str, int | None] = {}
        # The ledger's watermark in each snapshot that a later `pin_from` may name.
        self._watermarks: dict[int, int] = {}

    def admit(
        self,
        request_id: str,
        step: int,
        advantages: Advantages,
        now: float,
        *,
        skip_dead_groups: bool,
        committed: CommittedSegment | None = None,
        made_by: PolicyVersion | None = None,
    ) -> Admission:
        """Take in the request's segment at `step`, once; asked again, returns the same Admission.

        `committed` is the segment as this process wrote it, if it did. `made_by`, where given, is the only policy
        version whose samples can be trained on, and a segment of another one is put aside. A group of several rows
        whose advantages are all equal is dead; with `skip_dead_groups` it is never drawn. Groups beyond `buffer_size`
        samples leave, oldest first. Raises FileNotFoundError when there is no segment, and SupersededError when it is
        another owner's; after any error the call may be repeated.
        """
        if request_id in self._admissions:
            return self._admissions[request_id]
        if self._ledger.settled(request_id):
            return Admission(request_id, step, "ignored")
        try:
            generated = read_segment(self._storage, request_id, committed)
        except CorruptSegmentError as error:
            quarantine(self._storage, error.name, error.reason)
            self._quarantined += 1
            return Admission(request_id, step, "corrupt", reason=str(error))
        if made_by is not None and any(group.version != made_by for group in generated):
            # By whoever was frozen, for an earlier owner; or for the present one, when this one is that.
            name = segment_name(self._storage, request_id)
            require_current(self._storage, self._epoch)
            quarantine(self._storage, name, ABANDONED_BRANCH)
            return Admission(request_id, step, "corrupt", reason=f"{name} was {ABANDONED_BRANCH}")
        cleaned = clean(generated, self._smallest_group)
        groups = [
            training_group(group, values)
            for group, values in zip(cleaned.groups, advantages(cleaned.groups), strict=True)
        ]
        size = self._storage.size(segment_name(self._storage, request_id))
        self._ledger.record(request_id, step)
        dead = self._append(request_id, size, cleaned, groups, now, skip_dead_groups)
        self._evict(self._config.buffer_size)
        self._note_retirements(step)
        admission = Admission(request_id, step, "admitted", cleaned.groups, generated, cleaned.dropped, dead)
        self._admissions[request_id] = admission
        return admission

    def draw(
        self,
        rng: np.random.Generator,
        *,
        minibatches: int,
        groups_per_minibatch: int,
        now: float,
        current: PolicyVersion,
        on_policy: bool,
    ) -> list[list[DrawnGroup]]:
        """Whole groups for each minibatch, as evenly as they go; fewer minibatches, or none, when groups are few.

        `on_policy` takes every live group that `current` generated and that was never trained on. Otherwise up to
        `minibatches × groups_per_minibatch` groups are drawn by priority, with `fresh_share` and `max_prompt_share`
        held, and weights that correct for the priority. The pool does not change, so equal generators draw alike.
        """
        index, config = self._index, self._config
        age = window.ages(index["admitted_at"], now)
        rows = np.flatnonzero((index["state"] == GroupState.LIVE) & ~window.expired(age, config.time_window))
        fresh = index["uses"][rows] == 0
        if on_policy:
            own = (index["version_epoch"][rows] == current.epoch) & (index["version_number"][rows] == current.number)
            rows = rows[own & fresh]
            weights = np.ones(len(rows))
        else:
            columns = (index[name][rows] for name in ("spread", "policy_change", "mean_reward"))
            worth = signals(*columns) ** config.priority_alpha
            chosen = choose(
                worth * window.staleness_weights(age[rows], config.time_window),
                fresh,
                index["prompt"][rows],
                count=minibatches * groups_per_minibatch,
                fresh_share=config.fresh_share,
                prompt_cap=minibatches * max(1, math.floor(config.max_prompt_share * groups_per_minibatch + 1e-9)),
                rng=rng,
            )
            rows, weights = rows[chosen], importance_weights(worth[chosen])
        return [
            [self._drawn(int(rows[position]), float(weights[position])) for position in positions]
            for positions in deal(index["prompt"][rows], minibatches, rng)
        ]

    def training_groups(self, group_ids: Sequence[str]) -> list[TrainingGroup]:
        """The groups with their rows, from memory or, after a restore, from their segments.

        Raises ValueError for a group that has left the pool; groups drawn by the step in progress have not.
        """
        return [self._training_group(self._index.row(group_id)) for group_id in group_ids]

    def minibatches(self, record: ConsumeRecord) -> list[Minibatch]:
        """The step's minibatches as they were recorded: advantages and weights from the record, rows from the pool."""
        return [
            Minibatch(
                tuple(
                    replace(group, advantages=drawn.advantages, weight=drawn.weight)
                    for drawn, group in zip(
                        minibatch.groups,
                        self.training_groups([drawn.group_id for drawn in minibatch.groups]),
                        strict=True,
                    )
                ),
                minibatch.lr,
                minibatch.kl_coef,
            )
            for minibatch in record.minibatches
        ]

    def segment_bytes(self, record: ConsumeRecord) -> dict[str, int]:
        """The requests whose segments hold the record's groups, each with the segment's bytes."""
        rows = [self._index.row(group.group_id) for group in record.groups]
        segments = (self._segments[int(self._index["segment"][row])] for row in rows)
        return {segment.request_id: segment.size for segment in segments}

    def held_requests(self) -> list[str]:
        """The requests whose segments the index refers to."""
        return [segment.request_id for segment in self._segments.values()]

    def drop_missing(self) -> int:
        """Give up live groups whose segments are not there any more; returns how many."""
        there = set(segment_ids(self._storage))
        lost = [number for number, segment in self._segments.items() if segment.request_id not in there]
        rows = self._index.live()
        rows = rows[np.isin(self._index["segment"][rows], lost)]
        self._index["state"][rows] = GroupState.EXPIRED
        return len(rows)

    def consume(self, record: ConsumeRecord, now: float) -> None:
        """Count the uses of a record that is written down; a step that was counted before changes nothing."""
        if record.step <= self._consumed:
            return
        index = self._index
        rows = np.array([index.row(group.group_id) for group in record.groups], dtype=np.int64)
        self._draw_metrics = self._measure_draw(record, rows, now)
        index["uses"][rows] += 1
        used_up = (index["state"] == GroupState.LIVE) & (index["uses"] >= self._config.max_uses)
        index["state"][used_up] = GroupState.USED
        self._consumed = record.step
        self._admissions = {name: item for name, item in self._admissions.items() if item.step >= record.step}
        self._note_retirements(record.step)
        self._forget(record.step)

    def record_policy_change(self, changes: Mapping[str, float]) -> None:
        """Set the mean |log-ratio| of the learner's policy to the sampling one, by group id, for later priorities."""
        for group_id, change in changes.items():
            self._index["policy_change"][self._index.row(group_id)] = change

    def expire(self, now: float) -> int:
        """Drop the live groups that are older than the time window; returns how many."""
        rows = self._index.live()
        age = window.ages(self._index["admitted_at"][rows], now)
        rows = rows[window.expired(age, self._config.time_window)]
        self._index["state"][rows] = GroupState.EXPIRED
        self._note_retirements(max(self._consumed, 0))
        return len(rows)

    def shrink(self, samples: int) -> int:
        """Drop the oldest live groups until at most `samples` samples stay; returns how many groups went.

        Called between steps; the next snapshot does without their segments.
        """
        before = len(self._index.live())
        self._evict(samples)
        self._note_retirements(max(self._consumed, 0))
        self._forget(self._consumed + 1, worth=0.0)
        return before - len(self._index.live())

    def close(self, before_step: int) -> None:
        """Give up what is still missing of steps before `before_step`: a segment that comes later is ignored."""
        self._ledger.close(before_step)

    def snapshot(self, step: int) -> Snapshot:
        """The index after `step`, with references to its segments.

        Taken between steps: once a later step was consumed, this is no longer the state after `step`.
        """
        assert self._consumed <= step, f"step {self._consumed} was consumed, so the state after {step} is gone"
        for request_id, covered_by in self._retired.items():
            if covered_by is None:
                self._retired[request_id] = step
        self._watermarks[step] = self._ledger.watermark
        state = PoolState(step, self._ledger.watermark, self._ledger.admitted, self._consumed, self._quarantined)
        return Snapshot.take(self._index, self._segments, state)

    @classmethod
    def restore(
        cls,
        storage: Storage,
        config: ExperienceConfig,
        epoch: int,
        snapshot: pa.Table,
        smallest_group: int = SMALLEST_GROUP,
    ) -> Pool:
        """The pool as it was when the snapshot was taken, owned by `epoch`; draws equal the original's.

        Raises ValueError for a table that is not a snapshot of a known format.
        """
        pool = cls(storage, config, epoch, smallest_group)
        pool._index, pool._segments, state = decode_snapshot(snapshot)
        pool._next_segment = len(pool._segments)
        pool._ledger = AdmissionLedger(storage, epoch, state.watermark, state.admitted)
        pool._consumed, pool._quarantined = state.consumed, state.quarantined
        held = {segment.request_id for segment in pool._segments.values()}
        left_over = (name for name in segment_ids(storage) if pool._ledger.settled(name) and name not in held)
        pool._retired = dict.fromkeys(left_over, state.step)
        pool._watermarks = {state.step: state.watermark}
        pool._note_retirements(state.step)
        return pool

    def pin_from(self, step: int) -> int:
        """Delete what no checkpoint of `step` or later can need; returns how many segments went.

        `step` is that of the oldest checkpoint that is kept; call this once the newest is durable. Everything that
        was consumed or left the index since `step` stays, so that a restored run can repeat it. Leftovers of frozen
        workers go as well. Raises SupersededError when another owner has taken over, which may have gone back further.
        """
        # Who takes over after this check finds the newest checkpoint, and needs nothing older than `step` either.
        require_current(self._storage, self._epoch)
        watermark = self._watermarks.get(step, 0)
        held = {segment.request_id for segment in self._segments.values()}
        deleted = 0
        for request_id in segment_ids(self._storage):
            if request_id in held:
                continue
            covered_by = self._retired.get(request_id, step if self._released(request_id, watermark) else None)
            if covered_by is not None and covered_by <= step:
                delete_segment(self._storage, request_id)
                deleted += 1
        self._retired = {name: taken for name, taken in self._retired.items() if taken is None or taken > step}
        prune_requests(self._storage, watermark)
        prune_tombstones(self._storage, watermark)
        self._watermarks = {taken: mark for taken, mark in self._watermarks.items() if taken >= step}
        return deleted

    def admitted(self, request_id: str) -> bool:
        """Whether the request's segment was taken in, or came too late for that."""
        return self._ledger.settled(request_id)

    @property
    def fresh_samples(self) -> int:
        """Samples of live groups that were never trained on."""
        rows = self._index.live()
        return int(self._index["samples"][rows][self._index["uses"][rows] == 0].sum())

    def metrics(self, now: float) -> dict[str, float]:
        """The pool at `now`, and what the last consumed step admitted, dropped and drew."""
        index, rows = self._index, self._index.live()
        samples = index["samples"][rows]
        age = window.ages(index["admitted_at"][rows], now)
        admissions = [item for item in self._admissions.values() if item.step == self._consumed]
        metrics = {
            "samples": samples.sum(),
            "groups": len(rows),
            "fresh_samples": self.fresh_samples,
            "stale_share": window.stale_share(age, samples, self._config.time_window),
            "segments": len(self._segments),
            "quarantined": self._quarantined,
            "admitted": sum(item.samples for item in admissions),
            "dead_groups": sum(item.dead_groups for item in admissions),
            **self._draw_metrics,
        }
        for admission in admissions:
            for reason, count in admission.dropped.items():
                metrics[f"dropped/{reason}"] = metrics.get(f"dropped/{reason}", 0) + count
        # A segment holds the times of its completions, so its compressed size is never twice the same.
        size = sum(segment.size for segment in self._segments.values())
        named = {f"experience/{name}": float(value) for name, value in metrics.items()}
        return named | {"perf/pool_bytes": float(size)}

    def _append(
        self,
        request_id: str,
        size: int,
        cleaned: CleanResult,
        groups: list[TrainingGroup],
        now: float,
        skip_dead_groups: bool,
    ) -> int:
        """Put an admitted segment into the index; returns its dead groups. Touches memory only."""
        number, self._next_segment = self._next_segment, self._next_segment + 1
        advantages = [group.advantages for group in groups]
        ranges = for_each_group(lambda values: np.ptp(values, axis=1), advantages)
        dead = [len(group) > 1 and width == 0.0 for group, width in zip(advantages, ranges, strict=True)]
        states = [GroupState.DEAD if skip_dead_groups and is_dead else GroupState.LIVE for is_dead in dead]
        columns = {
            "segment": number,
            "position": np.arange(len(groups)),
            "prompt": np.array([prompt_key(group.prompt.prompt_id) for group in cleaned.groups], dtype=np.uint64),
            "samples": [len(group.completions) for group in groups],
            "version_epoch": [group.version.epoch for group in groups],
            "version_number": [group.version.number for group in groups],
            "admitted_at": now,
            "mean_reward": for_each_group(lambda values: values.mean(axis=1), [group.rewards for group in groups]),
            "spread": for_each_group(mean_deviations, advantages),
            "policy_change": 0.0,
            "uses": 0,
            "state": states,
        }
        self._index.append([group.group_id for group in groups], columns)
        self._segments[number] = SegmentState(request_id, size, advantages, groups)
        return sum(dead)

    def _evict(self, most: int) -> None:
        """Have the oldest groups leave until at most `most` samples stay."""
        rows = self._index.live()
        admitted_at, samples = self._index["admitted_at"][rows], self._index["samples"][rows]
        if samples.sum() > most:
            self._index["state"][rows[window.evicted(admitted_at, samples, most)]] = GroupState.EVICTED

    def _note_retirements(self, step: int) -> None:
        """Remember at which step a segment was left without a live group."""
        in_use = set(np.unique(self._index["segment"][self._index.live()]).tolist())
        for number, segment in self._segments.items():
            if segment.retired_in is None and number not in in_use:
                segment.retired_in = step

    def _forget(self, step: int, worth: float = 0.25) -> None:
        """Drop the segments that no step from `step` on can ask for, once they are a share `worth` of the index."""
        leaving = [
            number
            for number, segment in self._segments.items()
            if segment.retired_in is not None and segment.retired_in < step
        ]
        kept = ~np.isin(self._index["segment"], leaving)
        if leaving and np.count_nonzero(kept) <= (1.0 - worth) * len(self._index):
            self._index.keep(kept)
            for number in leaving:
                self._retired[self._segments.pop(number).request_id] = None

    def _released(self, request_id: str, watermark: int) -> bool:
        """Whether a segment outside the index is a second one of a deleted first, or came after its step was closed."""
        return request_id in self._ledger or request_step(request_id) < watermark

    def _drawn(self, row: int, weight: float) -> DrawnGroup:
        segment = self._segments[int(self._index["segment"][row])]
        return DrawnGroup(self._index.group_ids[row], weight, segment.advantages[self._index["position"][row]])

    def _training_group(self, row: int) -> TrainingGroup:
        segment = self._segments[int(self._index["segment"][row])]
        if segment.groups is None:
            cleaned = clean(read_segment(self._storage, segment.request_id), self._smallest_group).groups
            segment.groups = [
                training_group(group, advantages) for group, advantages in zip(cleaned, segment.advantages, strict=True)
            ]
        return segment.groups[self._index["position"][row]]

    def _measure_draw(self, record: ConsumeRecord, rows: NDArray[np.int64], now: float) -> dict[str, float]:
        samples = self._index["samples"][rows]
        metrics = {
            "consumed": float(samples.sum()),
            "effective_sampling_rate": effective_sampling_rate(np.array([group.weight for group in record.groups])),
        }
        if len(rows):
            age = window.ages(self._index["admitted_at"][rows], now)
            metrics["reused_share"] = float(samples[self._index["uses"][rows] > 0].sum() / samples.sum())
            metrics["mean_age"] = float(np.average(age, weights=samples))
        return metrics
