import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from gyre_core.policy.value_model import own_value_model, score_values, shared_value_model

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
GROUPS = [(np.arange(4, dtype=np.int32), [np.arange(5, dtype=np.int32), np.arange(7, dtype=np.int32)])]


def toy(kind=LlamaForCausalLM, seed=0, **changes):
    torch.manual_seed(seed)
    return kind(LlamaConfig(**SHAPE | changes)).eval()


@pytest.mark.parametrize("make", [shared_value_model, lambda policy: own_value_model(policy, None)])
def test_every_state_is_worth_0_before_training(make):
    assert score_values(make(toy()), GROUPS, 100).tolist() == [0.0] * 12


def test_what_belongs_to_the_critic():
    policy = toy()
    assert set(shared_value_model(policy).parameters()) == {"head.weight", "head.bias"}
    own = own_value_model(policy, None)
    assert set(own.parameters()) == {"head.weight", "head.bias"} | {
        f"trunk.{name}" for name, _ in policy.base_model.named_parameters()
    }
    shared_with_policy = {p.data_ptr() for p in own.parameters().values()} & {p.data_ptr() for p in policy.parameters()}
    assert not shared_with_policy


@pytest.mark.parametrize("kind", [LlamaForCausalLM, LlamaForSequenceClassification])
def test_a_trunk_of_its_own_comes_from_a_folder(kind, tmp_path):
    source = toy(kind, seed=1, num_hidden_layers=1, hidden_size=32, attention_dropout=0.3)
    source.to(torch.bfloat16).save_pretrained(tmp_path)
    model = own_value_model(toy(), str(tmp_path))
    assert model.head.in_features == 32
    for name, parameter in source.base_model.named_parameters():
        assert torch.equal(model.parameters()[f"trunk.{name}"], parameter.float())
    model.trunk.train()
    torch.nn.init.ones_(model.head.weight)
    assert torch.equal(score_values(model, GROUPS, 100), score_values(model, GROUPS, 100))


def test_another_vocabulary_is_refused(tmp_path):
    toy(vocab_size=31).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"models\.critic: .* vocabulary of 31 tokens and the policy one of 23"):
        own_value_model(toy(), str(tmp_path))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"models\.critic: .* cannot be read"):
        own_value_model(toy(), str(tmp_path))


def test_a_trunk_that_mixes_packed_completions_is_refused(tmp_path):
    """BERT's attention looks ahead whatever the mask of a causal model says."""
    torch.manual_seed(0)
    shape = {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    BertModel(BertConfig(**shape, intermediate_size=24, initializer_range=0.2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BertModel cannot be trained .* choose another model"):
        own_value_model(toy(), str(tmp_path))
