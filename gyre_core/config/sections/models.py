"""The section `models`: which models a run loads, and in what form."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gyre_core.config.sections.base import AsTuple, Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section, Text


class TinyModelConfig(Section):
    """Shape of the policy that `models.policy: tiny-qwen3` makes on the spot."""

    hidden_size: Annotated[int, Field(ge=8, multiple_of=8)] = 64
    """Width of the hidden layers: four heads of an even size, hence a multiple of 8."""
    layers: PositiveInt = 2
    """Number of transformer layers."""


class WarmStartConfig(Section):
    """Supervised training of a fresh tiny policy on its own split, before RL."""

    max_steps: NonNegativeInt = 400
    """Supervised optimiser steps at the most; 0 leaves the policy random."""
    batch_size: PositiveInt = 128
    """Solved examples an optimiser step."""
    lr: PositiveFloat = 3e-3
    """Learning rate of the warm start."""
    target_accuracy: Fraction = 0.25
    """Stop once this share of sampled answers is exact."""


class LoRAConfig(Section):
    """Low-rank adapters on the policy's linear layers (Hu et al., 2022); needs `pip install gyre[lora]`."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: PositiveFloat | None = None
    """The adapters' output is scaled by alpha / rank; null takes twice the rank."""
    targets: Annotated[tuple[Text, ...], AsTuple] = ("all-linear",)
    """Names of the layers that get an adapter, such as `q_proj`; `all-linear` is all but the head."""


class ModelsConfig(Section):
    """The models of a run: Hugging Face folders, or `tiny-qwen3`."""

    policy: Text = "tiny-qwen3"
    """Hugging Face folder of the causal language model to train, or `tiny-qwen3` for one made on the spot."""
    reward: Text | None = None
    """Folder of a sequence-classification reward model."""
    critic: Text | None = None
    """Folder of the model that an own critic of `ppo` starts from; without it, the policy as it starts."""
    ref: Text | None = None
    """Folder of the reference model of the KL penalty; without it, the policy as it starts."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the models compute in; the learner keeps float32 masters in either case."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models compute: `auto` takes a GPU that torch sees, else the CPU. Results repeat bit for bit on a
    CPU."""
    lora: LoRAConfig = LoRAConfig()
    """Training of low-rank adapters instead of all weights."""
    tiny: TinyModelConfig = TinyModelConfig()
    """Shape of `tiny-qwen3`."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Warm start of `tiny-qwen3`."""
