"""Low-rank adapters: the base stays, merged weights compute the same, and PEFT reads what is saved."""

import sys

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from gyre_core.config.sections import LoRAConfig, TinyModelConfig
from gyre_core.policy.logprobs import check_packed_forward, checkpoint_layers
from gyre_core.policy.lora import (
    adapted_copy,
    adapter_elements,
    add_adapters,
    merged_weights,
    require_peft,
    save_adapters,
    trainable_parameters,
)
from gyre_core.policy.models import copy_weights, without_dropout
from gyre_core.policy.tiny import tiny_model

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
SETTINGS = LoRAConfig(rank=3)


def make_model(kind, seed=0):
    torch.manual_seed(seed)
    if kind == "tied":
        return without_dropout(tiny_model(TinyModelConfig(hidden_size=16, layers=2), seed))
    if kind == "biased":  # Qwen2 has biases in its attention.
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_()
        return without_dropout(model)
    return without_dropout(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)))


def move_adapters(model, seed=1):
    """Give A and B values as training would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trainable_parameters(model).values():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


def logits(model):
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


@pytest.fixture(params=["tied", "biased", "untied"])
def kind(request):
    return request.param


def test_a_fresh_adapter_changes_nothing(kind):
    base, adapted = make_model(kind), make_model(kind)
    names = [name for name, _ in base.named_parameters()]
    add_adapters(adapted, SETTINGS, 7)
    assert torch.equal(logits(adapted), logits(base))
    merged = merged_weights(adapted)
    assert list(merged) == names
    assert all(torch.equal(merged[name], parameter) for name, parameter in base.named_parameters())
    check_packed_forward(adapted)


def test_only_adapters_are_trained(kind):
    model = make_model(kind)
    add_adapters(model, SETTINGS, 7)
    model(TOKENS).logits.logsumexp(-1).sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == set(trainable_parameters(model))
    assert adapter_elements(make_model(kind), SETTINGS) == sum(
        parameter.numel() for parameter in trainable_parameters(model).values()
    )
    # 7 linear layers in each of 2 blocks, 2 matrices each.
    assert len(with_gradient) == 28
    assert all(".lora_" in name for name in with_gradient)


def test_recomputed_layers_give_the_same_gradients(kind):
    def gradients(recomputed):
        model = make_model(kind)
        add_adapters(model, SETTINGS, 7)
        move_adapters(model)
        if recomputed:
            checkpoint_layers(model)
        model(TOKENS, use_cache=False).logits.logsumexp(-1).sum().backward()
        return [parameter.grad for parameter in trainable_parameters(model).values()]

    for actual, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(actual, expected)


def test_merged_weights_compute_the_same(kind):
    adapted, plain = make_model(kind), make_model(kind)
    add_adapters(adapted, LoRAConfig(rank=3, alpha=5.0), 7)
    move_adapters(adapted)
    assert (logits(adapted) - logits(plain)).abs().max() > 0.01
    copy_weights(plain, merged_weights(adapted))
    torch.testing.assert_close(logits(plain), logits(adapted), atol=1e-5, rtol=1e-5)
    check_packed_forward(adapted)


def test_a_merged_weight_by_hand():
    model = make_model("untied")
    base = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    add_adapters(model, LoRAConfig(rank=2, alpha=6.0, targets=("up_proj",)), 0)
    move_adapters(model)
    layer = model.model.layers[0].mlp.up_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = base + 6.0 / 2 * b @ a
    torch.testing.assert_close(merged_weights(model)["model.layers.0.mlp.up_proj.weight"], expected)


def test_alpha_is_twice_the_rank_by_default():
    model = make_model("untied")
    add_adapters(model, SETTINGS, 0)
    assert model.model.layers[1].self_attn.q_proj.scaling == {"default": 2.0}


def test_without_adapters_everything_is_trained_and_nothing_is_merged(kind):
    model = make_model(kind)
    parameters = dict(model.named_parameters())
    trained = trainable_parameters(model)
    assert list(trained) == list(parameters)
    assert all(trained[name] is parameters[name] for name in parameters)
    merged = merged_weights(model)
    assert list(merged) == list(parameters)
    assert all(merged[name].data_ptr() == parameters[name].data_ptr() for name in parameters)


def test_adapters_are_a_function_of_the_seed():
    def matrices(seed):
        model = make_model("untied")
        before = torch.get_rng_state()
        add_adapters(model, SETTINGS, seed)
        assert torch.equal(torch.get_rng_state(), before)
        return trainable_parameters(model)

    first, again, other = matrices(1), matrices(1), matrices(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_copy_shares_the_base_and_leaves_it_alone(kind):
    base = make_model(kind).requires_grad_(False)
    expected = logits(base)
    pointers = {parameter.data_ptr() for parameter in base.parameters()}
    adapted = adapted_copy(base, SETTINGS, 7)
    own = {parameter.data_ptr() for parameter in adapted.parameters()} - pointers
    assert len(own) == len(trainable_parameters(adapted)) == 28
    move_adapters(adapted)
    assert not torch.equal(logits(adapted), expected)
    assert torch.equal(logits(base), expected)
    assert not any(parameter.requires_grad for parameter in base.parameters())
    assert not any(".lora_" in name for name, _ in base.named_parameters())


def test_bfloat16_weights_are_merged_in_float32_and_rounded_once():
    model = make_model("untied").to(torch.bfloat16)
    add_adapters(model, SETTINGS, 0)
    move_adapters(model)
    layer = model.model.layers[0].self_attn.v_proj
    assert layer.lora_A["default"].weight.dtype == torch.float32
    exact = layer.weight.double() + 2.0 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).double()
    merged = merged_weights(model)["model.layers.0.self_attn.v_proj.weight"]
    assert merged.dtype == torch.bfloat16
    torch.testing.assert_close(merged, exact.to(torch.bfloat16), atol=0, rtol=2**-8)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks transformers for it.
def test_peft_loads_what_is_saved(tmp_path, kind):
    """Learner's forward, merged weights, and PEFT's own loader agree."""
    adapted = make_model(kind)
    add_adapters(adapted, LoRAConfig(rank=3, alpha=4.0), 7)
    move_adapters(adapted)
    save_adapters(tmp_path / "adapter", adapted, "some/base")
    loaded = peft.PeftModel.from_pretrained(make_model(kind), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(adapted), atol=1e-5, rtol=1e-5)
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path == "some/base"
    torch.testing.assert_close(logits(loaded.merge_and_unload()), logits(adapted), atol=1e-5, rtol=1e-5)
    assert not any(path.suffix in (".bin", ".pt", ".pkl") for path in (tmp_path / "adapter").iterdir())


@pytest.mark.parametrize(
    "targets", [("nose",), ("q_proj", "nose"), ("lm_head",), ("embed_tokens",), ("all-linear", "x")]
)
def test_targets_that_cannot_be_adapted_are_named(targets):
    model = make_model("untied")
    with pytest.raises(ValueError, match=rf"models.lora.targets: LlamaForCausalLM .*{targets[-1]}.*down_proj"):
        add_adapters(model, LoRAConfig(rank=2, targets=targets), 0)
    assert len(trainable_parameters(model)) == len(list(model.parameters()))


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install gyre\[lora\]"):
        require_peft()
