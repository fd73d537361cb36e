"""What every engine owes its callers, whatever is behind it."""

import asyncio
import contextlib

import numpy as np
import pytest
import torch

from gyre_core.config.sections import ModelsConfig, TinyModelConfig
from gyre_core.engines.transformers_engine import TransformersEngine
from gyre_core.policy.models import copy_policy, load_policy
from gyre_core.policy.tokens import render_prompt
from gyre_core.types import GroupRequest, PolicyVersion, Prompt, SamplingParameters

POLICY = load_policy(ModelsConfig(tiny=TinyModelConfig(hidden_size=32)), seed=0)
WEIGHTS = {name: tensor.clone() for name, tensor in POLICY.model.state_dict().items()}
VERSION = PolicyVersion(0, 0)
SEQUENCES_IN_FLIGHT = 6
LONG = 4000
"""Tokens that no test waits for."""


def transformers_engine():
    return TransformersEngine(copy_policy(POLICY, torch.float32), SEQUENCES_IN_FLIGHT)


@pytest.fixture(params=[transformers_engine])
async def empty_engine(request):
    engine = request.param()
    yield engine
    await engine.close()


@pytest.fixture
async def engine(empty_engine):
    await empty_engine.load_weights(VERSION, WEIGHTS)
    return empty_engine


def requests(count, prefix="g"):
    texts = [f"{index:02d}+{7 * index:02d}=" for index in range(count)]
    rendered = [(text, render_prompt(POLICY.tokenizer, text)[1]) for text in texts]
    return [
        GroupRequest(f"{prefix}{index}", Prompt(f"p{index}", text, text, token_ids))
        for index, (text, token_ids) in enumerate(rendered)
    ]


async def collect(engine, groups, sampling):
    return {(c.group_id, c.sample_index): c async for c in engine.generate(groups, sampling)}


@contextlib.asynccontextmanager
async def endless(engine, groups):
    """Sequences that are in flight for the length of a block; nobody reads them."""
    sampling = SamplingParameters(SEQUENCES_IN_FLIGHT, LONG)
    task = asyncio.create_task(collect(engine, groups, sampling))
    while not engine.stats().in_flight:
        await asyncio.sleep(0)
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def content(completions):
    return {key: (completion.token_ids.tolist(), completion.text) for key, completion in completions.items()}


async def test_it_generates_nothing_before_it_holds_a_version(empty_engine):
    assert empty_engine.version is None
    with pytest.raises(RuntimeError, match="no policy version"):
        await collect(empty_engine, requests(1), SamplingParameters(1, 4))


async def test_every_sample_of_every_group_comes_once(engine):
    completions = [c async for c in engine.generate(requests(5), SamplingParameters(4, 7, seed=1))]
    keys = sorted((completion.group_id, completion.sample_index) for completion in completions)
    assert keys == [(f"g{group}", sample) for group in range(5) for sample in range(4)]
    eos_ids = POLICY.tokens.eos_ids
    for completion in completions:
        assert completion.version == engine.version == VERSION
        assert 1 <= len(completion.token_ids) == len(completion.log_probabilities) <= 7
        assert completion.token_ids.dtype == np.int32
        assert completion.log_probabilities.dtype == np.float32
        assert (completion.log_probabilities <= 0).all()
        assert not np.isin(completion.token_ids[:-1], eos_ids).any()
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in eos_ids)
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 7
        assert 0 < completion.started_at <= completion.finished_at
    stats = engine.stats()
    assert stats.finished_sequences == 20
    assert stats.generated_tokens == sum(len(completion.token_ids) for completion in completions)
    assert stats.in_flight == stats.queued == 0
    assert stats.busy_seconds > 0


async def test_noise_is_a_function_of_seed_group_and_sample(engine):
    sampling = SamplingParameters(3, 8, seed=1)
    first = content(await collect(engine, requests(4), sampling))
    assert content(await collect(engine, requests(4), sampling)) == first
    assert content(await collect(engine, requests(4), SamplingParameters(3, 8, seed=2))) != first
    renamed = content(await collect(engine, requests(4, "h"), sampling))
    assert list(renamed.values()) != list(first.values())
    assert len({tuple(tokens) for (group, _), (tokens, _) in first.items() if group == "g0"}) > 1
    one = content(await collect(engine, requests(4)[2:3], sampling))
    assert one == {key: value for key, value in first.items() if key[0] == "g2"}


async def test_greedy_samples_of_a_group_are_equal(engine):
    completions = content(await collect(engine, requests(3), SamplingParameters(3, 6, temperature=0.0)))
    for group in range(3):
        assert completions[f"g{group}", 0] == completions[f"g{group}", 1] == completions[f"g{group}", 2]


async def test_calls_run_side_by_side_with_the_results_they_have_alone(engine):
    settings = [SamplingParameters(2, 9, seed=seed) for seed in range(3)]
    alone = [content(await collect(engine, requests(3), sampling)) for sampling in settings]
    together = await asyncio.gather(*(collect(engine, requests(3), sampling) for sampling in settings))
    assert list(map(content, together)) == alone


async def test_a_short_call_ends_while_a_long_one_runs(engine):
    (group,) = requests(1, "long")
    long = asyncio.create_task(collect(engine, [group], SamplingParameters(1, LONG, seed=12)))
    while not engine.stats().in_flight:
        await asyncio.sleep(0)
    assert len(await collect(engine, requests(8), SamplingParameters(2, 3))) == 16
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)


async def test_no_requests_give_no_completions(engine):
    assert await collect(engine, [], SamplingParameters(2, 3)) == {}


@pytest.mark.parametrize("gone", [(0, 5), (1, 2), (1, 5)])
async def test_abort_ends_a_group_and_spares_the_others(engine, gone):
    groups = requests(6)
    sampling = SamplingParameters(3, 300, seed=4)
    task = asyncio.create_task(collect(engine, groups, sampling))
    while not engine.stats().in_flight:
        await asyncio.sleep(0)
    await engine.abort([*(f"g{group}" for group in gone), "unknown"])
    completions = await task
    rest = [group for index, group in enumerate(groups) if index not in gone]
    spared = {(group.group_id, sample) for group in rest for sample in range(3)}
    assert spared <= completions.keys()
    assert len(completions) < 18
    expected = content(await collect(engine, rest, sampling))
    assert {key: value for key, value in content(completions).items() if key in spared} == expected


async def test_aborting_everything_ends_the_call(engine):
    async with endless(engine, requests(3)) as task:
        await engine.abort(["g0", "g1", "g2"])
        await task
        assert engine.stats().in_flight == engine.stats().queued == 0


async def test_leaving_the_iterator_gives_up_the_rest(engine):
    stream = engine.generate(requests(4), SamplingParameters(4, LONG, seed=1))
    await anext(stream)
    await stream.aclose()
    assert engine.stats().in_flight == engine.stats().queued == 0
    assert len(await collect(engine, requests(2), SamplingParameters(2, 4))) == 4


async def test_a_cancelled_call_gives_up_its_sequences(engine):
    async with endless(engine, requests(2)) as task:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stats().in_flight == engine.stats().queued == 0


async def test_pause_stops_and_resume_goes_on_as_if_nothing_had_been(engine):
    groups, sampling = requests(4), SamplingParameters(4, 60, seed=3)
    undisturbed = content(await collect(engine, groups, sampling))
    task = asyncio.create_task(collect(engine, groups, sampling))
    while not engine.stats().in_flight:
        await asyncio.sleep(0)
    await engine.pause()
    before = engine.stats()
    await asyncio.sleep(0.05)
    assert engine.stats() == before
    assert before.in_flight > 0
    await engine.resume()
    assert content(await task) == undisturbed


async def test_calls_made_during_a_pause_wait_for_its_end(engine):
    await engine.pause()
    task = asyncio.create_task(collect(engine, requests(2), SamplingParameters(1, 3)))
    while not engine.stats().queued:
        await asyncio.sleep(0)
    assert engine.stats().in_flight == 0
    await engine.resume()
    assert len(await task) == 2


async def test_new_weights_change_the_policy(engine):
    sampling = SamplingParameters(2, 6, seed=1)
    before = await collect(engine, requests(3), sampling)
    generator = torch.Generator().manual_seed(1)
    noise = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in WEIGHTS.items()}
    noise["lm_head.weight"] = noise["model.embed_tokens.weight"]
    await engine.load_weights(PolicyVersion(0, 1), {name: WEIGHTS[name] + 0.1 * noise[name] for name in WEIGHTS})
    after = await collect(engine, requests(3), sampling)
    assert engine.version == PolicyVersion(0, 1) == after["g0", 0].version
    assert content(after) != content(before)
    await engine.load_weights(PolicyVersion(0, 2), WEIGHTS)
    assert content(await collect(engine, requests(3), sampling)) == content(before)


async def test_weights_are_refused_while_sequences_are_in_flight(engine):
    async with endless(engine, requests(1)):
        with pytest.raises(RuntimeError, match="in flight"):
            await engine.load_weights(PolicyVersion(0, 1), WEIGHTS)
        assert engine.version == VERSION
    await engine.load_weights(PolicyVersion(0, 1), WEIGHTS)


async def test_weights_that_do_not_fit_leave_the_engine_as_it_was(engine):
    sampling = SamplingParameters(2, 6, seed=1)
    before = content(await collect(engine, requests(2), sampling))
    lacking = {name: torch.zeros_like(WEIGHTS[name]) for name in WEIGHTS if name != "model.norm.weight"}
    extra = {**WEIGHTS, "model.other": torch.zeros(2)}
    misshapen = {**WEIGHTS, "model.norm.weight": torch.zeros(3)}
    for weights, name in [(lacking, "model.norm.weight"), (extra, "model.other"), (misshapen, "model.norm.weight")]:
        with pytest.raises(ValueError, match=name):
            await engine.load_weights(PolicyVersion(0, 1), weights)
    assert engine.version == VERSION
    assert content(await collect(engine, requests(2), sampling)) == before


@pytest.mark.parametrize(
    ("sampling", "match"),
    [
        (SamplingParameters(0, 4), "samples"),
        (SamplingParameters(1, 0), "max_tokens"),
        (SamplingParameters(1, 4, temperature=-1.0), "temperature"),
        (SamplingParameters(1, 4, top_p=0.0), "top_p"),
        (SamplingParameters(1, 4, top_k=-1), "top_k"),
        (SamplingParameters(1, 4, stop=("",)), "stop"),
        (SamplingParameters(1, 4090), "max_tokens 4090 exceeds the policy's 4096 positions"),
    ],
)
async def test_what_cannot_be_sampled_is_refused(engine, sampling, match):
    with pytest.raises(ValueError, match=match):
        await collect(engine, requests(1), sampling)


@pytest.mark.parametrize(("token_ids", "match"), [([], "no tokens"), ([1, 52], "outside"), ([-1], "outside")])
async def test_prompts_that_the_model_cannot_read_are_refused(engine, token_ids, match):
    group = GroupRequest("g", Prompt("p", "?", "?", np.array(token_ids, dtype=np.int32)))
    with pytest.raises(ValueError, match=rf"prompt 'p' of group 'g' .*{match}"):
        await collect(engine, [group], SamplingParameters(1, 4))


async def test_completions_fill_the_positions_to_the_last(engine):
    (group,) = requests(1)
    room = 40
    text = "1" * (4096 - room - 1)
    token_ids = render_prompt(POLICY.tokenizer, text)[1]
    long = GroupRequest(group.group_id, Prompt("p", text, text, token_ids))
    assert len(token_ids) == 4096 - room
    assert len(await collect(engine, [long], SamplingParameters(1, room, seed=1))) == 1
    with pytest.raises(ValueError, match="positions"):
        await collect(engine, [long], SamplingParameters(1, room + 1))


async def test_close_ends_unfinished_calls(empty_engine):
    await empty_engine.load_weights(VERSION, WEIGHTS)
    async with endless(empty_engine, requests(2)) as task:
        await empty_engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await task
    await empty_engine.close()
    for call in (
        lambda: collect(empty_engine, requests(1), SamplingParameters(1, 1)),
        lambda: empty_engine.load_weights(VERSION, WEIGHTS),
        empty_engine.pause,
    ):
        with pytest.raises(RuntimeError, match="closed"):
            await call()


async def test_close_ends_calls_that_are_paused(empty_engine):
    await empty_engine.load_weights(VERSION, WEIGHTS)
    async with endless(empty_engine, requests(2)) as task:
        await empty_engine.pause()
        await empty_engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await task


async def test_the_event_loop_runs_while_the_engine_computes(engine):
    """Between the first and the last completion of a call, the loop serves others many times."""
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    await collect(engine, requests(6), SamplingParameters(4, 100, seed=1))
    counter.cancel()
    assert turns > 100


async def test_resetting_the_cache_changes_nothing_that_is_generated(engine):
    sampling = SamplingParameters(2, 6, seed=1)
    before = content(await collect(engine, requests(2), sampling))
    await engine.reset_cache()
    assert content(await collect(engine, requests(2), sampling)) == before
