"""Which prompts a step gets: a pure function of seed and step, so there is no position to save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gyre_core.types import Prompt

_SHUFFLE_STREAM = 1
"""Sets the generator of the shuffles apart from the splits'."""
_REFILL_STREAM = 4
"""And that of the refills apart from both, and from the draws'."""


@dataclass(frozen=True, slots=True)
class PromptCursor:
    """Deals `batch_size` prompts a step, epoch after epoch, each epoch shuffled anew when `shuffle` is on.

    Within an epoch each prompt comes exactly once. A step that meets the end of an epoch goes on in the next one, so
    that a batch is always full; one prompt may then occur twice in a step.
    """

    prompts: Sequence[Prompt]
    batch_size: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        assert self.prompts, "a cursor needs prompts"
        assert self.batch_size >= 1, "a batch holds at least one prompt"

    def prompts_for_step(self, step: int) -> list[Prompt]:
        """The prompts of a step; steps count from 0."""
        assert step >= 0, "steps count from 0"
        batch: list[Prompt] = []
        for position in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, place = divmod(position, len(self.prompts))
            batch.append(self.prompts[self._order(epoch)[place]])
        return batch

    def refill_for_step(self, step: int, start: int, count: int) -> list[Prompt]:
        """Further prompts for a step, beside its own: those at places `start` and on of an order of the step's own.

        The order goes through all prompts before any comes again.
        """
        assert step >= 0, "steps count from 0"
        batch: list[Prompt] = []
        for position in range(start, start + count):
            cycle, place = divmod(position, len(self.prompts))
            order = _shuffled((self.seed, _REFILL_STREAM, step, cycle), len(self.prompts))
            batch.append(self.prompts[order[place]])
        return batch

    def _order(self, epoch: int) -> Sequence[int] | NDArray[np.int64]:
        count = len(self.prompts)
        return _shuffled((self.seed, _SHUFFLE_STREAM, epoch), count) if self.shuffle else range(count)


@lru_cache(maxsize=4)
def _shuffled(seed: tuple[int, ...], count: int) -> NDArray[np.int64]:
    """An order of the prompts, `[count]`."""
    return np.random.default_rng(seed).permutation(count)
