"""An engine that gives tokens out no faster than it is told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace

import torch

from gyre_core.engines.base import Engine, EngineStats
from gyre_core.types import Completion, GroupRequest, PolicyVersion, SamplingParameters


class RateLimitedEngine:
    """Holds finished sequences of another engine back, so that it releases at most `tokens_per_second`.

    For trials on a shared machine: whoever waits for it leaves the cores alone.
    """

    def __init__(self, engine: Engine, tokens_per_second: float) -> None:
        self._engine = engine
        self._rate = tokens_per_second
        self._free_at = 0.0
        self._open = self._held_back = self._released_tokens = self._released = 0
        self._busy_before = self._busy_since = 0.0

    @property
    def version(self) -> PolicyVersion | None:
        """The loaded policy version; None before the first load."""
        return self._engine.version

    @property
    def max_positions(self) -> int:
        """Tokens of prompt and completion together, at the most."""
        return self._engine.max_positions

    async def generate(
        self, requests: Sequence[GroupRequest], sampling: SamplingParameters
    ) -> AsyncGenerator[Completion]:
        """As the engine's own, each sequence when its tokens are due."""
        if self._open == 0:
            self._busy_since = time.monotonic()
        self._open += 1
        try:
            # All are taken at once, so that the engine beneath runs at its own pace.
            finished = [completion async for completion in self._engine.generate(requests, sampling)]
            self._held_back += len(finished)
            for place, completion in enumerate(finished):
                try:
                    await self._due(len(completion.token_ids))
                except BaseException:
                    self._held_back -= len(finished) - place
                    raise
                self._held_back -= 1
                yield replace(completion, finished_at=time.time())
        finally:
            self._open -= 1
            if self._open == 0:
                self._busy_before += time.monotonic() - self._busy_since

    async def abort(self, group_ids: Sequence[str]) -> None:
        """As the engine's own; sequences that are held back come all the same."""
        await self._engine.abort(group_ids)

    async def pause(self) -> None:
        """As the engine's own."""
        await self._engine.pause()

    async def resume(self) -> None:
        """As the engine's own."""
        await self._engine.resume()

    async def load_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        """As the engine's own."""
        await self._engine.load_weights(version, weights)

    async def reset_cache(self) -> None:
        """As the engine's own."""
        await self._engine.reset_cache()

    def stats(self) -> EngineStats:
        """As of an engine of this pace: what is held back counts as in flight."""
        stats = self._engine.stats()
        busy = self._busy_before + (time.monotonic() - self._busy_since if self._open else 0.0)
        return EngineStats(
            generated_tokens=self._released_tokens,
            finished_sequences=self._released,
            busy_seconds=busy,
            in_flight=stats.in_flight + self._held_back,
            queued=stats.queued,
        )

    async def close(self) -> None:
        """As the engine's own."""
        await self._engine.close()

    async def _due(self, tokens: int) -> None:
        """Wait until so many more tokens may be released."""
        self._free_at = max(self._free_at, time.monotonic()) + tokens / self._rate
        await asyncio.sleep(self._free_at - time.monotonic())
        self._released_tokens += tokens
        self._released += 1
