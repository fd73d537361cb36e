"""When space runs short, and what is done before it is gone; pure.

The law. Of a storage's free bytes `min_free` are never touched. The next step and the next checkpoint take `once` bytes
more, some of which are given back when something older goes: a policy version, a checkpoint, the segments of the steps
that run ahead. What is left is room for further steps, which add `step` bytes each, their segments:

- **go on** with room for 10 steps and more;
- **expire** with room for fewer: the oldest live groups leave the pool, one checkpoint is kept and no more policy
  versions than open steps ask for, and a checkpoint is written as soon as the segments that it lets go of are as many
  bytes as itself;
- **slow** with room for fewer than 3: besides, no step begins before the one in training has been committed;
- **pause** without room for one: besides, a checkpoint is written if it fits, and then no step begins.

A level is left when there is room for twice the steps that it is entered with, lest it come and go with each step. Of
several storages the worst decides. One without a limit lets go on, and so does a `min_free` of 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How short space is; each level takes the measures of those below it too."""

    GO_ON = 0
    EXPIRE = 1
    SLOW = 2
    PAUSE = 3


STEPS_AHEAD = {Level.PAUSE: 1, Level.SLOW: 3, Level.EXPIRE: 10}
"""With room for fewer steps than these a level is entered; the worst comes first."""
MARGIN = 2
"""With room for so many times the steps it is left."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a run is going to write to a storage: `once` while the next step and checkpoint are made, and `step`
    that each further step adds."""

    once: int
    step: int


def judge(free: int | None, need: Need, min_free: int, before: Level) -> Level:
    """The level of a storage with `free` bytes, None for no limit, that was at the level `before`."""
    if free is None or min_free == 0:
        return Level.GO_ON
    room = free - min_free - need.once
    for level, steps in STEPS_AHEAD.items():
        if room < steps * need.step * (MARGIN if before >= level else 1):
            return level
    return Level.GO_ON


def bytes_to_leave(level: Level, need: Need, min_free: int) -> int:
    """With how many free bytes a level (not `GO_ON`) is left."""
    return min_free + need.once + MARGIN * STEPS_AHEAD[level] * need.step


def samples_to_keep(samples: int, size: int, missing: int, least: int) -> int:
    """How many of the pool's samples stay so that `missing` of the `size` bytes of its segments can go; `least` or more
    do."""
    share = min(1.0, max(0, missing) / size) if size else 0.0
    return max(least, samples - round(share * samples))
