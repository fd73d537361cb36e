"""Reward models: sequence classifiers of one label that score a prompt with its completion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GenericForSequenceClassification

from gyre_core.config.sections import ModelsConfig
from gyre_core.policy.models import check_all_loaded, find_device, load_tokenizer, without_dropout
from gyre_core.policy.tokens import render_prompt
from gyre_core.types import Completion, Prompt

NO_TOKEN = -1
"""A padding id that no token has."""


@dataclass(frozen=True, slots=True)
class RewardModelSummary:
    """What a reward model is like, read without its weights."""

    architecture: str
    parameters: int


def inspect_reward_model(folder: str) -> RewardModelSummary:
    """What the reward model of a local folder is like, from its configuration alone.

    Raises ValueError for a folder that is missing or holds no sequence classifier of one label, and for a tokenizer
    that cannot be loaded.
    """
    config = _read_config(folder)
    load_tokenizer(folder)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    return RewardModelSummary(type(model).__name__, sum(parameter.numel() for parameter in model.parameters()))


def load_reward_model(models: ModelsConfig, tokens_per_batch: int) -> RewardModel:
    """The reward model that `models.reward` names, in `models.dtype` on `models.device`.

    Raises ValueError like `inspect_reward_model`, and for weights that are not all there.
    """
    folder = models.reward
    assert folder is not None, "a reward model is configured"
    dtype: torch.dtype = getattr(torch, models.dtype)
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            folder,
            config=_read_config(folder),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except OSError as error:
        raise ValueError(f"models.reward: the weights in {folder} cannot be read: {error}") from error
    model, report = loaded
    check_all_loaded(report, f"models.reward: the weights in {folder}")
    model = without_dropout(model).requires_grad_(False)
    torch.nn.Module.to(model, find_device(models.device))
    return RewardModel(model, load_tokenizer(folder), tokens_per_batch)


class RewardModel:
    """Scores completions with a sequence classifier, in batches of at most `tokens_per_batch` tokens.

    A score is a function of its row alone, whatever the batch, its order and the ids of padding. Decoders are given
    rows of different lengths, filled up on the right, and the score is read at each row's own last token; no earlier
    token sees the filling. Of other architectures it is not known where they look, so they get rows of one length.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens_per_batch: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._tokens_per_batch = tokens_per_batch
        self._mixes_lengths = isinstance(model, GenericForSequenceClassification)
        limits = (getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length)
        self._max_tokens = min(limit for limit in limits if limit is not None)
        # Architectures that look for the last token before the padding must not mistake an end of sequence for it.
        model.config.get_text_config().pad_token_id = NO_TOKEN

    def score(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[float | str | None]:
        """One score per row; for a row that the model cannot score, the reason."""
        outcomes: list[float | str | None] = [None] * len(pairs)
        sequences: dict[int, list[int]] = {}
        for row, pair in enumerate(pairs):
            try:
                sequences[row] = self.tokenize(*pair)
            except ValueError as error:
                outcomes[row] = str(error)
        for rows in self._batches(sequences):
            for row, value in zip(rows, self._forward([sequences[row] for row in rows]), strict=True):
                outcomes[row] = value if math.isfinite(value) else f"the reward model gave {value}"
        return outcomes

    def tokenize(self, prompt: Prompt, completion: Completion) -> list[int]:
        """The token ids of a row, `[time]`.

        The model's own chat template writes the row as a conversation, in which a prompt of text is the user's
        message; without a template, the row is the prompt's text with the completion behind it. Raises ValueError for
        messages that the template refuses, and for a row that is empty or too long for the model.
        """
        if self._tokenizer.chat_template is None:
            ids: list[int] = self._tokenizer(prompt.text + completion.text, verbose=False)["input_ids"]
        else:
            ids = render_prompt(self._tokenizer, self._conversation(prompt, completion))[1].tolist()
        if not 0 < len(ids) <= self._max_tokens:
            raise ValueError(
                f"prompt and completion are {len(ids)} tokens to the reward model, which takes 1 to {self._max_tokens}"
            )
        return ids

    def _conversation(self, prompt: Prompt, completion: Completion) -> str:
        asked = [{"role": "user", "content": prompt.prompt}] if isinstance(prompt.prompt, str) else prompt.prompt
        messages = [*asked, {"role": "assistant", "content": completion.text}]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except jinja2.TemplateError as error:
            raise ValueError(f"the reward model's chat template refuses the row's messages: {error}") from error
        assert isinstance(text, str)
        return text

    def _batches(self, sequences: dict[int, list[int]]) -> Iterator[list[int]]:
        """The rows, shortest first, in batches that stay within the tokens, filling included."""
        batch: list[int] = []
        for row in sorted(sequences, key=lambda row: len(sequences[row])):
            length = len(sequences[row])
            full = (len(batch) + 1) * length > self._tokens_per_batch
            if batch and (full or not (self._mixes_lengths or length == len(sequences[batch[0]]))):
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    @torch.inference_mode()
    def _forward(self, sequences: Sequence[list[int]]) -> list[float]:
        lengths = [len(sequence) for sequence in sequences]
        filled = [sequence + [0] * (max(lengths) - len(sequence)) for sequence in sequences]
        ids = torch.tensor(filled, device=self._model.device)
        model: Any = self._model
        if self._mixes_lengths:
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            values = model.score(hidden[torch.arange(len(lengths)), torch.tensor(lengths) - 1])
        else:
            values = model(input_ids=ids).logits
        return values.float().squeeze(-1).tolist()


def _read_config(folder: str) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(
            f"models.reward: {folder} does not exist or holds no readable config.json; give a Hugging Face folder on "
            f"this machine: {error}"
        ) from error
    kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    named = config.architectures or []
    if kind is None or kind.__name__ not in named:
        raise ValueError(
            f"models.reward: {folder} holds {', '.join(named) or config.model_type}, not a model for sequence "
            "classification"
        )
    if config.num_labels != 1:
        raise ValueError(
            f"models.reward: {folder} gives {config.num_labels} values for a text; a reward model gives one "
            "(num_labels 1)"
        )
    return config
