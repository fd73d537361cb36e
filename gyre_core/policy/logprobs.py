"""Log-probabilities of completions under a model, from rows that share a prompt.

All are temperature-scaled, computed in float32 whatever the model computes in, and without dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from gyre_core.policy.packing import MicroBatch, PromptCompletions, plan_micro_batches
from gyre_core.policy.sampling import truncated_log_probabilities
from gyre_core.types import LogProbabilities, SamplingParameters, Tokens

CausalLM = PreTrainedModel
"""A causal language model of transformers: a base model and a linear head over the vocabulary."""

CHUNK_ELEMENTS = 2**26
"""Logits held at the same time, 256 MiB of float32: 441 positions of a vocabulary of 152k."""
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Difference of log-probabilities, or of hidden states, that rounding alone explains."""


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """What a forward pass says of predicted tokens; all `[tokens]` float32."""

    log_probabilities: torch.Tensor
    """Under the whole vocabulary."""
    entropy: torch.Tensor
    """Of the untruncated distribution, in nats."""
    truncated: torch.Tensor | None
    """Under top-p and top-k, -inf outside them; None where sampling is not truncated."""


def predicting_states(model: PreTrainedModel, micro_batch: MicroBatch) -> torch.Tensor:
    """Run the model over a micro-batch; the last hidden states that predict its tokens, `[tokens, hidden]`.

    They are in the order of `micro_batch.places`. Raises ValueError for a sequence beyond a sliding attention window.
    """
    states = _hidden_states(model, micro_batch).flatten(0, 1)
    # An embedding look-up gathers rows like indexing does, and its gradient adds up in a fixed order.
    return torch.nn.functional.embedding(torch.from_numpy(micro_batch.sources).to(states.device), states)


def packed_statistics(
    model: CausalLM, micro_batch: MicroBatch, sampling: SamplingParameters, *, truncated: bool = False
) -> TokenStatistics:
    """Run the model over a micro-batch and score its predicted tokens, in the order of `micro_batch.places`.

    `truncated` asks for the truncated log-probabilities of `sampling` as well. Raises ValueError for a sequence
    beyond a sliding attention window.
    """
    return token_statistics(
        model, predicting_states(model, micro_batch), micro_batch.targets, sampling, truncated=truncated
    )


def token_statistics(
    model: CausalLM,
    states: torch.Tensor,
    token_ids: NDArray[np.int64],
    sampling: SamplingParameters,
    *,
    truncated: bool = False,
    entropy_gradient: bool = False,
) -> TokenStatistics:
    """Score `token_ids`, `[tokens]`, by the hidden states that predict them, `[tokens, hidden]`.

    Logits are made chunk by chunk, and recomputed in the backward pass when there is more than one chunk, so that
    peak memory follows the chunk. Without `entropy_gradient` the entropy has none.
    """
    targets = torch.from_numpy(token_ids).to(states.device)
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has a head"
    score = partial(_score_chunk, head, sampling, truncated, entropy_gradient)
    chunk = max(CHUNK_ELEMENTS // model.config.get_text_config().vocab_size, 1)
    if len(targets) <= chunk:
        return score(states, targets)
    if torch.is_grad_enabled():
        score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
    parts = [score(*pair) for pair in zip(states.split(chunk), targets.split(chunk), strict=True)]
    return TokenStatistics(
        log_probabilities=torch.cat([part.log_probabilities for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]),
        truncated=torch.cat([part.truncated for part in parts if part.truncated is not None]) if truncated else None,
    )


@torch.no_grad()
def score_groups(
    model: CausalLM,
    groups: Sequence[PromptCompletions],
    sampling: SamplingParameters,
    tokens_per_micro_batch: int,
    *,
    truncated: bool = False,
) -> TokenStatistics:
    """Statistics of every completion token of `groups`, flat and in order, on the CPU.

    Raises ValueError for an empty prompt or completion.
    """
    total = sum(len(completion) for _, completions in groups for completion in completions)
    log_probabilities, entropy = torch.empty(total), torch.empty(total)
    truncated_ones = torch.empty(total) if truncated else None
    for micro_batch in plan_micro_batches(groups, tokens_per_micro_batch, model.config.get_text_config().hidden_size):
        scored = packed_statistics(model, micro_batch, sampling, truncated=truncated)
        places = torch.from_numpy(micro_batch.places)
        log_probabilities[places] = scored.log_probabilities.cpu()
        entropy[places] = scored.entropy.cpu()
        if truncated_ones is not None:
            assert scored.truncated is not None
            truncated_ones[places] = scored.truncated.cpu()
    return TokenStatistics(log_probabilities, entropy, truncated_ones)


def check_packed_forward(model: CausalLM) -> None:
    """Raise ValueError unless rows that share a prompt give this model's own log-probabilities.

    Compares two short completions packed behind one prompt with a plain forward pass of each. It finds models whose
    logits are more than a linear layer, whose positions do not follow `position_ids`, and active dropout.
    """
    prompt, completions, micro_batch = _packed_probe(model)
    expected: list[torch.Tensor] = []
    with torch.no_grad():
        packed = packed_statistics(model, micro_batch, SamplingParameters(samples=2, max_tokens=6))
        for completion in completions:
            token_ids = torch.from_numpy(np.concatenate([prompt, completion])).long()[None].to(model.device)
            logits = model(input_ids=token_ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            expected.append(logits.log_softmax(-1).gather(-1, token_ids[0, len(prompt) :, None])[:, 0])
    # Places run over the completions in the order given.
    order = torch.from_numpy(np.argsort(micro_batch.places)).to(model.device)
    # The mean, for in bfloat16 a single unlikely token may well be a quarter of a nat off.
    difference = float((packed.log_probabilities[order] - torch.cat(expected)).abs().mean())
    if not difference <= _PROBE_TOLERANCE[model.dtype]:
        raise ValueError(
            f"{type(model).__name__} cannot be trained with completions packed behind their prompt: its "
            f"log-probabilities differ by {difference:.3g} from those of a plain forward pass; choose another model"
        )


@torch.no_grad()
def check_packed_states(trunk: PreTrainedModel) -> None:
    """Raise ValueError unless rows that share a prompt give this base model's own hidden states."""
    prompt, completions, micro_batch = _packed_probe(trunk)
    expected: list[torch.Tensor] = []
    for completion in completions:
        token_ids = torch.from_numpy(np.concatenate([prompt, completion])).long()[None].to(trunk.device)
        states = trunk.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        expected.append(states[0, len(prompt) - 1 : -1].float())
    order = torch.from_numpy(np.argsort(micro_batch.places)).to(trunk.device)
    difference = float((predicting_states(trunk, micro_batch)[order].float() - torch.cat(expected)).abs().max())
    if not difference <= _PROBE_TOLERANCE[trunk.dtype]:
        raise ValueError(
            f"{type(trunk).__name__} cannot be trained with completions packed behind their prompt: its hidden states "
            f"differ by {difference:.3g} from those of a plain forward pass; choose another model"
        )


def checkpoint_layers(model: CausalLM) -> None:
    """Make the model recompute its layers' activations in the backward pass, to save their memory.

    Raises ValueError for a model without layers that can be recomputed.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers that can be recomputed; set learning.gradient_checkpointing to false"
        )
    for layer in layers:
        # No random state is kept: without dropout a layer has none.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


class ReferenceModel:
    """A frozen model that scores rollouts for the KL penalty."""

    def __init__(self, model: CausalLM, sampling: SamplingParameters, tokens_per_micro_batch: int) -> None:
        """Freeze `model`; raises ValueError when it cannot score packed rows."""
        self._model = model.eval().requires_grad_(False)
        self._sampling = sampling
        self._tokens_per_micro_batch = tokens_per_micro_batch
        check_packed_forward(self._model)

    def log_probabilities(self, prompt_ids: Tokens, completions: Sequence[Tokens]) -> list[LogProbabilities]:
        """Untruncated log-probabilities of each completion of one prompt, `[time]` each."""
        return self.score([(prompt_ids, completions)])[0]

    def score(self, groups: Sequence[PromptCompletions]) -> list[list[LogProbabilities]]:
        """The same for many prompts together."""
        flat = score_groups(self._model, groups, self._sampling, self._tokens_per_micro_batch).log_probabilities.numpy()
        scored: list[list[LogProbabilities]] = []
        start = 0
        for _, completions in groups:
            scored.append([])
            for completion in completions:
                scored[-1].append(flat[start : start + len(completion)])
                start += len(completion)
        return scored


def _packed_probe(model: PreTrainedModel) -> tuple[Tokens, list[Tokens], MicroBatch]:
    """A prompt, two short completions, and both packed behind it in one row."""
    vocabulary = model.config.get_text_config().vocab_size
    prompt = np.arange(1, 5, dtype=np.int32) % vocabulary
    completions = [np.arange(5, 8, dtype=np.int32) % vocabulary, np.arange(8, 14, dtype=np.int32) % vocabulary]
    # A hidden size this large makes any split of the two completions dearer than one row.
    (micro_batch,) = plan_micro_batches([(prompt, completions)], budget=64, hidden_size=1024)
    return prompt, completions, micro_batch


def _hidden_states(model: PreTrainedModel, micro_batch: MicroBatch) -> torch.Tensor:
    """Last hidden states, `[rows, time, hidden]`."""
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if window is not None and micro_batch.positions.max() >= window:
        raise ValueError(
            f"a sequence of {micro_batch.positions.max() + 2} tokens exceeds the model's attention window of {window}; "
            "lower rollout.max_tokens or data.max_prompt_tokens"
        )
    device = model.device
    output = model.base_model(
        input_ids=torch.from_numpy(micro_batch.token_ids).to(device),
        position_ids=torch.from_numpy(micro_batch.positions).to(device),
        attention_mask=_shared_prompt_mask(micro_batch, model.dtype, device) if micro_batch.shared else None,
        use_cache=False,
    )
    return output.last_hidden_state


def _shared_prompt_mask(micro_batch: MicroBatch, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The additive mask `[rows, 1, time, time]`: 0 for what a token attends to, minus infinity elsewhere.

    A token attends to earlier ones of the prompt and of its own completion. Padding attends to itself, so that no row
    of the attention is empty. Without shared prompts plain causal attention does the same, and faster.
    """
    segments = torch.from_numpy(micro_batch.segments).to(device)
    time = segments.shape[1]
    causal = torch.ones(time, time, dtype=torch.bool, device=device).tril()
    prompt_or_same = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    hidden = ~(causal & prompt_or_same)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    # Not the type's lowest number: its exponential costs some processors a slow path.
    return mask.masked_fill_(hidden, -torch.inf)[:, None]


def _score_chunk(
    head: torch.nn.Module,
    sampling: SamplingParameters,
    truncated: bool,
    entropy_gradient: bool,
    states: torch.Tensor,
    targets: torch.Tensor,
) -> TokenStatistics:
    logits = head(states).float() / sampling.temperature
    normaliser = logits.logsumexp(dim=-1)
    log_probabilities = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = normaliser - (logits.softmax(dim=-1) * logits).sum(dim=-1)
    if not truncated:
        return TokenStatistics(log_probabilities, entropy, None)
    with torch.no_grad():
        # The logits are scaled already.
        remaining = truncated_log_probabilities(logits, 1.0, sampling.top_p, sampling.top_k)
        return TokenStatistics(log_probabilities, entropy, remaining.gather(-1, targets[:, None])[:, 0])
