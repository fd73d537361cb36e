"""A wait ends: with what it waited for, with what its policy makes of the expiry, or with a named culprit."""

import asyncio
import threading

import pytest

from gyre_core.cluster.waiting import Awaited, WaitExpiredError, wait, wait_for_work


def nobody():
    return []


def sequence(*values):
    """A condition that gives these answers in turn, then the last one for ever."""
    answers = list(values)
    return lambda: answers.pop(0) if len(answers) > 1 else answers[0]


async def test_what_is_there_is_returned_at_once():
    assert await wait("a number", lambda: 7, whom=nobody, deadline=0.5, poll=1000.0) == 7


async def test_it_polls_until_the_answer_is_there():
    assert await wait("x", sequence(None, None, "here"), whom=nobody, deadline=60.0, poll=0.001) == "here"


async def test_answers_that_are_false_are_answers():
    assert await wait("x", sequence(None, 0), whom=nobody, deadline=60.0, poll=0.001) == 0


async def test_expiry_names_whom_it_waited_for_with_their_last_errors():
    def whom():
        return [Awaited("worker 3", "CUDA out of memory"), Awaited("worker 4")]

    with pytest.raises(WaitExpiredError) as caught:
        await wait("4 segments of step 12", lambda: None, whom=whom, deadline=0.02, poll=0.001)
    assert str(caught.value) == (
        "gave up waiting for 4 segments of step 12 after 0.02 s; waited for "
        "worker 3 (last error: CUDA out of memory), worker 4 (last error: none reported)"
    )
    assert caught.value.whom == (Awaited("worker 3", "CUDA out of memory"), Awaited("worker 4"))


async def test_the_policy_may_go_on_with_less():
    seen = []

    def fewer(error):
        seen.append(error)
        return ["the two that came"]

    assert await wait("segments", lambda: None, whom=nobody, deadline=0.01, policy=fewer) == ["the two that came"]
    assert seen[0].what == "segments"


async def test_an_event_wakes_it_before_the_next_poll():
    changed, ready = asyncio.Event(), []
    waiting = asyncio.ensure_future(
        wait("x", lambda: ready or None, whom=nobody, deadline=60.0, poll=1000.0, changed=changed)
    )
    await asyncio.sleep(0.01)
    changed.set()  # Too early: it looks, finds nothing and waits on.
    await asyncio.sleep(0.01)
    ready.append("now")
    changed.set()
    assert await waiting == ["now"]


async def test_a_condition_that_hangs_does_not_hold_the_wait():
    released = threading.Event()
    try:
        with pytest.raises(WaitExpiredError):
            await wait("x", lambda: released.wait(60) or None, whom=nobody, deadline=0.02)
    finally:
        released.set()


@pytest.mark.parametrize("error", [OSError("disk gone"), TimeoutError("the condition's own")])
async def test_an_error_of_the_condition_is_raised_as_it_is(error):
    def broken():
        raise error

    with pytest.raises(type(error)) as caught:
        await wait("x", broken, whom=nobody, deadline=60.0)
    assert str(caught.value) == str(error)


async def test_a_cancelled_wait_is_cancelled():
    waiting = asyncio.ensure_future(wait("x", lambda: None, whom=nobody, deadline=60.0, poll=0.001))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_work_gives_its_result_or_its_own_error():
    async def work(outcome):
        await asyncio.sleep(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    for outcome in (7, None, 0):
        assert await wait_for_work("x", work(outcome), whom=nobody, deadline=60.0) == outcome
    for error in (KeyError("k"), TimeoutError("of the work")):
        with pytest.raises(type(error)) as raised:
            await wait_for_work("x", work(error), whom=nobody, deadline=60.0)
        assert raised.value is error


async def test_work_past_its_deadline_is_cancelled_and_named():
    cancelled = []

    async def work():
        try:
            await asyncio.sleep(1_000)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(WaitExpiredError, match=r"gave up waiting for the work after 0.05 s; waited for the engine"):
        await wait_for_work("the work", work(), whom=lambda: [Awaited("the engine")], deadline=0.05)
    assert cancelled == [True]


async def test_work_that_ignores_its_cancellation_is_left_behind():
    released = asyncio.Event()

    async def work():
        try:
            await asyncio.sleep(1_000)
        finally:
            await released.wait()

    with pytest.raises(WaitExpiredError, match="gave up waiting for the work"):
        await wait_for_work("the work", work(), whom=nobody, deadline=0.05, grace=0.05)
    assert not released.is_set()
    released.set()
    await asyncio.sleep(0.01)


async def test_whoever_waits_for_work_and_is_cancelled_cancels_it():
    ended = []

    async def work():
        try:
            await asyncio.sleep(1_000)
        finally:
            ended.append(True)

    waiter = asyncio.ensure_future(wait_for_work("x", work(), whom=nobody, deadline=1_000.0))
    await asyncio.sleep(0.01)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert ended == [True]
