"""Reward models: a score is a function of its row alone."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from gyre_core.config.sections import ModelsConfig
from gyre_core.policy.reward_model import inspect_reward_model, load_reward_model
from gyre_core.policy.tiny import tiny_tokenizer
from gyre_core.types import Completion, PolicyVersion, Prompt

COMMON = {"vocab_size": 56, "num_labels": 1}
DECODER = {
    **COMMON,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 60,
    "initializer_range": 0.5,
}
GPT2 = {**COMMON, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 60, "initializer_range": 0.5}
BERT = {
    **COMMON,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 60,
    "initializer_range": 0.5,
}
KINDS = {
    "qwen3": lambda **ids: Qwen3ForSequenceClassification(Qwen3Config(**DECODER, head_dim=8, **ids)),
    "llama": lambda **ids: LlamaForSequenceClassification(LlamaConfig(**DECODER, **ids)),
    "gpt2": lambda **ids: GPT2ForSequenceClassification(GPT2Config(**GPT2, **ids)),
    "bert": lambda **ids: BertForSequenceClassification(BertConfig(**BERT, **ids)),
}
TEXTS = ["4", "four", "", "12", "a longer answer", "7", "<eos>", "4<eos>", "2+2"]
TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}<eos>{% endfor %}"


def save(folder, kind="qwen3", *, template=None, model=None, **ids):
    torch.manual_seed(11)
    (model or KINDS[kind](**ids)).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    if ids.get("pad_token_id") == 2:
        tokenizer.pad_token = "<eos>"
    tokenizer.save_pretrained(folder)
    return folder


def load(folder, tokens_per_batch=64, **settings):
    return load_reward_model(ModelsConfig(reward=str(folder), **settings), tokens_per_batch)


def pair(text, prompt="2+2="):
    row = Prompt("p", prompt, prompt if isinstance(prompt, str) else "as text", np.arange(2, dtype=np.int32), {})
    version = PolicyVersion(1, 1)
    zeros = np.zeros(1, np.float32)
    return row, Completion("g", 0, np.zeros(1, np.int32), zeros, text, "stop", version, 0.0, 1.0)


@pytest.mark.parametrize("ids", [{"pad_token_id": None}, {"pad_token_id": 2, "eos_token_id": 2}, {"pad_token_id": 0}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_score_is_the_same_alone_in_a_batch_and_in_any_order(tmp_path, kind, ids):
    if kind == "bert" and ids["pad_token_id"] is None:
        ids = {"pad_token_id": 5}
    folder = save(tmp_path, kind, **ids)
    pairs = [pair(text) for text in TEXTS]
    single = load(folder)
    alone = [single.score([row])[0] for row in pairs]
    assert len(set(alone)) == len(TEXTS)
    for limit in (20, 10_000):
        model = load(folder, limit)
        assert model.score(pairs) == pytest.approx(alone, abs=1e-5)
        assert model.score(pairs[::-1]) == pytest.approx(alone[::-1], abs=1e-5)
    assert max(alone) - min(alone) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_is_the_model_s_own_of_the_whole_row(tmp_path, kind):
    # Without a padding id, transformers reads the score of decoders at the last token.
    folder = save(tmp_path, kind, pad_token_id=5)
    reference = KINDS[kind](pad_token_id=5).from_pretrained(folder).eval()
    tokenizer = tiny_tokenizer()
    for text in ("4", "a longer answer"):
        ids = torch.tensor([tokenizer("2+2=" + text)["input_ids"]])
        assert 5 not in ids
        with torch.inference_mode():
            expected = reference(input_ids=ids).logits.item()
        assert load(folder).score([pair(text)]) == [pytest.approx(expected, abs=1e-5)]


def test_messages_go_through_the_model_s_own_template(tmp_path):
    model = load(save(tmp_path, template=TEMPLATE))
    tokenizer = tiny_tokenizer()
    as_text = model.tokenize(*pair("4", "2+2="))
    assert as_text == model.tokenize(*pair("4", [{"role": "user", "content": "2+2="}]))
    assert as_text == tokenizer("u:2+2=<eos>a:4<eos>")["input_ids"]
    longer = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    assert model.tokenize(*pair("4", longer)) == tokenizer("s:be<eos>u:hi<eos>a:4<eos>")["input_ids"]


def test_without_a_template_the_completion_follows_the_prompt_s_text(tmp_path):
    model = load(save(tmp_path))
    tokenizer = tiny_tokenizer()
    assert model.tokenize(*pair("4")) == tokenizer("2+2=4")["input_ids"]
    assert model.tokenize(*pair("4", [{"role": "user", "content": "x"}])) == tokenizer("as text4")["input_ids"]


def test_rows_that_cannot_be_scored_fail_alone(tmp_path):
    refusing = "{% if messages[-1]['content'] == 'no' %}{{ raise_exception('never') }}{% endif %}" + TEMPLATE
    model = load(save(tmp_path, template=refusing))
    scores = model.score([pair("4"), pair("1" * 80), pair("no"), pair("5")])
    assert [type(score) for score in scores] == [float, str, str, float]
    assert "tokens to the reward model, which takes 1 to 60" in scores[1]
    assert "template refuses the row's messages: never" in scores[2]
    assert model.score([]) == []


def test_a_score_that_is_not_finite_fails_its_row(tmp_path):
    torch.manual_seed(11)
    model = KINDS["qwen3"]()
    torch.nn.init.constant_(model.score.weight, math.nan)
    assert load(save(tmp_path, model=model)).score([pair("4")]) == ["the reward model gave nan"]


def test_the_model_computes_in_the_configured_type(tmp_path):
    folder = save(tmp_path)
    [exact], [rounded] = load(folder).score([pair("4")]), load(folder, dtype="bfloat16").score([pair("4")])
    assert exact != rounded
    assert exact == pytest.approx(rounded, abs=0.2)


def test_what_a_reward_model_is_like_is_known_without_its_weights(tmp_path):
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    summary = inspect_reward_model(str(tmp_path))
    parameters = sum(parameter.numel() for parameter in KINDS["qwen3"]().parameters())
    assert (summary.architecture, summary.parameters) == ("Qwen3ForSequenceClassification", parameters)
    with pytest.raises(ValueError, match=r"weights in .* cannot be read"):
        load(tmp_path)


def test_folders_that_hold_no_reward_model_are_told(tmp_path):
    with pytest.raises(ValueError, match=r"models.reward: .*/none does not exist or holds no readable config.json"):
        inspect_reward_model(str(tmp_path / "none"))
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, message in [
        ({"architectures": ["Qwen3ForCausalLM"]}, "holds Qwen3ForCausalLM, not a model for sequence classification"),
        ({"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}, "gives 2 values for a text"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=message):
            inspect_reward_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer"):
        inspect_reward_model(str(tmp_path))


def test_weights_without_a_head_are_refused(tmp_path):
    torch.manual_seed(11)
    model = KINDS["qwen3"]()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "score.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lack score\.weight and 0 others"):
        load(tmp_path)
