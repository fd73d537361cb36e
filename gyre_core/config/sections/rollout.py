"""The sections about generation: `rollout`, and `elastic` for its workers."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from gyre_core.config.sections.base import (
    AsTuple,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
    Text,
)


class RolloutConfig(Section):
    """How completions are generated."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Inference engine."""
    launcher: Literal["inline", "pool", "ray"] = "inline"
    """Where generation runs: `inline` in the train process, `pool` on Prefect work pools, `ray` on a Ray cluster.
    Default: `pool` when `elastic.enabled`, else `inline`."""
    batch_size: PositiveInt = 128
    """Prompts a step."""
    samples_per_prompt: PositiveInt = 8
    """Completions for each prompt; together they are a group."""
    max_tokens: PositiveInt = 256
    """Tokens of a completion at the most."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; the learner scores at the same one."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling: smallest set of tokens with this mass; 1 is off."""
    top_k: NonNegativeInt = 0
    """Sample among the k likeliest tokens; 0 is off."""
    stop: Annotated[tuple[Text, ...], AsTuple] = ()
    """Texts that end a completion, besides the model's end-of-sequence tokens."""
    max_lag: NonNegativeInt = Field(default_factory=lambda data: 0 if data["launcher"] == "inline" else 1)
    """Steps that generation may run ahead of the learner; 0 is strictly on-policy. Default: 0 inline, 1 with
    workers."""
    quota: PositiveFraction = Field(
        default_factory=lambda data: 1.0 if data["launcher"] == "inline" or data["max_lag"] == 0 else 0.9
    )
    """Share of a step's requests that a step waits for; stragglers join the pool later. Default: 1 inline and at
    `max_lag` 0, else 0.9."""
    max_refills: NonNegativeInt = 0
    """How often a step may generate for further prompts in place of groups whose rewards are all equal (dynamic
    sampling, DAPO); only `grpo`."""
    sequences_in_flight: PositiveInt = 256
    """Sequences that an engine generates at the same time."""
    groups_per_request: PositiveInt = Field(
        default_factory=lambda data: math.ceil(data["sequences_in_flight"] / data["samples_per_prompt"])
    )
    """Groups in one request, the unit that is claimed, committed and retried. Default: as many as fill
    `sequences_in_flight`."""
    timeout: PositiveFloat = 1800.0
    """Seconds that a step waits for its requests, or an evaluation for its completions, before it fails."""
    min_worker: PositiveInt = 1
    """Rollout workers at the least (launcher `pool`)."""
    max_worker: PositiveInt = 24
    """Rollout workers at the most (launcher `pool`)."""
    worker_count: PositiveInt = Field(default_factory=lambda data: data["min_worker"])
    """Rollout workers at the start (launcher `pool`). Default: `min_worker`."""


class ElasticConfig(Section):
    """Scaling of rollout workers."""

    enabled: bool = False
    """Scale the rollout workers between `rollout.min_worker` and `rollout.max_worker`."""
    scale_interval: PositiveFloat = 180.0
    """Seconds between two scaling decisions."""
    scale_cooling: NonNegativeFloat = 300.0
    """Seconds without another change after one."""
    pool_low_threshold: Fraction = 0.2
    """Fill of the pool below which more workers are considered."""
    pool_high_threshold: Fraction = 0.8
    """Fill of the pool above which fewer workers are considered."""
