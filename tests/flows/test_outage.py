"""What is called again while the Prefect server is away, and for how long."""

from types import SimpleNamespace

import httpx
import pytest

from flows import outage
from flows.outage import outlasting

AWAY, DONE = "away", "done"


class Calls:
    """Calls that last so many seconds each, by a clock of their own, and then end as said."""

    def __init__(self, *calls):
        self.left, self.now = list(calls), 0.0

    def monotonic(self):
        return self.now

    async def __call__(self):
        seconds, end = self.left.pop(0)
        self.now += seconds
        if end == AWAY:
            raise httpx.ConnectError("refused")
        return end


async def outlast(monkeypatch, *calls):
    """What comes of calls, and how many are left."""
    made = Calls(*calls)
    monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=made.monotonic))
    monkeypatch.setattr(outage, "_PAUSE", 0.0)
    try:
        return await outlasting(made), len(made.left)
    except httpx.ConnectError:
        return AWAY, len(made.left)


@pytest.mark.parametrize(
    "calls",
    [
        [(500.0, AWAY), (100.0, AWAY), (500.0, DONE)],
        [(5000.0, AWAY), (500.0, AWAY), (1.0, DONE)],
        [(1.0, AWAY), (5000.0, AWAY), (500.0, AWAY), (1.0, DONE)],
    ],
    ids=["away at the start", "away after long", "away again after long"],
)
async def test_time_in_which_the_server_was_there_counts_for_no_outage(monkeypatch, calls):
    assert await outlast(monkeypatch, *calls) == (DONE, 0)


@pytest.mark.parametrize("first", [100.0, 5000.0])
async def test_calls_that_fail_in_a_row_for_ten_minutes_raise(monkeypatch, first):
    # The sixth failure after the first comes 600 s after it, and the seventh is too late.
    calls = [(first, AWAY), *[(100.0, AWAY)] * 9]
    assert await outlast(monkeypatch, *calls) == (AWAY, 2)
