"""The cursor's laws: a function of seed and step, every prompt once an epoch."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_core.data.cursor import PromptCursor
from gyre_core.types import Prompt


def prompts(count):
    return tuple(Prompt(str(number), str(number), str(number), np.zeros(1, np.int32)) for number in range(count))


def ids(cursor, steps):
    return [prompt.prompt_id for step in steps for prompt in cursor.prompts_for_step(step)]


@pytest.mark.parametrize("resumed_at", [0, 10, 13, 19])
def test_a_resumed_run_sees_the_same_prompts(resumed_at):
    whole = ids(PromptCursor(prompts(60), batch_size=6, seed=4), range(20))
    assert ids(PromptCursor(prompts(60), batch_size=6, seed=4), range(resumed_at, 20)) == whole[resumed_at * 6 :]
    for epoch in (whole[:60], whole[60:]):
        assert sorted(epoch, key=int) == [str(number) for number in range(60)]
    assert whole[:60] != whole[60:]


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**40), st.booleans())
def test_every_prompt_comes_once_an_epoch_whatever_the_batch(count, batch_size, seed, shuffle):
    cursor = PromptCursor(prompts(count), batch_size, seed, shuffle)
    steps = 2 * count // batch_size + 2
    sequence = ids(cursor, range(steps))
    assert len(sequence) == steps * batch_size
    for start in range(0, len(sequence) - count + 1, count):
        assert Counter(sequence[start : start + count]) == Counter(str(number) for number in range(count))


def test_steps_may_be_asked_for_in_any_order():
    cursor = PromptCursor(prompts(7), batch_size=3, seed=0)
    backwards = {step: ids(cursor, [step]) for step in reversed(range(30))}
    assert [backwards[step] for step in range(30)] == [ids(cursor, [step]) for step in range(30)]


def test_without_shuffle_the_order_is_that_of_the_data():
    cursor = PromptCursor(prompts(5), batch_size=3, seed=9, shuffle=False)
    assert ids(cursor, range(4)) == ["0", "1", "2", "3", "4", "0", "1", "2", "3", "4", "0", "1"]


def test_a_batch_larger_than_the_data_repeats_it():
    cursor = PromptCursor(prompts(2), batch_size=5, seed=0)
    assert Counter(ids(cursor, [0])) in (Counter({"0": 3, "1": 2}), Counter({"0": 2, "1": 3}))


def test_seeds_give_different_orders():
    orders = {tuple(ids(PromptCursor(prompts(30), 30, seed), [0])) for seed in range(20)}
    assert len(orders) == 20


def test_refills_are_further_prompts_in_an_order_of_the_step():
    cursor = PromptCursor(prompts(7), batch_size=3, seed=5)
    ids = [prompt.prompt_id for prompt in cursor.refill_for_step(2, 0, 14)]
    assert sorted(ids[:7]) == sorted(ids[7:]) == sorted(prompt.prompt_id for prompt in cursor.prompts)
    assert ids[:7] != ids[7:]
    parts = [*cursor.refill_for_step(2, 0, 4), *cursor.refill_for_step(2, 4, 10)]
    assert [prompt.prompt_id for prompt in parts] == ids
    assert ids != [prompt.prompt_id for prompt in cursor.refill_for_step(3, 0, 14)]
