"""The one way to wait: for something, from somebody, until a deadline, with a policy for when it passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Never, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Awaited:
    """Somebody that a wait depends on, and the last error heard from there (empty for none)."""

    name: str
    last_error: str = ""

    def __str__(self) -> str:
        return f"{self.name} (last error: {self.last_error or 'none reported'})"


class WaitExpiredError(TimeoutError):
    """A deadline passed; says what was waited for, for how many seconds, and from whom with their last errors."""

    def __init__(self, what: str, seconds: float, whom: Sequence[Awaited]) -> None:
        others = ", ".join(map(str, whom)) or "nobody that could be named"
        super().__init__(f"gave up waiting for {what} after {seconds:g} s; waited for {others}")
        self.what = what
        self.whom = tuple(whom)


def fail(error: WaitExpiredError) -> Never:
    """The policy that raises the error."""
    raise error


async def wait(
    what: str,
    ready: Callable[[], Result | None],
    *,
    whom: Callable[[], Sequence[Awaited]],
    deadline: float,
    policy: Callable[[WaitExpiredError], Result] = fail,
    poll: float = 0.05,
    changed: asyncio.Event | None = None,
) -> Result:
    """Return what `ready` returns as soon as that is not None, or what `policy` makes of the expiry.

    `ready` runs in a thread, every `poll` seconds and whenever `changed` is set, so it may read storage; even one that
    hangs does not hold the wait beyond `deadline` (seconds from now). On expiry `whom` is asked who was waited for, and
    `policy` decides what follows: it returns a result to go on with (fewer segments, say) or raises. An error from
    `ready` is raised as it is.
    """
    timer = asyncio.timeout(deadline)
    try:
        async with timer:
            while (result := await asyncio.to_thread(ready)) is None:
                await _pause(poll, changed)
            return result
    except TimeoutError:
        if not timer.expired():  # The error is one of `ready`.
            raise
    return policy(WaitExpiredError(what, deadline, whom()))


async def wait_for_work(
    what: str,
    work: Coroutine[Any, Any, Result],
    *,
    whom: Callable[[], Sequence[Awaited]],
    deadline: float,
    grace: float = 10.0,
) -> Result:
    """Run `work` of this process and return its result; its errors are raised as they are.

    Past `deadline` (seconds from now) it is cancelled, and WaitExpiredError raised as `wait` does. Work that hangs
    even so has `grace` seconds to end, and is then left behind.
    """
    task = asyncio.ensure_future(work)
    ended = asyncio.Event()
    task.add_done_callback(lambda _: ended.set())
    try:
        finished = await wait(
            what, lambda: task if task.done() else None, whom=whom, deadline=deadline, poll=1.0, changed=ended
        )
        return finished.result()
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=grace)


async def _pause(seconds: float, changed: asyncio.Event | None) -> None:
    if changed is None:
        await asyncio.sleep(seconds)
        return
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        return
    changed.clear()
