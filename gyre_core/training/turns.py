"""Whose turn it is: steps may generate side by side, but they admit, draw and train one after the other."""

from __future__ import annotations

import asyncio
import time


class Turns:
    """Hands one turn from step to step, in order.

    A step keeps its turn through all its retries: `wait` returns at once to the step that has it. A step that
    stands aside without having had its turn must still `release` it, or the steps behind it would wait for ever.
    """

    def __init__(self, first_step: int) -> None:
        self._current = first_step
        self._released: set[int] = set()
        self._changed = asyncio.Condition()
        self._since = time.monotonic()

    @property
    def current(self) -> int:
        """The step that has the turn."""
        return self._current

    def seconds_free(self) -> float:
        """How long the present step has had the turn."""
        return time.monotonic() - self._since

    async def wait(self, step: int) -> None:
        """Return once it is this step's turn.

        The wait ends with the steps before it, each of which has deadlines of its own.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._current >= step)

    async def release(self, step: int) -> None:
        """Pass the turn on; releasing twice is no error."""
        async with self._changed:
            if step >= self._current:
                self._released.add(step)
            while self._current in self._released:
                self._released.remove(self._current)
                self._current += 1
                self._since = time.monotonic()
            self._changed.notify_all()
