"""What passes between an engine's compute thread and the event loops that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from gyre_core.types import Completion, GroupRequest, SamplingParameters


class Stream:
    """The sequences of one `generate` call on their way from the compute thread to the caller's event loop."""

    def __init__(self, sequences: int) -> None:
        self.remaining = sequences
        """Sequences that have not arrived; 0 when the call is over."""
        self._loop = asyncio.get_running_loop()
        self._arrivals: asyncio.Queue[list[Completion | None] | BaseException] = asyncio.Queue()

    def put(self, arrivals: list[Completion | None] | BaseException) -> None:
        """Send sequences, None for one that was given up, or the error that ends the call; from any thread."""
        self._loop.call_soon_threadsafe(self._arrivals.put_nowait, arrivals)

    async def completions(self) -> AsyncGenerator[Completion]:
        """The sequences as they finish, those that were given up left out; raises RuntimeError if the engine fails."""
        while self.remaining:
            arrivals = await self._arrivals.get()
            if isinstance(arrivals, BaseException):
                self.remaining = 0
                raise RuntimeError(f"the engine stopped: {arrivals}") from arrivals
            for completion in arrivals:
                self.remaining -= 1
                if completion is not None:
                    yield completion


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A group to generate, and the stream that its sequences go to."""

    request: GroupRequest
    sampling: SamplingParameters
    stream: Stream
