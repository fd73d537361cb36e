"""Loading and saving policies."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from gyre_core.config.sections import ModelsConfig
from gyre_core.policy.models import (
    copy_policy,
    copy_weights,
    find_device,
    inspect_policy,
    load_model,
    load_policy,
    save_policy,
    without_dropout,
)
from gyre_core.policy.tiny import tiny_tokenizer
from gyre_core.policy.tokens import render_prompt

SIZES = {
    "vocab_size": 52,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
KINDS = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def make_model(kind, tied=True, **settings):
    config_type, model_type = KINDS[kind]
    return model_type(config_type(**SIZES, tie_word_embeddings=tied, **settings))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_policy_loads_again(tmp_path, kind, tied):
    model = make_model(kind, tied)
    save_policy(tmp_path, model, tiny_tokenizer())
    policy = load_policy(ModelsConfig(policy=str(tmp_path)), seed=0)
    state = policy.model.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert (policy.tokens.eos_ids, policy.tokens.bos_id, policy.max_positions) == ((2, 3), 1, 99)
    hub = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert torch.equal(hub.lm_head.weight, model.lm_head.weight)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    messages = [{"role": "user", "content": "1+2="}]
    assert render_prompt(tokenizer, messages)[1].tolist() == render_prompt(tiny_tokenizer(), "1+2=")[1].tolist()


def test_the_master_copy_is_float32_whatever_the_folder_holds(tmp_path):
    save_policy(tmp_path, make_model("qwen3").bfloat16(), tiny_tokenizer())
    assert load_policy(ModelsConfig(policy=str(tmp_path)), seed=0).model.dtype == torch.float32
    assert load_model(tmp_path, torch.bfloat16).dtype == torch.bfloat16
    assert inspect_policy(str(tmp_path)).dtype == "bfloat16"


def test_a_tiny_policy_is_a_function_of_its_seed_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    first, again, other = (load_policy(ModelsConfig(), seed).model.state_dict() for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_tiny_policy_has_the_stated_size():
    """52 embeddings of 64; per layer 12,288 in attention, 24,576 in the MLP, 160 norms; 64 in the last norm."""
    assert inspect_policy("tiny-qwen3").parameters == 52 * 64 + 2 * (12_288 + 24_576 + 160) + 64 == 77_440


@pytest.mark.parametrize("kind", KINDS)
def test_inspection_agrees_with_the_loaded_model(tmp_path, kind):
    model = make_model(kind, tied=False)
    save_policy(tmp_path, model, tiny_tokenizer())
    (tmp_path / "model.safetensors").unlink()  # It reads no weights.
    summary = inspect_policy(str(tmp_path))
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (summary.architecture, summary.vocabulary, summary.max_positions) == (type(model).__name__, 52, 99)
    assert (summary.layers, summary.hidden_size) == (2, 16)
    cache = model(torch.arange(3)[None], use_cache=True).past_key_values
    assert summary.cache_elements * 3 == sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)


def test_dropout_is_off_in_either_mode():
    model = without_dropout(make_model("qwen3", attention_dropout=0.1))
    token_ids = torch.arange(4, 24)[None]
    expected = model(token_ids).logits
    assert not model.training
    model.train()
    assert torch.equal(model(token_ids).logits, expected)


def refused(source, match):
    with pytest.raises(ValueError, match=match):
        inspect_policy(str(source))
    with pytest.raises(ValueError, match=match):
        load_policy(ModelsConfig(policy=str(source)), seed=0)


def test_a_missing_folder_is_refused(tmp_path):
    refused(tmp_path / "nothing", "does not exist or holds no config.json")
    refused("organisation/model", "give a Hugging Face folder on this machine")


def test_folders_of_other_models_are_refused(tmp_path):
    bert = BertForMaskedLM(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    bert.save_pretrained(tmp_path / "bert")
    refused(tmp_path / "bert", "holds BertForMaskedLM, not a causal LM")
    Qwen3ForSequenceClassification(Qwen3Config(**SIZES)).save_pretrained(tmp_path / "reward")
    refused(tmp_path / "reward", "holds Qwen3ForSequenceClassification, not a causal LM")


@pytest.mark.parametrize("content", ["{", "{}", '{"model_type": "no-such-model"}'])
def test_an_unreadable_configuration_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    refused(tmp_path, "config.json cannot be read")


def test_missing_weights_are_refused_by_name(tmp_path):
    save_policy(tmp_path, make_model("llama"), tiny_tokenizer())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"its weights lack model\.layers\.2\."):
        load_model(tmp_path, torch.float32)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="its weights cannot be read"):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_tokenizer_is_refused(tmp_path, kind):
    make_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"its tokenizer (cannot be loaded|has no vocabulary)"):
        load_policy(ModelsConfig(policy=str(tmp_path)), seed=0)


def test_a_copy_is_apart_and_casts_weights_alone():
    policy = load_policy(ModelsConfig(), seed=0)
    copied = copy_policy(policy, torch.bfloat16)
    assert {parameter.dtype for parameter in copied.model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in copied.model.buffers()} == {torch.float32}
    assert copied.model.lm_head.weight is copied.model.model.embed_tokens.weight
    with torch.no_grad():
        policy.model.lm_head.weight.zero_()
    assert copied.model.lm_head.weight.any()
    assert all(parameter.requires_grad for parameter in policy.model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_copied_weights_make_the_same_function(kind, tied):
    source, target = make_model(kind, tied).eval(), make_model(kind, tied).eval()
    copy_weights(target, source.state_dict())
    token_ids = torch.arange(4, 24)[None]
    assert torch.equal(target(token_ids).logits, source(token_ids).logits)


def test_one_name_of_tied_weights_suffices():
    source, target = make_model("llama").eval(), make_model("llama").eval()
    weights = source.state_dict()
    del weights["lm_head.weight"]
    copy_weights(target, weights)
    assert torch.equal(target.lm_head.weight, source.lm_head.weight)


def changed(weights, name, tensor):
    return {**weights, name: tensor}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: {name: w[name] for name in w if name != "model.norm.weight"}, r"lack model\.norm\.weight"),
        (lambda w: changed(w, "model.extra", torch.zeros(1)), r"model\.extra, which the model lacks"),
        (lambda w: changed(w, "model.norm.weight", torch.zeros(3)), r"norm\.weight has shape \(3,\); .* \(16,\)"),
        (lambda w: changed(w, "lm_head.weight", w["lm_head.weight"] + 1), r"lm_head\.weight differs"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(change, match):
    source, target = make_model("qwen3"), make_model("qwen3")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(ValueError, match=match):
        copy_weights(target, change(source.state_dict()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


def test_models_without_a_limit_of_positions_are_refused(tmp_path):
    config = BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    refused(tmp_path, "states no max_position_embeddings")


def test_the_device_is_the_one_that_is_asked_for_and_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [find_device(name).type for name in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ValueError, match=r"models.device: cuda is asked for, but torch sees no GPU"):
        find_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [find_device(name).type for name in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
