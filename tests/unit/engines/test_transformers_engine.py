"""What the transformers engine generates, held against plain forward passes and against itself."""

import asyncio
import math

import numpy as np
import pytest
import torch
from engine_policies import (
    VERSION,
    generated,
    loaded_engine,
    make_policy,
    request_for,
    requests_for,
    scripted_policy,
    with_eos,
)
from transformers import PreTrainedConfig

from gyre_core.engines import decoder
from gyre_core.engines.decoder import Decoder
from gyre_core.engines.streams import Job, Stream
from gyre_core.engines.transformers_engine import TransformersEngine, attention_reach
from gyre_core.policy.models import copy_policy
from gyre_core.types import PolicyVersion, SamplingParameters

SHAPES = ["qwen3-tied", "qwen3-untied", "llama-tied", "llama-untied"]


def plain_log_probabilities(policy, prompt_ids, token_ids, sampling):
    """Of a completion by one forward pass without cache, padding or batch; truncation by sorting, in float64."""
    sequence = torch.tensor([[*prompt_ids, *token_ids]])
    with torch.no_grad():
        logits = policy.model(input_ids=sequence, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].double().numpy()
    result = []
    for row, token in zip(logits / (sampling.temperature or 1.0), token_ids, strict=True):
        order = np.argsort(-row)[: sampling.top_k or None]
        probabilities = np.exp(row[order] - row[order].max())
        probabilities /= probabilities.sum()
        before = np.cumsum(probabilities) - probabilities
        kept = before < sampling.top_p
        place = int(np.flatnonzero(order == token)[0])
        assert kept[place]
        result.append(math.log(probabilities[place] / probabilities[kept].sum()))
    return result


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.9, 0), (1.3, 1.0, 5), (0.8, 0.7, 9)]
)
async def test_log_probabilities_agree_with_a_plain_forward_pass(shape, temperature, top_p, top_k):
    policy = make_policy(shape)
    sampling = SamplingParameters(3, 10, temperature, top_p, top_k, seed=4)
    requests = requests_for(policy, 9)
    completions = await generated(policy, requests, sampling, sequences_in_flight=7)
    assert len(completions) == 27
    for request in requests:
        for sample in range(3):
            completion = completions[request.group_id, sample]
            expected = plain_log_probabilities(policy, request.prompt.token_ids, completion.token_ids, sampling)
            np.testing.assert_allclose(completion.log_probabilities, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
async def test_greedy_takes_the_likeliest_token_with_its_plain_log_probability(shape):
    policy = make_policy(shape)
    sampling = SamplingParameters(1, 8, temperature=0.0, top_p=0.5, top_k=2)
    (completion,) = (await generated(policy, [request_for(policy, "12+3=")], sampling)).values()
    sequence = request_for(policy, "12+3=").prompt.token_ids.tolist()
    for token, log_probability in zip(completion.token_ids, completion.log_probabilities, strict=True):
        with torch.no_grad():
            plain = policy.model(input_ids=torch.tensor([sequence])).logits[0, -1].log_softmax(-1)
        assert token == int(plain.argmax())
        assert log_probability == pytest.approx(float(plain.max()), abs=1e-5)
        sequence.append(token)


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        assert left[key].token_ids.tolist() == right[key].token_ids.tolist()
        assert (left[key].text, left[key].finish_reason) == (right[key].text, right[key].finish_reason)
        np.testing.assert_allclose(left[key].log_probabilities, right[key].log_probabilities, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sequences_in_flight", [1, 2, 5, 64])
@pytest.mark.parametrize("shape", ["qwen3-tied", "llama-untied"])
async def test_a_sequence_does_not_depend_on_the_batch(shape, sequences_in_flight):
    policy = make_policy(shape)
    sampling = SamplingParameters(4, 12, seed=9)
    requests = requests_for(policy, 8)
    together = await generated(policy, requests, sampling, 32)
    shuffled = [requests[index] for index in (5, 2, 7, 0, 1, 6, 3, 4)]
    assert_same(await generated(policy, shuffled, sampling, sequences_in_flight), together)
    for request in requests[:2]:
        alone = await generated(policy, [request], sampling, sequences_in_flight)
        assert_same(alone, {key: value for key, value in together.items() if key[0] == request.group_id})


async def test_the_same_request_gives_the_same_bits_however_often():
    policy = make_policy()
    requests, sampling = requests_for(policy, 12), SamplingParameters(4, 20, top_p=0.9, seed=1)
    engine = await loaded_engine(policy, 10)
    rounds = []
    for _ in range(3):
        completions = [completion async for completion in engine.generate(requests, sampling)]
        rounds.append([(c.group_id, c.sample_index, c.text, c.log_probabilities.tobytes()) for c in completions])
        _ = [completion async for completion in engine.generate(requests[:5], SamplingParameters(2, 30, seed=8))]
    await engine.close()
    assert rounds[0] == rounds[1] == rounds[2]


async def test_calls_with_different_parameters_share_the_batch():
    policy = make_policy()
    requests = requests_for(policy, 6)
    settings = [
        SamplingParameters(3, 9, seed=1),
        SamplingParameters(1, 14, temperature=0.0),
        SamplingParameters(2, 5, temperature=0.6, top_k=3, seed=2),
    ]
    engine = await loaded_engine(policy, 11)

    async def collect(sampling):
        return {(c.group_id, c.sample_index): c async for c in engine.generate(requests, sampling)}

    results = await asyncio.gather(*map(collect, settings))
    await engine.close()
    for sampling, result in zip(settings, results, strict=True):
        assert_same(result, await generated(policy, requests, sampling, 32))


def forward_shapes(policy):
    """Records the shape of the ids of every forward pass of the policy's model."""
    shapes = []
    policy.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def jobs_of(policy, *lengths):
    """One group of one sample for each length, which it reaches exactly: nothing ends a sequence before."""
    jobs = []
    for index, length in enumerate(lengths):
        stream = Stream(1)
        jobs.append(Job(request_for(policy, f"{index}+", f"g{index}"), SamplingParameters(1, length), stream))
    return jobs


def endless_decoder(sequences_in_flight):
    policy = copy_policy(with_eos(make_policy()), torch.float32)
    policy.model.set_attn_implementation("sdpa")
    batch = Decoder(policy, sequences_in_flight)
    batch.version = VERSION
    return policy, batch


def run(batch):
    finished = []
    while batch.busy:
        finished += batch.step()
    return finished


async def test_a_long_row_holds_nobody():
    """Three rows serve 30 short sequences of three decode steps each while the fourth makes 60 tokens."""
    policy, batch = endless_decoder(4)
    batch.add(jobs_of(policy, 60, *[4] * 30))
    assert len(run(batch)) == 31
    assert batch.decode_steps == 59


async def test_rows_are_computed_only_while_they_live():
    policy, batch = endless_decoder(8)
    lengths = [3, 17, 5, 40, 1, 8, 8, 22, 2, 9, 31, 4]
    shapes = forward_shapes(policy)
    batch.add(jobs_of(policy, *lengths))
    finished = run(batch)
    assert sorted(len(completion.token_ids) for _, completion in finished) == sorted(lengths)
    decoded = [rows for rows, tokens in shapes if tokens == 1]
    assert sum(decoded) == sum(length - 1 for length in lengths)
    assert max(decoded) <= 8


@pytest.mark.parametrize("sequences_in_flight", [2, 8, 100])
async def test_a_prompt_is_computed_once_for_its_group(sequences_in_flight):
    policy, batch = endless_decoder(sequences_in_flight)
    shapes = forward_shapes(policy)
    requests = [request_for(policy, f"{index:02d}+11=", f"g{index}") for index in range(5)]
    batch.add([Job(request, SamplingParameters(6, 3), Stream(6)) for request in requests])
    assert len(run(batch)) == 30
    assert sum(rows for rows, tokens in shapes if tokens > 1) == 5


async def test_prefill_is_cut_to_its_token_budget(monkeypatch):
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 20)
    policy, batch = endless_decoder(100)
    shapes = forward_shapes(policy)
    texts = ["1" * 30, "2", "3", "4" * 8, "5" * 8, "6"]
    batch.add([Job(request_for(policy, text), SamplingParameters(2, 2), Stream(2)) for text in texts])
    assert len(run(batch)) == 12
    prefills = [shape for shape in shapes if shape[1] > 1]
    assert sum(rows for rows, _ in prefills) == 6
    assert all(rows * tokens <= 20 or rows == 1 for rows, tokens in prefills)


async def test_many_lengths_beyond_the_cache_chunk_agree_with_a_plain_forward_pass():
    """Rows grow past several chunks of slots while others come and go."""
    policy = with_eos(make_policy())
    requests = [request_for(policy, "1" * count, f"g{count}") for count in (1, 70, 3, 130, 20)]
    sampling = SamplingParameters(2, 90, seed=3)
    completions = await generated(policy, requests, sampling, sequences_in_flight=3)
    for request in requests:
        completion = completions[request.group_id, 1]
        assert len(completion.token_ids) == 90
        expected = plain_log_probabilities(policy, request.prompt.token_ids, completion.token_ids, sampling)
        np.testing.assert_allclose(completion.log_probabilities, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("eos_ids", [(7, 2), (2, 7)])
async def test_any_of_several_eos_ids_ends_a_completion(eos_ids):
    """After 4 the policy says 5 7, after 6 it says 9 2; the id that fills up tensors is 2, one of the two."""
    policy = with_eos(scripted_policy({4: 5, 5: 7, 7: 7, 6: 9, 9: 2, 2: 2}), *eos_ids)
    texts = {4: "0", 6: "2"}
    sampling = SamplingParameters(2, 8)
    completions = await generated(policy, [request_for(policy, texts[4]), request_for(policy, texts[6])], sampling)
    replies = [completion.token_ids.tolist() for completion in completions.values()]
    assert sorted(replies) == [[5, 7], [5, 7], [9, 2], [9, 2]]
    assert {completion.finish_reason for completion in completions.values()} == {"stop"}
    assert {completion.text for completion in completions.values()} == {"1", "5"}


async def test_an_eos_as_the_last_allowed_token_is_no_truncation():
    policy = scripted_policy({4: 5, 5: 2})
    for limit, reply, reason in [(1, [5], "length"), (2, [5, 2], "stop"), (3, [5, 2], "stop")]:
        (completion,) = (await generated(policy, [request_for(policy, "0")], SamplingParameters(1, limit))).values()
        assert (completion.token_ids.tolist(), completion.finish_reason) == (reply, reason)


async def test_a_completion_is_cut_at_the_first_eos_of_the_endless_one():
    policy = with_eos(make_policy())
    requests, sampling = requests_for(policy, 6), SamplingParameters(3, 40, seed=2)
    endless = await generated(policy, requests, sampling)
    ended = await generated(with_eos(policy, 11, 30), requests, sampling)
    for key, completion in endless.items():
        tokens = completion.token_ids.tolist()
        first = min((tokens.index(eos) for eos in (11, 30) if eos in tokens), default=None)
        expected = tokens if first is None else tokens[: first + 1]
        assert ended[key].token_ids.tolist() == expected
        assert ended[key].finish_reason == ("length" if first is None else "stop")


@pytest.mark.parametrize(
    ("stop", "tokens", "text"),
    [
        (("3",), "123", "12"),
        (("34", "zz"), "1234", "12"),
        (("45", "34"), "1234", "12"),
        (("78901",), "12345678901", "123456"),
        (("x",), "123456789012", "123456789012"),
    ],
)
async def test_a_stop_text_ends_a_completion_and_its_text(stop, tokens, text):
    """The policy counts 1 2 3 …; its tokens are kept up to the one that completes the stop text."""
    digits = {4 + digit: 4 + (digit + 1) % 10 for digit in range(10)}
    policy = scripted_policy(digits)
    sampling = SamplingParameters(1, 12, stop=stop)
    (completion,) = (await generated(policy, [request_for(policy, "0")], sampling)).values()
    assert policy.tokenizer.decode(completion.token_ids) == tokens
    assert completion.text == text
    assert completion.finish_reason == ("length" if stop == ("x",) else "stop")


async def test_a_stop_text_is_found_in_a_long_completion():
    policy = with_eos(make_policy())
    requests, sampling = requests_for(policy, 4), SamplingParameters(2, 120, seed=6)
    endless = await generated(policy, requests, sampling)
    stopped = await generated(policy, requests, SamplingParameters(2, 120, seed=6, stop=("ab", "7+", "q")))
    for key, completion in endless.items():
        found = [completion.text.find(text) for text in ("ab", "7+", "q") if text in completion.text]
        assert stopped[key].text == (completion.text[: min(found)] if found else completion.text)
        assert stopped[key].token_ids.tolist() == completion.token_ids.tolist()[: len(stopped[key].token_ids)]


async def test_ids_that_the_tokenizer_lacks_have_no_text():
    policy = make_policy("llama-tied")
    completions = await generated(policy, requests_for(policy, 8), SamplingParameters(8, 30, 2.0, seed=1))
    lacking = [completion for completion in completions.values() if (completion.token_ids >= 52).any()]
    assert lacking, "eight of sixty ids are beyond the tokenizer"
    for completion in lacking:
        known = [token for token in completion.token_ids.tolist() if 4 <= token < 52]
        assert completion.text == policy.tokenizer.decode(known)


@pytest.mark.parametrize("shape", SHAPES)
async def test_loaded_weights_take_effect_in_every_tensor(shape):
    """After a load the engine speaks for the new weights alone, the output head included."""
    old, new = make_policy(shape, seed=1), make_policy(shape, seed=2)
    engine = await loaded_engine(old)
    await engine.load_weights(PolicyVersion(1, 4), new.model.state_dict())
    request, sampling = request_for(new, "31+4="), SamplingParameters(4, 9, seed=3)
    completions = [completion async for completion in engine.generate([request], sampling)]
    await engine.close()
    for completion in completions:
        assert completion.version == PolicyVersion(1, 4)
        expected = plain_log_probabilities(new, request.prompt.token_ids, completion.token_ids, sampling)
        np.testing.assert_allclose(completion.log_probabilities, expected, atol=1e-5, rtol=0)


async def test_a_bfloat16_engine_loads_float32_weights():
    policy = make_policy()
    rounded = copy_policy(policy, torch.bfloat16)
    sampling = SamplingParameters(4, 8, seed=3)
    completions = await generated(policy, requests_for(policy, 4), sampling, dtype=torch.bfloat16)
    assert rounded.model.dtype == torch.bfloat16
    for request in requests_for(policy, 4):
        completion = completions[request.group_id, 0]
        expected = plain_log_probabilities(rounded, request.prompt.token_ids, completion.token_ids, sampling)
        assert completion.log_probabilities.dtype == np.float32
        np.testing.assert_allclose(completion.log_probabilities, expected, atol=0.15, rtol=0)


async def test_weights_that_are_no_numbers_fail_every_call_and_the_engine_lives_on():
    policy = make_policy()
    engine = await loaded_engine(policy, 4)
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in policy.model.state_dict().items()}
    await engine.load_weights(PolicyVersion(1, 9), broken)
    requests = requests_for(policy, 5)

    async def collect(seed):
        return [completion async for completion in engine.generate(requests, SamplingParameters(3, 6, seed=seed))]

    results = await asyncio.gather(*map(collect, range(3)), return_exceptions=True)
    assert all(isinstance(result, RuntimeError) and "0001-00000009" in str(result) for result in results)
    await engine.load_weights(PolicyVersion(1, 10), policy.model.state_dict())
    assert len(await collect(0)) == 15
    await engine.close()


@pytest.mark.parametrize("failing_pass", [1, 2, 4])
async def test_a_crash_in_a_forward_pass_reaches_the_caller(failing_pass):
    policy = copy_policy(with_eos(make_policy()), torch.float32)
    engine = TransformersEngine(policy, 4)
    await engine.load_weights(VERSION, policy.model.state_dict())
    passes = []

    def crash(module, args):
        passes.append(1)
        if len(passes) == failing_pass:
            raise MemoryError("no memory left")

    hook = policy.model.model.register_forward_pre_hook(crash)
    with pytest.raises(RuntimeError, match="no memory left"):
        _ = [c async for c in engine.generate(requests_for(policy, 3), SamplingParameters(2, 10))]
    hook.remove()
    assert engine.stats().in_flight == engine.stats().queued == 0
    assert len([c async for c in engine.generate(requests_for(policy, 3), SamplingParameters(2, 10))]) == 6
    await engine.close()


async def test_the_engine_can_be_used_from_one_event_loop_after_another():
    policy = make_policy()
    engine = await loaded_engine(policy)
    requests, sampling = requests_for(policy, 3), SamplingParameters(2, 5)

    async def collect():
        return len([completion async for completion in engine.generate(requests, sampling)])

    counts = await asyncio.gather(*(asyncio.to_thread(asyncio.run, collect()) for _ in range(3)))
    assert counts == [6, 6, 6]
    await engine.close()


def test_a_sliding_window_limits_the_positions_and_other_layers_are_refused():
    assert attention_reach(PreTrainedConfig()) == math.inf
    assert attention_reach(PreTrainedConfig(sliding_window=64)) == 64
    assert attention_reach(PreTrainedConfig(sliding_window=64, layer_types=["full_attention"])) == math.inf
    mixed = PreTrainedConfig(sliding_window=64, layer_types=["full_attention", "sliding_attention"])
    assert attention_reach(mixed) == 64
    with pytest.raises(ValueError, match="linear_attention"):
        attention_reach(PreTrainedConfig(layer_types=["linear_attention", "full_attention"]))
