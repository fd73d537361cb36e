"""Prompts on their way into the batch: computed once for each group, copied to each of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from gyre_core.engines.kv_cache import KeysValues
from gyre_core.engines.streams import Job


@dataclass(slots=True)
class Prefill:
    """The computed prompts of some groups, and the samples of them that have no row yet."""

    jobs: Sequence[Job]
    prompt_lengths: NDArray[np.int64]
    """`[groups]`"""
    prefix: KeysValues
    """`[groups, heads, prompt, head_size]` a layer, position p in slot p."""
    logits: torch.Tensor
    """Of each group's first completion token, `[groups, vocabulary]`."""
    groups: NDArray[np.int64]
    """The group of each sample that waits, `[waiting]`."""
    samples: NDArray[np.int64]
    """The sample's index within its group, `[waiting]`."""

    def take(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The next `count` samples at the most: their groups and their indices."""
        groups, samples = self.groups[:count], self.samples[:count]
        self.groups, self.samples = self.groups[count:], self.samples[count:]
        return groups, samples

    def drop(self, jobs: set[Job]) -> list[Job]:
        """Give up the waiting samples of `jobs`; returns the job of each."""
        gone = np.array([self.jobs[group] in jobs for group in self.groups], dtype=bool)
        dropped = [self.jobs[group] for group in self.groups[gone]]
        self.groups, self.samples = self.groups[~gone], self.samples[~gone]
        return dropped


def prefill(model: PreTrainedModel, jobs: Sequence[Job], pad_id: int) -> Prefill:
    """Run the model over the prompts of `jobs` in one batch.

    Prompts of different lengths are aligned at their ends, where the logits are wanted, and their keys and values
    then shifted to the front.
    """
    prompts = [job.request.prompt.token_ids for job in jobs]
    lengths = np.array([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    token_ids = np.full((len(prompts), longest), pad_id, dtype=np.int64)
    for row, prompt in enumerate(prompts):
        token_ids[row, longest - len(prompt) :] = prompt
    device = model.device
    pads = torch.from_numpy(longest - lengths).to(device)[:, None]
    slots = torch.arange(longest, device=device)
    cache = DynamicCache()
    output = model(
        input_ids=torch.from_numpy(token_ids).to(device),
        attention_mask=None if lengths.min() == longest else _aligned_mask(slots, pads),
        position_ids=(slots - pads).clamp(min=0),
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    counts = [job.sampling.samples for job in jobs]
    return Prefill(
        jobs=jobs,
        prompt_lengths=lengths,
        prefix=[_shifted(layer, slots + pads) for layer in cache.layers],
        logits=output.logits[:, -1],
        groups=np.repeat(np.arange(len(jobs)), counts),
        samples=np.concatenate([np.arange(count) for count in counts]),
    )


def _aligned_mask(slots: torch.Tensor, pads: torch.Tensor) -> torch.Tensor:
    """Causal, blind to the padding in front, `[groups, 1, prompt, prompt]`.

    Padding sees itself: a softmax over nothing is no number, and would spread through the values of later layers.
    """
    causal = slots[:, None] >= slots
    visible = (slots >= pads)[:, None, :] | torch.eye(len(slots), dtype=torch.bool, device=slots.device)
    return (causal & visible)[:, None]


def _shifted(layer: object, sources: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values with slot p taken from slot `sources[:, p]`, or from the last where that is beyond."""
    assert isinstance(layer, DynamicLayer)
    assert layer.keys is not None
    assert layer.values is not None
    index = sources.clamp(max=layer.keys.shape[2] - 1)[:, None, :, None]
    keys, values = (
        tensor.gather(2, index.expand(-1, tensor.shape[1], -1, tensor.shape[3]))
        for tensor in (layer.keys, layer.values)
    )
    return keys, values
