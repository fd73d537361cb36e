"""Laws that hold for every family of models, tied and untied, at toy size.

The vocabulary is larger than the tokenizer's, as it often is, and two tokens end a completion.
"""

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gyre_core.config.sections import LoRAConfig, ModelsConfig
from gyre_core.engines.transformers_engine import TransformersEngine
from gyre_core.policy.logprobs import check_packed_forward, packed_statistics, score_groups
from gyre_core.policy.lora import adapted_copy, merged_weights, trainable_parameters
from gyre_core.policy.models import copy_policy, load_policy, save_policy, without_dropout
from gyre_core.policy.packing import plan_micro_batches
from gyre_core.policy.tiny import tiny_tokenizer
from gyre_core.policy.tokens import decode
from gyre_core.types import GroupRequest, PolicyVersion, Prompt, SamplingParameters

FAMILIES = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 40, "sliding_window_pattern": 2}),
}
SHAPE = {
    "vocab_size": 60,  # Eight more than the tokenizer has.
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": [2, 14],
}
END_OF_SEQUENCE = (2, 14)
SEED = 0


@pytest.fixture(autouse=True)
def one_thread():
    """More threads only wait for each other on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[f"{family}-{head}" for family in FAMILIES for head in ("tied", "untied")])
def policy(request, tmp_path):
    """A policy of one family as a run has it: saved to a folder, and loaded from there."""
    family, head = request.param.split("-")
    model_type, config_type, more = FAMILIES[family]
    torch.manual_seed(SEED)
    model = without_dropout(model_type(config_type(**SHAPE, **more, tie_word_embeddings=head == "tied")))
    save_policy(tmp_path / "policy", model, tiny_tokenizer())
    loaded = load_policy(ModelsConfig(policy=str(tmp_path / "policy")), seed=0)
    assert type(loaded.model) is model_type
    parameters = dict(model.named_parameters())
    assert parameters.keys() == dict(loaded.model.named_parameters()).keys()
    assert ("lm_head.weight" in parameters) == (head == "untied")
    assert all(torch.equal(parameters[name], value) for name, value in loaded.model.named_parameters())
    return loaded


def make_groups(seed, counts=(3, 1, 4)):
    rng = np.random.default_rng(seed)
    return [(draw(rng, rng.integers(1, 8)), [draw(rng, rng.integers(1, 9)) for _ in range(count)]) for count in counts]


def draw(rng, length):
    return rng.integers(0, 60, size=length).astype(np.int32)


def plain_log_probabilities(model, prompt, completion, temperature):
    """By one forward pass of the whole model on one sequence, `[time]`."""
    token_ids = torch.from_numpy(np.concatenate([prompt, completion])).long()[None]
    logits = model(input_ids=token_ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, token_ids[0, len(prompt) :, None])[:, 0]


def request_for(group_id, prompt):
    return GroupRequest(group_id, Prompt(group_id, "?", "?", prompt))


async def generate(policy, weights, prompts, sampling):
    engine = TransformersEngine(copy_policy(policy, torch.float32), 5)
    await engine.load_weights(PolicyVersion(0, 1), weights)
    requests = [request_for(f"g{index}", prompt) for index, prompt in enumerate(prompts)]
    completions = [completion async for completion in engine.generate(requests, sampling)]
    await engine.close()
    return sorted(completions, key=lambda completion: (completion.group_id, completion.sample_index))


def test_packed_rows_score_and_learn_as_plain_ones(policy):
    groups, sampling = make_groups(1), SamplingParameters(1, 9, temperature=0.7)
    check_packed_forward(policy.model)
    expected = torch.cat(
        [
            plain_log_probabilities(policy.model, prompt, completion, 0.7)
            for prompt, completions in groups
            for completion in completions
        ]
    )
    expected.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}
    policy.model.zero_grad()
    scored = torch.empty(len(expected))
    for micro_batch in plan_micro_batches(groups, 32, SHAPE["hidden_size"]):
        statistics = packed_statistics(policy.model, micro_batch, sampling)
        statistics.log_probabilities.sum().backward()
        scored[torch.from_numpy(micro_batch.places)] = statistics.log_probabilities.detach()
    torch.testing.assert_close(scored, expected.detach(), atol=1e-5, rtol=0)
    for name, parameter in policy.model.named_parameters():
        scale = float(gradients[name].abs().max())
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5 * max(scale, 1.0), rtol=1e-4)


async def test_engine_and_learner_agree_after_every_change_of_the_weights(policy):
    """Also where head and embedding are one tensor."""
    prompts = [prompt for prompt, _ in make_groups(2)]
    sampling = SamplingParameters(4, 12, temperature=0.7, seed=SEED)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(SEED))
    completions = await generate(policy, merged_weights(policy.model), prompts, sampling)
    groups = [
        (prompt, [c.token_ids for c in completions if c.group_id == f"g{index}"])
        for index, prompt in enumerate(prompts)
    ]
    scored = score_groups(policy.model, groups, sampling, 64).log_probabilities
    sampled = np.concatenate([completion.log_probabilities for completion in completions])
    np.testing.assert_allclose(sampled, scored.numpy(), atol=1e-5, rtol=0)


async def test_greedy_generation_is_that_of_transformers(policy):
    assert policy.tokens.eos_ids == END_OF_SEQUENCE
    prompts = [prompt for prompt, _ in make_groups(3, counts=[1] * 8)]
    sampling = SamplingParameters(1, 24, temperature=0.0)
    completions = await generate(policy, policy.model.state_dict(), prompts, sampling)
    for prompt, completion in zip(prompts, completions, strict=True):
        token_ids = torch.from_numpy(prompt).long()[None]
        expected = policy.model.generate(
            token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=24, do_sample=False
        )[0, len(prompt) :].tolist()
        assert completion.token_ids.tolist() == expected
        assert (completion.finish_reason == "stop") == (expected[-1] in END_OF_SEQUENCE)


async def test_ids_beyond_the_tokenizer_are_sampled_and_scored_alike_and_have_no_text(policy):
    prompts = [prompt for prompt, _ in make_groups(4)]
    completions = await generate(policy, policy.model.state_dict(), prompts, SamplingParameters(8, 12, seed=SEED))
    assert max(completion.token_ids.max() for completion in completions) >= len(policy.tokenizer) == 52
    for completion in completions:
        known = [token for token in completion.token_ids.tolist() if token < 52 and token not in END_OF_SEQUENCE]
        assert completion.text == decode(policy.tokenizer, known)


async def test_merged_adapters_generate_what_the_adapted_model_scores(policy):
    adapted = adapted_copy(policy.model, LoRAConfig(rank=2), SEED)
    with torch.no_grad():
        for parameter in trainable_parameters(adapted).values():
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(SEED))
    (prompt, completions), *_ = make_groups(5)
    sampling = SamplingParameters(4, 12, seed=SEED)
    completions = await generate(policy, merged_weights(adapted), [prompt], sampling)
    scored = score_groups(adapted, [(prompt, [c.token_ids for c in completions])], sampling, 64).log_probabilities
    sampled = np.concatenate([completion.log_probabilities for completion in completions])
    np.testing.assert_allclose(sampled, scored.numpy(), atol=1e-5, rtol=0)


def test_sequences_beyond_gemma_3s_sliding_window_are_refused():
    model_type, config_type, more = FAMILIES["gemma3"]
    model = without_dropout(model_type(config_type(**SHAPE, **more)))
    sampling = SamplingParameters(1, 20)
    prompt = np.ones(20, dtype=np.int32)
    assert len(score_groups(model, [(prompt, [prompt])], sampling, 64).log_probabilities) == 20
    with pytest.raises(ValueError, match="attention window of 40"):
        score_groups(model, [(prompt, [np.ones(25, dtype=np.int32)])], sampling, 64)


def test_soft_caps_on_logits_are_refused_before_a_weight_is_read(tmp_path):
    save_policy(tmp_path, Gemma2ForCausalLM(Gemma2Config(**SHAPE)), tiny_tokenizer())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"gemma2 caps its logits softly \(attn_logit_softcapping, final_logit"):
        load_policy(ModelsConfig(policy=str(tmp_path)), seed=0)
