"""What goes into the pool with a segment, and what became of one that was offered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gyre_core.types import RolloutGroup

Advantages = Callable[[Sequence[RolloutGroup]], Sequence[NDArray[np.float32]]]
"""The advantages of a segment's clean groups, `[group]` each."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What became of a segment that was offered to the pool.

    `ignored`: the request was admitted before this owner's time or is closed. `corrupt`: the segment was put aside
    for `reason`; the request must be issued anew. `generated` are the groups as committed, `groups` the clean ones,
    and `dropped` counts the rows between them.
    """

    request_id: str
    step: int
    outcome: Literal["admitted", "ignored", "corrupt"]
    groups: tuple[RolloutGroup, ...] = ()
    generated: tuple[RolloutGroup, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    dead_groups: int = 0
    reason: str = ""

    @property
    def samples(self) -> int:
        """Clean rows that came in."""
        return sum(len(group.rollouts) for group in self.groups)
