"""How much disk and memory a run will take, in bytes, from its configuration and a few measured figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gyre_core.config import GyreConfig
from gyre_core.policy.logprobs import CHUNK_ELEMENTS
from gyre_core.policy.models import PolicySummary
from gyre_core.weights.flat import most_held

Forecast = Mapping[str, float]
"""Bytes by what takes them."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_FLOAT32 = 4
_LOGITS_COPIES = 5
"""Logits, probabilities, and what the backward pass makes of them, as counted and measured (benchmarks/memory.py)."""
VERSIONS_KEPT = 3
"""Published policy versions that stay beside those that open steps may still ask for."""
FEWEST_VERSIONS_KEPT = 1
"""The same when space is short: the newest is never deleted."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What one step will cost by a trial: seconds of its parts, and stored bytes of one completion."""

    generation_seconds: float
    reward_seconds: float
    update_seconds: float
    sample_bytes: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step, its orchestration left out."""
        return self.generation_seconds + self.reward_seconds + self.update_seconds


def disk_forecast(
    config: GyreConfig, policy: PolicySummary, versions_kept: int, costs: StepCosts | None, critic_parameters: int = 0
) -> Forecast:
    """What the run will hold at the most where its data lies, without the few megabytes of its logs.

    One policy version and one checkpoint beyond those kept are there while a new one is written, and the oldest version
    kept may be at the end of as many bytes of differences as a whole one has. The pool holds
    `experience.buffer_size` samples and all that was made since the oldest checkpoint kept, for an exact resume;
    without `costs` it is left out. The warm store holds the checkpoints once more, with the segments that they refer
    to. What has a URL of its own lies elsewhere.
    """
    weights = policy.parameters * _DTYPE_BYTES[config.models.dtype]
    checkpoints = float(_checkpoint_bytes(policy.trained + critic_parameters) * _most_checkpoints(config))
    forecast = {"policy versions": float(weights * (versions_kept + 2))}
    if config.checkpoint.url is None:
        forecast["checkpoints"] = checkpoints
    forecast["export"] = float(weights)
    if costs is not None:
        rollout = config.rollout
        samples_per_step = rollout.batch_size * rollout.samples_per_prompt * (1 + rollout.max_refills)
        span = config.checkpoint.keep * config.checkpoint.interval
        steps = min(config.experiment.steps, math.ceil(span / costs.seconds))
        forecast["pool"] = costs.sample_bytes * (config.experience.buffer_size + samples_per_step * steps)
    # By default the warm store lies beside the folder of the runs, which holds their data unless it has a URL.
    if config.checkpoint.dual_write and config.checkpoint.warm_url is None and config.storage.url is None:
        forecast["warm copy"] = checkpoints + forecast.get("pool", 0.0)
    return forecast


def least_disk_forecast(config: GyreConfig, policy: PolicySummary, critic_parameters: int = 0) -> Forecast:
    """What the run will hold on storage at the least, its samples left out, when all is given up that may be spared."""
    sparing = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"keep": 1})})
    # Without as many bytes of differences as a whole version has.
    versions = FEWEST_VERSIONS_KEPT + config.rollout.max_lag - 1
    return disk_forecast(sparing, policy, versions, None, critic_parameters)


def memory_forecast(
    config: GyreConfig,
    policy: PolicySummary,
    reference: PolicySummary | None,
    reward_model_parameters: int = 0,
    critic_parameters: int = 0,
    device: str = "cpu",
) -> Forecast:
    """What the train process will hold in memory at the most, besides its libraries.

    `reference` is the model of the KL penalty, None without one; `device` is the type of what the models compute on.
    The prompt is taken to be as long as `data.max_prompt_tokens` allows. Activations are 17 elements per token, layer
    and hidden unit (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", eq. 2, whose
    34 bytes are of two each, without the term of attention scores, which fused attention does not keep).
    """
    width = _DTYPE_BYTES[config.models.dtype]
    rounded = 0 if config.models.dtype == "float32" else 2 * width
    adapters = config.models.lora.rank > 0
    tokens = config.learning.tokens_per_micro_batch
    kept_layers = 1 if config.learning.gradient_checkpointing else policy.layers
    activations = tokens * policy.hidden_size * width * (17 * kept_layers + policy.layers)
    logits = min(tokens * policy.vocabulary, CHUNK_ELEMENTS) * _FLOAT32 * _LOGITS_COPIES
    positions = config.data.max_prompt_tokens + config.rollout.max_tokens
    forecast = {
        # Weights, gradient and two moments, and for bfloat16 the rounded copy with its gradient.
        "learner": policy.trained * (4 * _FLOAT32 + rounded),
        "critic": critic_parameters * (4 * _FLOAT32 + rounded),
        # Beneath adapters, and once more with them merged, to be published.
        "base": 2 * policy.parameters * width if adapters else 0,
        # Of weights and moments.
        "snapshot": _checkpoint_bytes(policy.trained + critic_parameters),
        # The state that differences are from, and the present one while a difference is made.
        "increments": 2 * _checkpoint_bytes(policy.trained + critic_parameters) * _holds_differences(config, device),
        # Copies that the next difference and the engine are made of.
        "versions": most_held(policy.parameters * width),
        # The weights it holds, and those that it is loading.
        "engine": 2 * policy.parameters * width,
        # The base of adapters is the reference too, unless another is named.
        "reference": reference.parameters * width if reference and not (adapters and reference == policy) else 0,
        "reward model": reward_model_parameters * width,
        "key-value cache": config.rollout.sequences_in_flight * positions * policy.cache_elements * width,
        "activations": activations + logits,
    }
    return {name: float(size) for name, size in forecast.items() if size}


def _most_checkpoints(config: GyreConfig) -> int:
    """Full checkpoints that are there at the most: those kept, for whatever reason, and a new one."""
    checkpoint = config.checkpoint
    spaced = config.experiment.steps // checkpoint.keep_every if checkpoint.keep_every else 0
    return checkpoint.keep + checkpoint.keep_best + spaced + 1


def _holds_differences(config: GyreConfig, device: str) -> bool:
    """Whether increments are differences; `auto` takes them where updates are not known to repeat."""
    exact = config.checkpoint.exact
    return config.checkpoint.incremental and (exact == "always" or (exact == "auto" and device != "cpu"))


def bytes_text(size: float) -> str:
    """A number of bytes for people: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def _checkpoint_bytes(trained: int) -> int:
    """Weights that are trained, and two moments, in float32."""
    return 3 * trained * _FLOAT32
