"""How much memory logits take in the update: it follows the chunk, not the batch (case P2)."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from gyre_core.policy import logprobs
from gyre_core.policy.logprobs import packed_statistics, score_groups
from gyre_core.policy.packing import plan_micro_batches
from gyre_core.types import SamplingParameters

VOCABULARY = 5003
"""A size that no other dimension of the model has."""
SAMPLING = SamplingParameters(1, 99, temperature=0.7)
HIDDEN = 16
"""Rows of the head's weight, turned, and of its gradient, which are no logits."""
COPIES = 5
"""Logits, probabilities, and what the backward pass makes of them: what a chunk may take."""


class LogitsCounter(TorchDispatchMode):
    """Counts the rows of all tensors `[rows, VOCABULARY]` that are alive, and remembers the most."""

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[1:] == (VOCABULARY,) and len(tensor) != HIDDEN:
                storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
                self.alive.setdefault(storage.cdata, (storage, len(tensor)))
        self.most = max(self.most, sum(rows for _, rows in self.alive.values()))
        return result


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def make_groups(tokens):
    rng = np.random.default_rng(0)
    draw = lambda length: rng.integers(0, VOCABULARY, length).astype(np.int32)  # noqa: E731
    return [(draw(4), [draw(tokens // 8) for _ in range(8)])]


def most_rows(model, tokens, *, backward):
    """The most rows of logits that are alive in scoring so many tokens, and in learning from them."""
    groups = make_groups(tokens)
    with LogitsCounter() as counter:
        if not backward:
            score_groups(model, groups, SAMPLING, 10**6)
            return counter.most
        (micro_batch,) = plan_micro_batches(groups, 10**6, 10**6)
        packed_statistics(model, micro_batch, SAMPLING).log_probabilities.sum().backward()
    return counter.most


@pytest.mark.parametrize("backward", [True, False])
def test_the_peak_of_logits_follows_the_chunk(monkeypatch, backward):
    model = make_model()
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 20 * VOCABULARY)
    peak = most_rows(model, 128, backward=backward)
    assert 20 <= peak <= COPIES * 20
    assert most_rows(model, 512, backward=backward) == peak
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 40 * VOCABULARY)
    assert most_rows(model, 512, backward=backward) == 2 * peak
    # All at once, the counter sees what chunks avoid.
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 2**62)
    assert most_rows(model, 512, backward=backward) >= 512
