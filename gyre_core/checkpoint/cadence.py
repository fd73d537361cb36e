"""When a checkpoint is due, and whether it is a full one; pure.

The law. A checkpoint is due `interval` seconds after the last one, or `every` steps after it where that is set, and
with the next step when an evaluation found a better policy than all before and the best are to be kept. It is a full
one

- when increments are off, or there is no full one of this run's line to build on;
- when it is to be kept for itself: the end of the run, a step that `keep_every` names, the best so far;
- where increments are repeated, when the updates since the last full one took longer than `replay_budget` seconds, as a
  recovery repeats them;
- where they hold a difference, when differences have become half as large as a full one; and when the first one after a
  full one was that large already, which is no gain for the time that it takes, so are the next 16.

Else it is an increment. A run that is being ended by force has no time, so it writes an increment whenever it can.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre_core.config.sections import CheckpointConfig

LARGEST_SHARE = 0.5
"""Of a full checkpoint's bytes: a difference that is larger is followed by a full one."""
PAUSE = 16
"""Checkpoints that are full, untried, after the first difference was larger."""


@dataclass(frozen=True, slots=True)
class SinceCheckpoint:
    """What happened since the last checkpoint, and since the last full one.

    `replay_seconds` are those of the updates since the last full one, `delta_share` the size of the last difference
    over that of a full one, and `untried` how many more are to be full without a try of a difference; `has_base` says
    that there is a full one.
    """

    seconds: float
    steps: int
    has_base: bool
    replay_seconds: float
    delta_share: float
    untried: int
    better: bool


def is_due(since: SinceCheckpoint, config: CheckpointConfig) -> bool:
    """Whether a checkpoint is to be written after this step."""
    by_steps = config.every > 0 and since.steps >= config.every
    return since.steps > 0 and (since.seconds >= config.interval or by_steps or _is_best(since, config))


def is_full(since: SinceCheckpoint, config: CheckpointConfig, step: int, last_step: int) -> bool:
    """Whether the checkpoint after `step`, of a run that goes to `last_step`, is a full one."""
    lasting = step >= last_step or (config.keep_every > 0 and step % config.keep_every == 0) or _is_best(since, config)
    too_far = since.replay_seconds > config.replay_budget or since.delta_share > LARGEST_SHARE or since.untried > 0
    return not config.incremental or not since.has_base or lasting or too_far


def _is_best(since: SinceCheckpoint, config: CheckpointConfig) -> bool:
    return since.better and config.keep_best > 0
