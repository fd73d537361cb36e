"""The sections about generation: `rollout`, and `elastic` for its workers."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

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


def _default_groups_per_request(data: dict[str, Any]) -> int:
    groups = math.ceil(data["sequences_in_flight"] / data["samples_per_prompt"])
    return groups if data["launcher"] == "inline" else max(1, min(groups, data["batch_size"] // data["max_worker"]))


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
    max_refills: NonNegativeInt = 0
    """How often a step may generate for further prompts in place of groups whose rewards are all equal (dynamic
    sampling, DAPO); only `grpo`."""
    quota: PositiveFraction = Field(
        default_factory=lambda data: (
            1.0 if data["launcher"] == "inline" or data["max_lag"] == 0 or data["max_refills"] else 0.9
        )
    )
    """Share of a step's requests that a step waits for; stragglers join the pool later. Default: 1 inline, at
    `max_lag` 0 and with refills, else 0.9."""
    sequences_in_flight: PositiveInt = 256
    """Sequences that an engine generates at the same time."""
    min_worker: PositiveInt = 1
    """Rollout workers at the least (launcher `pool`)."""
    max_worker: PositiveInt = 24
    """Rollout workers at the most (launcher `pool`)."""
    worker_count: PositiveInt = Field(default_factory=lambda data: data["min_worker"])
    """Rollout workers at the start (launcher `pool`). Default: `min_worker`."""
    groups_per_request: PositiveInt = Field(default_factory=_default_groups_per_request)
    """Groups in one request, the unit that is claimed, committed and retried. Default: as many as fill
    `sequences_in_flight`, and with workers no more than leave a request a step for each of `max_worker`."""
    timeout: PositiveFloat = 1800.0
    """Seconds that a step waits for its requests, or an evaluation for its completions, before it fails."""
    attempts: PositiveInt = 8
    """How often a request is given to a worker before the step fails with the last error (launcher `pool`)."""
    heartbeat_timeout: PositiveFloat = 30.0
    """Seconds without a sign of life after which a worker is lost and its requests go to others."""
    start_timeout: PositiveFloat = 600.0
    """The same for a worker that is starting, which loads models."""
    orphan_timeout: PositiveFloat = 900.0
    """Seconds without a sign of life from the train process after which a worker ends by itself; longer than that
    process takes to come back."""
    standby: NonNegativeInt = 0
    """Warm spare workers beside those that generate (launcher `pool`)."""
    tokens_per_second: PositiveFloat | None = None
    """Tokens that each worker releases in a second at the most; null is as fast as it can."""


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
