"""Small policies of several shapes, and a policy whose replies are scripted."""

from dataclasses import replace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM

from gyre_core.config.sections import TinyModelConfig
from gyre_core.engines.transformers_engine import TransformersEngine
from gyre_core.policy.models import Policy, copy_policy, without_dropout
from gyre_core.policy.tiny import tiny_config, tiny_tokenizer
from gyre_core.policy.tokens import render_prompt, special_tokens
from gyre_core.types import GroupRequest, PolicyVersion, Prompt

VERSION = PolicyVersion(1, 3)


def make_policy(shape: str = "qwen3-tied", seed: int = 0) -> Policy:
    torch.manual_seed(seed)
    tied = shape.endswith("-tied")
    if shape.startswith("qwen3"):
        config = tiny_config(TinyModelConfig(hidden_size=32))
        config.tie_word_embeddings, config.initializer_range = tied, 0.15
        model = Qwen3ForCausalLM(config)
    else:
        config = LlamaConfig(
            vocab_size=60,  # Eight more than the tokenizer has.
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            initializer_range=0.15,
            eos_token_id=2,
        )
        model = LlamaForCausalLM(config)
    tokenizer = tiny_tokenizer()
    tokens = special_tokens(tokenizer, model.config, model.generation_config)
    return Policy(without_dropout(model), tokenizer, tokens, config.max_position_embeddings)


def scripted_policy(transitions: dict[int, int]) -> Policy:
    """A policy that follows each token by the one that `transitions` names, whatever came before."""
    config = tiny_config(TinyModelConfig(hidden_size=64, layers=1))
    config.tie_word_embeddings = False
    model = Qwen3ForCausalLM(config).requires_grad_(False)
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(config.vocab_size, 64))
    model.lm_head.weight.zero_()
    for token, follower in transitions.items():
        model.lm_head.weight[follower, token] = 100.0
    tokenizer = tiny_tokenizer()
    tokens = special_tokens(tokenizer, model.config, model.generation_config)
    return Policy(model, tokenizer, tokens, config.max_position_embeddings)


def with_eos(policy: Policy, *eos_ids: int) -> Policy:
    return replace(policy, tokens=replace(policy.tokens, eos_ids=eos_ids))


def request_for(policy: Policy, text: str, group_id: str | None = None) -> GroupRequest:
    rendered, token_ids = render_prompt(policy.tokenizer, text)
    return GroupRequest(group_id or f"group of {text}", Prompt(text, text, rendered, token_ids))


def requests_for(policy: Policy, count: int) -> list[GroupRequest]:
    """Prompts of one to twelve characters."""
    rng = np.random.default_rng(5)
    texts = ["".join(rng.choice(list("0123456789+="), rng.integers(1, 12))) for _ in range(count)]
    return [request_for(policy, text, f"g{index}") for index, text in enumerate(texts)]


async def loaded_engine(policy: Policy, sequences_in_flight: int = 16, dtype=torch.float32) -> TransformersEngine:
    engine = TransformersEngine(copy_policy(policy, dtype), sequences_in_flight)
    await engine.load_weights(VERSION, policy.model.state_dict())
    return engine


async def generated(policy, requests, sampling, sequences_in_flight=16, dtype=torch.float32):
    """All completions by (group, sample)."""
    engine = await loaded_engine(policy, sequences_in_flight, dtype)
    completions = [completion async for completion in engine.generate(requests, sampling)]
    await engine.close()
    by_key = {(completion.group_id, completion.sample_index): completion for completion in completions}
    assert len(by_key) == len(completions)
    return by_key
