"""SIGTERM ends a flow by cancelling its task.

Prefect raises its TerminationSignal from the signal's handler, which is to say in whatever runs at that moment. In a
callback of the event loop asyncio logs it and goes on; in a task that nobody awaits nobody ever sees it. The run then
goes on as if nothing had been asked, with a task less. A cancellation arrives where it belongs.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, cast

import prefect.utilities.engine


@contextmanager
def cancelled_by_sigterm() -> Generator[None]:
    """Have the first SIGTERM cancel the task that runs the block; later ones do nothing.

    Prefect finds its own handler in place, which flows below reuse and by which it knows that it may ask for an end.
    Outside the main thread, where no signal arrives, the block runs as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "called in a coroutine"
    asked = False

    def terminate(*_: Any) -> None:
        nonlocal asked
        if not asked:
            asked = True
            loop.call_soon_threadsafe(task.cancel, "SIGTERM")

    engine = cast(Any, prefect.utilities.engine)
    prefects_own = engine._prefect_sigterm_handler
    engine._prefect_sigterm_handler = terminate
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        engine._prefect_sigterm_handler = prefects_own
        signal.signal(signal.SIGTERM, before)


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that is not to be left half done, also when this task is cancelled meanwhile; then that is raised."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
