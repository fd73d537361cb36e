"""How the learner's state gets into checkpoints and out of them again: in full, or as an increment on a full one.

An increment names the full checkpoint that it builds on. With `replay` it holds the records of the batches that were
trained on since, and the digest of what they must lead to; with `always` the difference of weights and moments.
Everything else that a checkpoint holds is small and is in each.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from gyre_core.checkpoint.cadence import LARGEST_SHARE, PAUSE, SinceCheckpoint, is_due, is_full
from gyre_core.checkpoint.manifest import CheckpointManifest
from gyre_core.checkpoint.store import Checkpoint, CheckpointStore, CorruptCheckpointError
from gyre_core.checkpoint.warm import WarmCopy
from gyre_core.config.sections import CheckpointConfig
from gyre_core.experience.consumption import ConsumeRecord, read_records, records_table
from gyre_core.learner.repeatability import state_digest
from gyre_core.weights.codec import DeltaError
from gyre_core.weights.delta import WeightState, apply_weights, encode_weights
from gyre_core.weights.flat import FlatWeights

logger = logging.getLogger(__name__)

REPLAY = "replay"
"""The table of an increment's records."""
RANDOM = "random.torch"
"""The tensor that holds the state of torch's generator, beside those of the learner."""
WARM_TIMEOUT = 60.0
"""Seconds that the warm store has for the last checkpoint when a run ends."""
WARM_TIMEOUT_QUICK = 10.0
"""The same when it has little time, as Prefect kills what it cancels after 30."""

Exact = Literal["replay", "always"]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LearnerState:
    """What brings a learner to its state: load tensors and counters, train on the records, and have `digest`."""

    tensors: Tensors
    counters: Mapping[str, int]
    records: Sequence[ConsumeRecord]
    digest: str | None


class Saver:
    """Writes a run's checkpoints, and knows what happened since the last one. One thread at a time."""

    def __init__(
        self, config: CheckpointConfig, store: CheckpointStore, last_step: int, exact: Exact, warm: WarmCopy | None
    ) -> None:
        """`last_step` is that of the whole run; `warm` follows the store in the background."""
        self.store = store
        self._config = config
        self._last_step = last_step
        self._exact = exact
        self._warm = warm
        self._base: str | None = None
        self._base_state: WeightState | None = None
        self._records: list[ConsumeRecord] = []
        self._segments: dict[str, int] = {}
        self._replay_seconds = self._delta_share = 0.0
        self._untried = 0
        self._warm_timeout = WARM_TIMEOUT
        self._saved_at = time.monotonic()
        self._steps = 0
        self._score: float | None = None
        self._scored_step: int | None = None
        self._best: float | None = None
        self._better = False

    def owned_by(self, require_owned: Callable[[], None]) -> None:
        """Delete nothing once this raises, as the run has another owner."""
        self.store.require_owned = require_owned
        if self._warm is not None:
            self._warm.require_owned = require_owned

    def note(self, record: ConsumeRecord, segments: Mapping[str, int], seconds: float) -> None:
        """Count a committed step: what it trained on, the segments that this lies in with their bytes, and how long."""
        self._steps += 1
        if self._exact == "replay":
            self._replay_seconds += seconds
            self._records.append(record)
            self._segments |= segments

    def note_evaluation(self, step: int, reward: float) -> None:
        """Take note of the held-out reward after a step, the next checkpoint's score if it is a number."""
        if not math.isfinite(reward):
            return
        self._score, self._scored_step = reward, step
        self._better = self._best is None or reward > self._best
        self._best = reward if self._better else self._best

    @property
    def due(self) -> bool:
        """Whether a checkpoint is to be written now."""
        return is_due(self._since(), self._config)

    def replayed_requests(self, step: int, quick: bool) -> list[str] | None:
        """The requests whose segments the next checkpoint, after `step`, makes the learner's state of; None for a full
        one.

        `quick` makes it an increment whenever that is possible.
        """
        self._warm_timeout = WARM_TIMEOUT_QUICK if quick else WARM_TIMEOUT
        if self._base is not None and not self.store.can_build_on(self._base):
            logger.warning("the full checkpoint %s is not whole in the first store; the next is full", self._base)
            self._base = None
        can = self._config.incremental and self._base is not None
        full = not can if quick else is_full(self._since(), self._config, step, self._last_step)
        return None if full else list(self._segments)

    def save(
        self, checkpoint: Checkpoint, learner: Tensors, counters: Mapping[str, int], *, full: bool
    ) -> CheckpointManifest:
        """Write a checkpoint of a learner in this state; `checkpoint` holds all else.

        `full` is as `replayed_requests` said. Raises OutOfSpaceError with nothing lost.
        """
        state = {**checkpoint.state, "learner": dict(counters)}
        whole = replace(checkpoint, state=state, score=self._score, scored_step=self._scored_step)
        manifest = self._save_full(whole, learner) if full else self._save_increment(whole, learner, counters)
        self._saved_at, self._steps, self._better = time.monotonic(), 0, False
        self._score = self._scored_step = None
        if self._warm is not None:
            self._warm.committed(manifest.name)
        return manifest

    def learner_state(self, checkpoint: Checkpoint) -> LearnerState:
        """What brings the learner to a checkpoint's state; raises CorruptCheckpointError for a base that is gone."""
        counters = checkpoint.state["learner"]
        if checkpoint.base is None:
            return LearnerState(_of_learner(checkpoint), counters, (), None)
        base = self.store.load(checkpoint.base)
        if checkpoint.delta:
            try:
                before = WeightState.of(FlatWeights.of(_of_learner(base)), torch.get_num_threads())
                after = apply_weights(before, checkpoint.delta, torch.get_num_threads())
            except DeltaError as error:
                raise CorruptCheckpointError(f"checkpoint {checkpoint.name}: {error}") from error
            return LearnerState(after.weights.tensors(), counters, (), None)
        records = read_records(checkpoint.tables[REPLAY], checkpoint.state["replayed_steps"])
        return LearnerState(_of_learner(base), base.state["learner"], records, checkpoint.state["learner_digest"])

    def resumed(self, checkpoint: Checkpoint, learner: LearnerState, segments: Mapping[str, int]) -> None:
        """Go on from a checkpoint that was restored; `segments` are those of its records with their bytes."""
        if checkpoint.base is None:
            self._build_on(checkpoint.name, learner.tensors)
        elif self._exact == "replay" and not checkpoint.delta:
            self._base = checkpoint.base
        # Else the next one is full: between the two, what this run would need of it is not known.
        self._records, self._segments = list(learner.records), dict(segments)
        self._replay_seconds = checkpoint.state["replay_seconds"]
        self._best = checkpoint.state["best_score"]

    def make_room(self) -> None:
        """Delete what need not stay, in the warm store too."""
        self.store.retain()
        if self._warm is not None:
            self._warm.look()

    def metrics(self) -> dict[str, float]:
        """How far the warm store is behind; empty without one."""
        return self._warm.metrics() if self._warm is not None else {}

    def close(self) -> None:
        """Give the warm store time for the last checkpoint, and end what follows it."""
        if self._warm is not None:
            self._warm.close(self._warm_timeout)

    def _since(self) -> SinceCheckpoint:
        return SinceCheckpoint(
            time.monotonic() - self._saved_at,
            self._steps,
            self._base is not None,
            self._replay_seconds,
            self._delta_share,
            self._untried,
            self._better,
        )

    def _save_full(self, checkpoint: Checkpoint, learner: Tensors) -> CheckpointManifest:
        state = {**checkpoint.state, "replay_seconds": 0.0, "best_score": self._best}
        manifest = self.store.save(
            replace(checkpoint, tensors={**checkpoint.tensors, **learner}, state=state), time.time()
        )
        self._build_on(manifest.name, learner)
        self._records, self._segments = [], {}
        self._replay_seconds = self._delta_share = 0.0
        self._untried = max(0, self._untried - 1)
        return manifest

    def _build_on(self, name: str, learner: Tensors) -> None:
        """Have the next increments build on this full checkpoint, of a learner in this state."""
        self._base = name
        if self._config.incremental and self._exact == "always":
            self._base_state = WeightState.of(FlatWeights.of(learner), torch.get_num_threads())

    def _save_increment(
        self, checkpoint: Checkpoint, learner: Tensors, counters: Mapping[str, int]
    ) -> CheckpointManifest:
        state: dict[str, Any] = {**checkpoint.state, "replay_seconds": self._replay_seconds, "best_score": self._best}
        if self._exact == "always":
            assert self._base_state is not None, "what an increment builds on is held"
            now = WeightState.of(FlatWeights.of(learner), torch.get_num_threads())
            delta = encode_weights(self._base_state, now, torch.get_num_threads())
            first, self._delta_share = self._delta_share == 0.0, len(delta) / now.weights.nbytes
            if first and self._delta_share > LARGEST_SHARE:
                self._untried = PAUSE
            return self.store.save(replace(checkpoint, base=self._base, delta=delta, state=state), time.time())
        state |= {
            "replayed_steps": [record.step for record in self._records],
            "learner_digest": state_digest(learner, counters),
        }
        increment = replace(
            checkpoint,
            base=self._base,
            tables={**checkpoint.tables, REPLAY: records_table(self._records)},
            state=state,
            pinned_bytes=sum(self._segments.values()),
        )
        return self.store.save(increment, time.time())


def _of_learner(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors of a full checkpoint that are the learner's."""
    return {name: tensor for name, tensor in checkpoint.tensors.items() if name != RANDOM}
