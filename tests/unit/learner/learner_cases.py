"""Toy models and groups for the learner's tests."""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gyre_core.config.sections import CriticConfig, LearningConfig
from gyre_core.learner.critic import Critic
from gyre_core.learner.local import LocalLearner
from gyre_core.policy.value_model import own_value_model, shared_value_model
from gyre_core.types import Minibatch, PolicyVersion, SamplingParameters, TrainingGroup

VOCABULARY = 23
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 8192,
}


def toy_model(kind="qwen3", seed=0, **changes):
    """Qwen3 with tied embeddings or Llama without, with logits large enough to tell mistakes from rounding."""
    torch.manual_seed(seed)
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"tie_word_embeddings": True} | changes)).eval()
    return LlamaForCausalLM(LlamaConfig(**SHAPE | {"tie_word_embeddings": False} | changes)).eval()


def sampling(**changes):
    return SamplingParameters(**{"samples": 4, "max_tokens": 12} | changes)


def random_groups(seed, count=4, size=4, reference=False, longest=12):
    """Groups of random tokens, advantages, draw weights and log-probabilities near those of a uniform policy."""
    rng = np.random.default_rng(seed)

    def tokens(length):
        return rng.integers(0, VOCABULARY, size=length).astype(np.int32)

    def log_probabilities(completions):
        return tuple(rng.normal(-3.0, 0.2, size=len(ids)).astype(np.float32) for ids in completions)

    groups = []
    for index in range(count):
        completions = tuple(tokens(length) for length in rng.integers(1, longest + 1, size=size))
        groups.append(
            TrainingGroup(
                group_id=f"group-{index}",
                prompt_ids=tokens(rng.integers(1, 9)),
                completions=completions,
                behaviour=log_probabilities(completions),
                reference=log_probabilities(completions) if reference else None,
                truncated=np.zeros(size, dtype=bool),
                rewards=np.zeros(size),
                advantages=rng.normal(size=size).astype(np.float32),
                version=PolicyVersion(0, 0),
                weight=float(rng.uniform(0.5, 2.0)),
            )
        )
    return groups


def make_learner(model=None, *, dtype=torch.float32, sampled=None, **settings):
    settings = {"max_grad_norm": 1e9, "betas": (0.5, 0.9), "lr": 1e-3} | settings
    model = toy_model() if model is None else model
    return LocalLearner(model, LearningConfig(**settings), sampling=sampled or sampling(), dtype=dtype)


def make_ppo_learner(
    model=None, *, trunk="own", dtype=torch.float32, sampled=None, critic=None, head_seed=0, **settings
):
    """A learner with a critic whose head is random, so that values differ; returns both and the value model."""
    settings = {"max_grad_norm": 1e9, "betas": (0.5, 0.9), "lr": 1e-3} | settings
    model = toy_model() if model is None else model
    values = shared_value_model(model) if trunk == "shared" else own_value_model(model, None)
    generator = torch.Generator().manual_seed(head_seed)
    for parameter in values.head.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    learning = LearningConfig(**settings)
    own = Critic(values, CriticConfig(trunk=trunk, **critic or {}), learning, dtype)
    learner = LocalLearner(model, learning, sampling=sampled or sampling(), dtype=dtype, critic=own)
    return learner, values


def minibatch(groups, lr=1e-3, kl_coef=0.0):
    return Minibatch(tuple(groups), lr, kl_coef)


def weights(learner):
    return {name: tensor.clone() for name, tensor in learner.policy_weights().items()}


def first_moments(learner):
    tensors, _ = learner.state()
    return {
        name.replace("first_moment.", ""): part.clone() for name, part in tensors.items() if "first_moment." in name
    }


def gradient_of(learner, batch, old):
    """The gradient of one more update, read off AdamW's first moment at beta1 = 0.5, after any clipping."""
    before = first_moments(learner)
    metrics = learner.apply(batch, old)
    after = first_moments(learner)
    return {name: 2.0 * after[name] - before[name] for name in after}, metrics


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def assert_close(actual, expected, tolerance):
    """Differences within `tolerance` of the largest element of all."""
    assert actual.keys() == expected.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name in expected:
        difference = float((actual[name] - expected[name]).abs().max())
        assert difference <= tolerance * scale, f"{name}: {difference / scale:.3g} of the largest"
