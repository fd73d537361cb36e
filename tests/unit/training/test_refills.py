"""Further prompts in place of groups without a signal: bounded, repeatable, and an error when nothing helps."""

import pytest
from training_configs import tiny_config

from gyre_core.experience.segments import read_segment
from gyre_core.training import stages
from gyre_core.training.build import open_run
from gyre_core.training.requests import live_groups
from gyre_core.training.run import FATAL_ERRORS, NoSignalError

HALF_DEAD = """
    def reward(prompts, completions, **columns):
        return [0.0 if int(prompt[1]) % 2 else sum(map(ord, text)) % 97 / 97
                for prompt, text in zip(prompts, completions)]
"""
"""Prompts whose second digit is odd are dead; the others nearly never."""
CONSTANT = "def reward(completions, **columns):\n    return [1.0] * len(completions)"


async def opened(folder, function, run_id, **rollout):
    config = tiny_config(folder, function, rollout={"groups_per_request": 2} | rollout)
    return await open_run(config, run_id=run_id)


async def rolled_out(folder, run_id, refills):
    """The groups of a step's rollout: prompt and rewards, the live ones, and the refills."""
    run = await opened(folder, HALF_DEAD, run_id, max_refills=refills)
    try:
        count = await stages.rollout(run, 1)
        step = run.open_steps[1]
        assert len(step.requests) == count
        groups = [group for request in step.requests for group in read_segment(run.storage, request.request_id)]
        again = await stages.rollout(run, 1)
        assert (again, len(run.open_steps[1].requests)) == (count, count)
        await stages.reward(run, 1)
        minibatches = await stages.sample(run, 1)
        drawn = len(run.open_steps[1].record.groups)
        prompts = [group.prompt.prompt_id for group in groups]
        return (
            prompts,
            live_groups(run.storage, step, run.credit),
            run.open_steps[1].refills,
            minibatches,
            drawn,
        )
    finally:
        await run.close()


async def test_dead_groups_are_replaced_until_the_batch_is_full(tmp_path):
    prompts, live, refills, minibatches, drawn = await rolled_out(tmp_path, "full", refills=20)
    assert live == drawn == 4
    assert minibatches == 1
    dead = [prompt for prompt in prompts if int(prompt[1]) % 2]
    assert len(prompts) == 4 + len(dead), "each dead group was replaced by one more prompt"
    assert 0 < refills <= 20
    assert await rolled_out(tmp_path, "again", refills=20) == (prompts, live, refills, minibatches, drawn)


async def test_refills_are_bounded(tmp_path):
    prompts, live, refills, _, drawn = await rolled_out(tmp_path, "bounded", refills=1)
    without, live_without, none, _, _ = await rolled_out(tmp_path, "without", refills=0)
    assert (len(without), none) == (4, 0)
    assert prompts[:4] == without
    assert len(prompts) == 4 + (4 - live_without)
    assert refills == 1
    assert live_without <= live == drawn


async def test_a_data_set_of_dead_groups_ends_in_a_clear_error(tmp_path):
    run = await opened(tmp_path, CONSTANT, "dead", max_refills=2)
    try:
        with pytest.raises(NoSignalError, match=r"step 1: for each of 12 prompts, those of 2 refills .* earn the same"):
            await stages.rollout(run, 1)
        assert NoSignalError in FATAL_ERRORS
    finally:
        await run.close()


async def test_a_damaged_segment_is_put_aside_and_made_anew(tmp_path):
    run = await opened(tmp_path, HALF_DEAD, "damaged", max_refills=2)
    try:
        await stages.rollout(run, 1)
        name = f"pool/{run.open_steps[1].requests[0].request_id}.parquet"
        whole = run.storage.read(name)
        run.storage.replace(name, whole[:-1])
        with pytest.raises(RuntimeError, match=r"put aside and request 00000001-0000 is made anew"):
            await stages.rollout(run, 1)
        await stages.rollout(run, 1)
        await stages.reward(run, 1)
    finally:
        await run.close()
