"""`tiny-qwen3`: a small Qwen3 policy and its tokenizer, made on the spot."""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from gyre_core.config.sections import TinyModelConfig

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_CHARACTERS = "0123456789+-*=> .:,()/abcdefghijklmnopqrstuvwxyz"
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_HEADS = 4


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: digits, lower-case letters and some signs; others become `<unk>`.

    A text gets `<bos>` in front; the chat template joins the contents of the messages.
    """
    vocabulary = {token: token_id for token_id, token in enumerate((*_SPECIAL, *_CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=_CHAT_TEMPLATE,
    )


def tiny_config(shape: TinyModelConfig) -> Qwen3Config:
    """The Qwen3 configuration of a tiny policy."""
    assert shape.hidden_size % (2 * _HEADS) == 0, "heads of an even width, for rotary positions"
    return Qwen3Config(
        vocab_size=len(_SPECIAL) + len(_CHARACTERS),
        hidden_size=shape.hidden_size,
        intermediate_size=2 * shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS // 2,
        head_dim=shape.hidden_size // _HEADS,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def tiny_model(shape: TinyModelConfig, seed: int) -> Qwen3ForCausalLM:
    """A tiny policy with random weights that are a function of `seed`, in float32.

    The global random state is as before.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(tiny_config(shape))
