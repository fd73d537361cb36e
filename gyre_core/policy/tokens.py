"""Special tokens of a policy, and prompts as the policy sees them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
import xxhash
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from gyre_core.types import Tokens


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids that begin, end and fill sequences of one policy.

    `pad_id` only fills up tensors: what is padding is known from lengths, never from ids, so it may well be one of
    `eos_ids`.
    """

    bos_id: int | None
    """Begins every prompt where tokenizer or chat template use it; None where there is no such token."""
    eos_ids: tuple[int, ...]
    """Each of these ends a completion; empty where the policy has none."""
    pad_id: int


def special_tokens(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, generation: GenerationConfig | None
) -> SpecialTokens:
    """The special tokens by the word of tokenizer, model configuration and generation configuration together.

    The end-of-sequence ids are all those that any of the three names, in the order generation configuration, model
    configuration, tokenizer.
    """
    sources = (generation, config, tokenizer)
    eos_ids = tuple(dict.fromkeys(token for source in sources for token in _ids(source, "eos_token_id")))
    pad_ids = [token for source in (tokenizer, generation, config) for token in _ids(source, "pad_token_id")]
    return SpecialTokens(bos_id=_bos_id(tokenizer), eos_ids=eos_ids, pad_id=[*pad_ids, *eos_ids, 0][0])


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """xxh3-128 of the vocabulary and the chat template, in hexadecimal."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return xxhash.xxh3_128_hexdigest(json.dumps([vocabulary, tokenizer.chat_template], sort_keys=True).encode())


def render_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]]) -> tuple[str, Tokens]:
    """The prompt's text as the model sees it, and its token ids, `[prompt]`.

    Text is taken as it is; chat messages go through the tokenizer's chat template, which opens the reply. The ids
    begin with exactly one beginning-of-sequence token where tokenizer or template set one, and with none elsewhere;
    the tokenizer adds nothing at the end. Raises ValueError for messages without a usable template and for an empty
    prompt.
    """
    text = prompt if isinstance(prompt, str) else _apply_chat_template(tokenizer, prompt)
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos_id = _bos_id(tokenizer)
    if bos_id is not None and (token_ids[:1] == [bos_id] or _adds_bos(tokenizer)):
        first = next((index for index, token in enumerate(token_ids) if token != bos_id), len(token_ids))
        token_ids = [bos_id, *token_ids[first:]]
    if not token_ids:
        raise ValueError("the prompt is empty and the policy uses no beginning-of-sequence token; give it some text")
    return text, np.asarray(token_ids, dtype=np.int32)


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int]) -> str:
    """The text of a completion, special tokens left out; ids that the tokenizer lacks have no text."""
    return decode_all(tokenizer, [token_ids])[0]


def decode_all(tokenizer: PreTrainedTokenizerBase, completions: Iterable[Iterable[int]]) -> list[str]:
    """The text of each completion, as `decode` gives it."""
    size = len(tokenizer)
    known = [[token for token in token_ids if token < size] for token_ids in completions]
    if not known:
        return []
    texts = tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(texts, list)
    return texts


def _ids(source: object, name: str) -> list[int]:
    value: int | list[int] | None = getattr(source, name, None)
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _bos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    return next(iter(_ids(tokenizer, "bos_token_id")), None)


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer itself puts a beginning-of-sequence token before a text."""
    return tokenizer("", add_special_tokens=True)["input_ids"][:1] == [_bos_id(tokenizer)]


def _apply_chat_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    if tokenizer.chat_template is None:
        raise ValueError("the prompt is a list of messages, but the policy has no chat template; give it as text")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise ValueError(f"the policy's chat template refuses the prompt's messages: {error}") from error
    assert isinstance(text, str)
    return text
