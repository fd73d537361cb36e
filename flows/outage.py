"""Calls that outlast an absence of the Prefect server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx

logger = logging.getLogger(__name__)

OUTAGE_TIMEOUT = 600.0
"""Seconds for which a call is made again while the Prefect server is away. One that fails by itself takes less."""
_PAUSE = 1.0

T = TypeVar("T")


async def outlasting(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What `call` returns, which may be called again; while the Prefect server is away, it is.

    A client that never connected does not retry by itself, and one that did gives up before a server is back. Raises
    httpx.TransportError when calls have failed in a row for OUTAGE_TIMEOUT.
    """
    away_since: float | None = None
    while True:
        called = time.monotonic()
        try:
            return await call()
        except httpx.TransportError as error:
            failed = time.monotonic()
            # A call that lasted as long as that had got through, so that its failure is the first of a new row.
            if away_since is None or failed - called > OUTAGE_TIMEOUT:
                away_since = failed
            if failed - away_since > OUTAGE_TIMEOUT:
                raise
            logger.warning("the Prefect server is away (%r); trying again", error)
        await asyncio.sleep(_PAUSE)
