"""Turns: steps take theirs in order, and one that stands aside holds nobody."""

import asyncio
import itertools

import pytest

from gyre_core.training.turns import Turns


@pytest.mark.parametrize("order", list(itertools.permutations(range(3, 7))))
async def test_steps_take_their_turns_in_order(order):
    turns = Turns(3)
    taken = []

    async def take(step):
        await turns.wait(step)
        assert turns.current == step
        taken.append(step)
        await asyncio.sleep(0)
        await turns.release(step)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for step in order:
            group.create_task(take(step))
    assert taken == [3, 4, 5, 6]
    assert turns.current == 7


async def test_a_step_keeps_its_turn_through_its_retries():
    turns = Turns(1)
    behind = asyncio.create_task(turns.wait(2))
    for _ in range(3):
        await asyncio.wait_for(turns.wait(1), 10)
        await asyncio.sleep(0)
        assert not behind.done()
    await turns.release(1)
    await asyncio.wait_for(behind, 10)


async def test_steps_that_stand_aside_early_are_passed_over():
    turns = Turns(1)
    await turns.release(3)
    await turns.release(2)
    assert turns.current == 1
    await turns.release(1)
    assert turns.current == 4


async def test_releasing_again_is_no_error():
    turns = Turns(1)
    for _ in range(2):
        await turns.release(1)
    assert turns.current == 2
    await asyncio.wait_for(turns.wait(1), 10)
