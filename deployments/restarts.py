"""How often, and after which pauses, a process that ends by itself is started again."""

from __future__ import annotations

from dataclasses import dataclass

ATTEMPTS = 9
"""Restarts in a row before the supervisor gives up."""
LONGEST_PAUSE = 60.0
"""Seconds before a restart at the most."""
STEADY_SECONDS = 120.0
"""A process that ran this long is well: what went before does not count any more."""


@dataclass(slots=True)
class Restarts:
    """The restarts of one process. Times are seconds of one clock."""

    in_a_row: int = 0
    due_at: float = 0.0

    def ended(self, now: float, lived: float) -> None:
        """Take note that the process ended at `now`, after `lived` seconds; pauses are 0, 1, 2, 4, … seconds."""
        self.in_a_row = 1 if lived >= STEADY_SECONDS else self.in_a_row + 1
        self.due_at = now + (0.0 if self.in_a_row == 1 else min(LONGEST_PAUSE, 2.0 ** (self.in_a_row - 2)))

    @property
    def exhausted(self) -> bool:
        """Whether it ended too often to be started again."""
        return self.in_a_row > ATTEMPTS
