import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gyre_core.policy import logprobs
from gyre_core.policy.logprobs import (
    ReferenceModel,
    check_packed_forward,
    checkpoint_layers,
    packed_statistics,
    score_groups,
    token_statistics,
)
from gyre_core.policy.packing import PADDING, plan_micro_batches
from gyre_core.types import SamplingParameters

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
MODELS = {"qwen3": (Qwen3ForCausalLM, Qwen3Config), "llama": (LlamaForCausalLM, LlamaConfig)}
SAMPLING = SamplingParameters(samples=1, max_tokens=9)


def toy(kind, **changes):
    torch.manual_seed(0)
    model, config = MODELS[kind]
    return model(config(**SHAPE | changes)).eval()


def tokens(rng, length):
    return rng.integers(0, 31, size=length).astype(np.int32)


def plain(model, prompt, completion, temperature=1.0):
    token_ids = torch.from_numpy(np.concatenate([prompt, completion])).long()[None]
    with torch.no_grad():
        logits = model(token_ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    scores = torch.log_softmax(logits, -1)
    return scores[torch.arange(len(completion)), token_ids[0, len(prompt) :]], -(scores.exp() * scores).sum(-1)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
class TestSameTokensSameScores:
    def test_alone_padded_packed(self, kind, attention):
        """Sequences of 3 and 9 tokens: one by one, left-padded, right-padded, and as packed rows."""
        model = toy(kind, attn_implementation=attention)
        rng = np.random.default_rng(0)
        short, long = tokens(rng, 3), tokens(rng, 9)
        expected = torch.cat([plain(model, short[:1], short[1:])[0], plain(model, long[:1], long[1:])[0]])
        for budget in (1, 18, 1000):
            scored = score_groups(model, [(short[:1], [short[1:]]), (long[:1], [long[1:]])], SAMPLING, budget)
            torch.testing.assert_close(scored.log_probabilities, expected, atol=1e-5, rtol=0)
        for side in ("left", "right"):
            torch.testing.assert_close(_padded(model, short, long, side), expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    @pytest.mark.parametrize("seed", range(4))
    def test_groups_behind_one_prompt(self, kind, attention, temperature, seed):
        model = toy(kind, attn_implementation=attention)
        rng = np.random.default_rng(seed)
        groups = [
            (tokens(rng, rng.integers(1, 9)), [tokens(rng, rng.integers(1, 9)) for _ in range(5)]) for _ in range(4)
        ]
        sampled = SamplingParameters(samples=5, max_tokens=8, temperature=temperature)
        expected = [plain(model, prompt, completion, temperature) for prompt, group in groups for completion in group]
        for budget in (1, 40, 1000):
            scored = score_groups(model, groups, sampled, budget)
            for actual, column in ((scored.log_probabilities, 0), (scored.entropy, 1)):
                whole = torch.cat([scores[column] for scores in expected])
                torch.testing.assert_close(actual, whole, atol=1e-5, rtol=0, msg=f"seed {seed}, budget {budget}")

    def test_neighbours_and_padding_are_not_seen(self, kind, attention):
        """Other content in padding, in another row, or in a sibling behind the same prompt moves a score by 0."""
        model = toy(kind, attn_implementation=attention)
        rng = np.random.default_rng(1)
        groups = [
            (tokens(rng, 5), [tokens(rng, 4), tokens(rng, 3)]),
            (tokens(rng, 5), [tokens(rng, 6), tokens(rng, 2)]),
        ]
        (batch,) = plan_micro_batches(groups, budget=1000, hidden_size=1024)
        assert batch.shared
        assert batch.padded_tokens > 0
        segments, rows = batch.segments.ravel()[batch.sources], batch.sources // batch.token_ids.shape[1]
        # Row 0, the padding and the first completion of row 1 change; the prompt and second completion of row 1 stay.
        unmoved = torch.from_numpy((rows == 1) & (segments != 1))
        with torch.no_grad():
            before = packed_statistics(model, batch, SAMPLING).log_probabilities
            batch.token_ids[0] = (batch.token_ids[0] + 1) % 31
            batch.token_ids[batch.segments == PADDING] = 30
            batch.token_ids[1][batch.segments[1] == 1] = 7
            after = packed_statistics(model, batch, SAMPLING).log_probabilities
        assert unmoved.sum() >= 3
        assert torch.equal(before[unmoved], after[unmoved])
        assert not torch.equal(before[~unmoved], after[~unmoved])


def _padded(model, short, long, side):
    """Both sequences in one batch of transformers' own, with a two-dimensional mask."""
    token_ids, mask = torch.full((2, 9), 30), torch.zeros(2, 9, dtype=torch.long)
    places = slice(6, 9) if side == "left" else slice(0, 3)
    token_ids[0, places] = torch.from_numpy(short).long()
    mask[0, places] = 1
    token_ids[1], mask[1] = torch.from_numpy(long).long(), 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        scores = torch.log_softmax(model(token_ids, attention_mask=mask, position_ids=positions).logits, -1)
    picked = scores[:, :-1].gather(-1, token_ids[:, 1:, None])[..., 0]
    return torch.cat([picked[0, places.start : places.stop - 1], picked[1]])


def test_values_worked_out_by_hand():
    """A model with the logits 2 and 0 whatever it reads; at temperature 0.5 the first token has -0.0181."""
    model = toy("llama", vocab_size=2, tie_word_embeddings=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0.0 if "o_proj" in name or "down_proj" in name else 1.0)
        model.lm_head.weight[0], model.lm_head.weight[1] = 2.0 / 16, 0.0
    zero = np.zeros(1, dtype=np.int32)
    half = SamplingParameters(samples=1, max_tokens=1, temperature=0.5)
    assert score_groups(model, [(zero, [zero])], half, 10).log_probabilities.item() == pytest.approx(-0.0181, abs=1e-4)
    greedy = SamplingParameters(samples=1, max_tokens=1, top_k=1)
    scored = score_groups(model, [(zero, [zero, zero + 1])], greedy, 10, truncated=True)
    assert scored.truncated.tolist() == [0.0, -torch.inf]
    assert scored.log_probabilities.tolist() == pytest.approx([-0.1269, -2.1269], abs=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_chunks_change_neither_scores_nor_gradients(kind, monkeypatch):
    rng = np.random.default_rng(2)
    groups = [(tokens(rng, 4), [tokens(rng, 9) for _ in range(4)])]
    (batch,) = plan_micro_batches(groups, 1000, 1024)
    results = []
    for elements in (2**26, 31 * 5):  # everything at once, five positions at a time
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
        model = toy(kind)
        scored = packed_statistics(model, batch, SAMPLING)
        torch.autograd.backward(scored.log_probabilities.sum())
        results.append((scored, [parameter.grad for parameter in model.parameters()]))
    (whole, whole_gradients), (parts, parts_gradients) = results
    torch.testing.assert_close(parts.log_probabilities, whole.log_probabilities, atol=1e-5, rtol=0)
    torch.testing.assert_close(parts.entropy, whole.entropy, atol=1e-5, rtol=0)
    for actual, expected in zip(parts_gradients, whole_gradients, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("elements", [2**26, 31 * 5])
def test_entropy_has_a_gradient_only_when_asked_for(elements, monkeypatch):
    """Against plain autograd in float64; everything at once and five positions at a time."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
    model = toy("llama")
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(12, 16, generator=generator).requires_grad_()
    token_ids = np.arange(12, dtype=np.int64)
    half = SamplingParameters(samples=1, max_tokens=1, temperature=0.5)
    assert not token_statistics(model, states, token_ids, half).entropy.requires_grad
    entropy = token_statistics(model, states, token_ids, half, entropy_gradient=True).entropy
    (gradient,) = torch.autograd.grad(entropy.sum(), states)
    doubled = states.detach().double().requires_grad_()
    scores = torch.log_softmax(doubled @ model.lm_head.weight.detach().double().T / 0.5, -1)
    expected = -(scores.exp() * scores).sum(-1)
    torch.testing.assert_close(entropy.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient.double(), torch.autograd.grad(expected.sum(), doubled)[0], atol=1e-5, rtol=0)


def test_a_large_vocabulary_is_scored_alike_in_any_shape():
    model = toy("qwen3", vocab_size=150_000, hidden_size=8, head_dim=4, tie_word_embeddings=True)
    rng = np.random.default_rng(3)
    groups = [(tokens(rng, 3), [rng.integers(0, 150_000, size=5).astype(np.int32) for _ in range(8)])]
    narrow, wide = (score_groups(model, groups, SAMPLING, budget).log_probabilities for budget in (1, 1000))
    torch.testing.assert_close(narrow.exp() / wide.exp(), torch.ones(40), atol=1e-5, rtol=0)


class TestCheckPackedForward:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_common_models_pass(self, dtype):
        gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=4)).eval()
        for model in (toy("qwen3"), toy("llama"), gpt2):
            check_packed_forward(model.to(dtype))

    def test_a_head_that_scales_its_logits_is_refused(self):
        torch.manual_seed(0)
        model = GraniteForCausalLM(GraniteConfig(**SHAPE | {"logits_scaling": 4.0})).eval()
        with pytest.raises(ValueError, match=r"GraniteForCausalLM cannot be trained .* choose another model"):
            check_packed_forward(model)

    def test_active_dropout_is_refused(self):
        with pytest.raises(ValueError, match="differ"):
            check_packed_forward(toy("llama", attention_dropout=0.5).train())


def test_a_sequence_beyond_the_attention_window_is_refused():
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SHAPE | {"sliding_window": 16})).eval()
    reference = ReferenceModel(model, SAMPLING, 1000)
    ids = np.zeros(8, dtype=np.int32)
    # The last token is predicted from the 16 before it.
    assert len(reference.log_probabilities(ids, [np.zeros(9, dtype=np.int32)])[0]) == 9
    with pytest.raises(ValueError, match=r"18 tokens exceeds .* window of 16; lower rollout\.max_tokens"):
        reference.log_probabilities(ids, [np.zeros(10, dtype=np.int32)])


def test_a_model_without_layers_to_recompute_is_refused():
    with pytest.raises(ValueError, match=r"learning\.gradient_checkpointing"):
        checkpoint_layers(torch.nn.Linear(2, 2))


def test_reference_model_scores_groups_and_takes_no_gradient():
    model = toy("qwen3")
    reference = ReferenceModel(model, SamplingParameters(samples=3, max_tokens=9, temperature=0.7), 64)
    rng = np.random.default_rng(4)
    groups = [(tokens(rng, 4), [tokens(rng, length) for length in (1, 9, 5)]) for _ in range(3)]
    scored = reference.score(groups)
    for (prompt, completions), scores in zip(groups, scored, strict=True):
        alone = reference.log_probabilities(prompt, completions)
        for completion, score, single in zip(completions, scores, alone, strict=True):
            assert score.dtype == np.float32
            np.testing.assert_allclose(score, plain(model, prompt, completion, 0.7)[0], atol=1e-5)
            np.testing.assert_allclose(single, score, atol=1e-5)
    assert reference.score([]) == []
    assert not any(parameter.requires_grad for parameter in model.parameters())
