"""The law of restarts: whether, and when, a run whose process died without a word is started again.

A run that was killed from outside comes back at once. One that kills itself would come back for ever, so its crashes
are counted, and progress is what ends the count:

- How far a run got is the last step in its metrics. It counts as progress when it lies beyond the furthest step of all
  crashes before; steps that were only taken again, after an older checkpoint, do not count.
- A crash with progress is the first in a row. One without is one more in the row.
- The first crash in a row is answered at once, each further one after a longer pause, and the last one, the third, not
  at all: the run is given up, and named with the step that it does not get past.
- Only runs that crashed come back: who was cancelled, failed with an error, or is complete, stays so. A run that was
  given up and is started by hand counts anew.

The count travels with the run: each restart carries a tag, which says what the one after it goes on from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

PAUSES = (0.0, 10.0)
"""Seconds before the restart after each crash in a row; the crash after these is the last."""
_TAG = re.compile(r"gyre\.restart:(\d+)@(\d+)")


@dataclass(frozen=True, slots=True)
class Crashes:
    """How often in a row a run has crashed, and the furthest step that it got to; by default never."""

    count: int = 0
    step: int = -1

    @classmethod
    def from_tags(cls, tags: Iterable[str]) -> Crashes:
        """What the tags of a flow run say of the crashes before it."""
        found = [match for tag in tags if (match := _TAG.fullmatch(tag))]
        return cls(int(found[-1][1]), int(found[-1][2])) if found else cls()

    @property
    def tag(self) -> str:
        """The tag with which a restart remembers them."""
        return f"gyre.restart:{self.count}@{self.step}"

    def after(self, step: int) -> Crashes:
        """One crash more, of a process that got to `step`."""
        return Crashes(1, step) if step > self.step else Crashes(self.count + 1, self.step)

    @property
    def exhausted(self) -> bool:
        """Whether the run is given up."""
        return self.count > len(PAUSES)

    @property
    def pause(self) -> float:
        """Seconds until the restart, of a run that is not given up."""
        return PAUSES[self.count - 1]

    def __str__(self) -> str:
        return f"crashed {self.count} time{'s' if self.count > 1 else ''} after step {self.step}"


def without_count(tags: Iterable[str]) -> list[str]:
    """The tags of a flow run but for that of its restarts."""
    return [tag for tag in tags if not _TAG.fullmatch(tag)]
