"""Which policy version an engine generates with, when requests of several versions ask for it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from gyre_core.engines.base import Engine
from gyre_core.types import PolicyVersion
from gyre_core.weights.chain import VersionChain


class VersionGate:
    """Lets requests of one version generate together; one of another version waits until they are through.

    First come, first served, so that no version waits for ever.
    """

    def __init__(self, engine: Engine, chain: VersionChain) -> None:
        self._engine = engine
        self._chain = chain
        self._inside = 0
        self._waiting: deque[object] = deque()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def holding(self, version: PolicyVersion) -> AsyncGenerator[float]:
        """The engine holds `version` inside the block; yields the seconds that loading it took.

        Raises what `VersionChain.load` and `Engine.load_weights` raise.
        """
        async with self._changed:
            ticket = object()
            self._waiting.append(ticket)
            try:
                await self._changed.wait_for(lambda: self._waiting[0] is ticket and self._open_for(version))
                seconds = await self._load(version)
                self._inside += 1
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield seconds
        finally:
            async with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _open_for(self, version: PolicyVersion) -> bool:
        return self._inside == 0 or self._engine.version == version

    async def _load(self, version: PolicyVersion) -> float:
        if self._engine.version == version:
            return 0.0
        started = time.monotonic()
        weights = await asyncio.to_thread(self._chain.load, version)
        await self._engine.load_weights(version, weights)
        return time.monotonic() - started
