"""Every setting of a Gyre run: its type, its default and the text that explains it.

This module is the single source of defaults and help. It imports pydantic and the checks beside it, so that a
command line can show help without loading torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gyre_core.config.checks import ConflictError, find_conflicts

NUMBER_TEXT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
"""A decimal number as people write it. YAML 1.1 takes `1e-5` for text, so a field of numbers accepts it as such."""


def _read_number(value: object) -> object:
    """The number that `value` spells, when it is text that spells one."""
    return float(value) if isinstance(value, str) and NUMBER_TEXT.fullmatch(value) else value


Number = Annotated[float, BeforeValidator(_read_number), Field(allow_inf_nan=False)]
Fraction = Annotated[Number, Field(ge=0.0, le=1.0)]
PositiveFraction = Annotated[Number, Field(gt=0.0, le=1.0)]
DecayRate = Annotated[Number, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[Number, Field(gt=0.0)]
NonNegativeFloat = Annotated[Number, Field(ge=0.0)]
Text = Annotated[str, Field(min_length=1)]
# A list of YAML becomes a tuple; its elements stay as strict as everything else.
AsTuple = Field(strict=False)


class Section(BaseModel):
    """A section of the configuration: immutable, closed to unknown keys, and without silent conversions of type."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, use_attribute_docstrings=True
    )


class ExperimentConfig(Section):
    """What the run is called, how long it is and where it writes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "gyre"
    """Name of the run; its folder is OUTPUT/NAME/RUN_ID."""
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """Reinforcement-learning algorithm."""
    seed: NonNegativeInt = 0
    """Seed of prompts, sampling and draws; the same seed repeats the run."""
    steps: PositiveInt = 100
    """Number of RL steps in the whole run."""
    output: Text = "runs"
    """Folder that holds the run folders."""
    tags: Annotated[tuple[Text, ...], AsTuple] = ()
    """Tags shown beside the run in Prefect."""
    threads: NonNegativeInt = 0
    """CPU threads for torch; 0 takes the cores that this process may use."""
    step_retries: NonNegativeInt = 2
    """How often a failed step is tried again before `on_step_failure` applies."""
    on_step_failure: Literal["stop", "skip"] = "stop"
    """After the last retry: `stop` leaves a run that can be resumed, `skip` goes on with the next step. Rewards that
    cannot be computed stop the run in either case."""


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


class ModelsConfig(Section):
    """The models of a run: Hugging Face folders, or `tiny-qwen3`."""

    policy: Text = "tiny-qwen3"
    """Hugging Face folder of the causal language model to train, or `tiny-qwen3` for one made on the spot."""
    reward: Text | None = None
    """Folder of a sequence-classification reward model."""
    ref: Text | None = None
    """Folder of the reference model of the KL penalty; without it, the policy as it starts."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the models compute in; the learner keeps float32 masters in either case."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models compute: `auto` takes a GPU that torch sees, else the CPU. Results repeat bit for bit on a
    CPU."""
    tiny: TinyModelConfig = TinyModelConfig()
    """Shape of `tiny-qwen3`."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Warm start of `tiny-qwen3`."""


class DataConfig(Section):
    """Where prompts come from."""

    path: Text = "arithmetic"
    """A JSONL file of prompts, or `arithmetic` for built-in sums of two-digit numbers."""
    evaluation_path: Text | None = None
    """A JSONL file of held-out prompts; without it, `evaluation_size` rows are held out of `path`."""
    evaluation_size: NonNegativeInt = 256
    """Prompts held out for evaluation when `evaluation_path` is not given."""
    prompt_column: Text = "prompt"
    """Column that holds the prompt: text, or a list of chat messages."""
    max_prompt_tokens: PositiveInt = 1024
    """A longer prompt is dropped before the run, and counted in the plan."""
    shuffle: bool = True
    """Reshuffle the prompts in every epoch, by seed."""
    size: PositiveInt = 6000
    """Prompts that `arithmetic` makes for training, all distinct."""


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


class RewardFunctionConfig(Section):
    """One reward function, and its weight in the sum."""

    path: Text
    """Import path `package.module:function`, or `FILE.py:function` relative to the configuration file, or a
    built-in: `exact_match`, `partial_match`."""
    weight: Number = 1.0
    """Factor of this function's value in the reward."""


class RewardConfig(Section):
    """How completions are scored."""

    functions: Annotated[tuple[RewardFunctionConfig, ...], AsTuple] = (RewardFunctionConfig(path="partial_match"),)
    """Reward functions in TRL's signature; the reward is their weighted sum. Default: `partial_match`, or none
    besides `models.reward`."""
    timeout: PositiveFloat = 60.0
    """Seconds for one call of a reward function; then its process is killed and its rows fail."""
    retries: NonNegativeInt = 1
    """How often a failed row is scored again before it is dropped."""
    max_failure_share: Fraction = 0.5
    """Share of failed rows in a step above which the run stops."""


class LearningConfig(Section):
    """The optimiser and the loss."""

    lr: PositiveFloat = 1e-6
    """Learning rate at its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Course of the learning rate after the warm-up, over all steps."""
    warmup_steps: NonNegativeInt = 0
    """RL steps over which the learning rate rises from 0."""
    final_lr_fraction: Fraction = 0.1
    """Share of `lr` that a decaying schedule ends at."""
    update_steps: PositiveInt = 1
    """Optimiser updates a step; each takes an equal share of the step's groups."""
    optimizer: Literal["adamw"] = "adamw"
    """Optimiser."""
    betas: Annotated[tuple[DecayRate, DecayRate], AsTuple] = (0.9, 0.99)
    """Decay rates of AdamW's two moments."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty towards the reference model; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL penalty in the loss (Schulman, 'Approximating KL divergence', 2020). The gradient of k1 as
    a loss is zero in expectation; k2's is the true one."""
    clip_low: Fraction = 0.2
    """The policy ratio is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.28
    """The policy ratio is clipped above 1 + clip_high (clip-higher, DAPO)."""
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    """How token losses become one number: mean over all tokens, mean over sequences of their means, or sum over
    the constant sequences x max_tokens."""
    scale_advantages: bool = True
    """Divide a group's advantages by its standard deviation (n - 1)."""
    skip_dead_groups: bool = True
    """Leave groups whose rewards are all equal out of the update; they carry no signal."""
    importance_cap: PositiveFloat = 2.0
    """Upper bound of the importance weight between the engine's policy and the learner's (truncated importance
    sampling)."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Tokens, padding included, in one forward and backward pass; a longer sequence runs alone."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""


class ExperienceConfig(Section):
    """The pool of generated samples."""

    buffer_size: PositiveInt = 4096
    """Samples that the pool holds at the most; the oldest groups leave first."""
    time_window: PositiveFloat = 3600.0
    """Age in seconds at which a sample is dropped; priority decays on the way."""
    priority_alpha: NonNegativeFloat = 0.6
    """Exponent of the priority; 0 draws evenly."""
    max_uses: PositiveInt = 2
    """How often a group may be trained on."""
    fresh_share: Fraction = 0.5
    """Share of a draw, at the least, that was never trained on, as long as there is that much."""
    max_prompt_share: PositiveFraction = 0.25
    """Share of a minibatch, at the most, that one prompt may take (always one group)."""
    clock: Literal["steps", "seconds"] = "steps"
    """What ages run on: `steps` counts steps x `step_seconds` and repeats exactly, `seconds` counts active training
    time. Default: `steps` inline, `seconds` with workers."""
    step_seconds: PositiveFloat = 60.0
    """Seconds that one step counts for when `clock` is `steps`."""


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


class CheckpointConfig(Section):
    """Resumable checkpoints."""

    interval: PositiveFloat = 600.0
    """Seconds between checkpoints; one more is always written at the end."""
    keep: PositiveInt = 2
    """Complete checkpoints that are kept, newest first."""
    incremental: bool = False
    """Write what changed since the last full checkpoint instead of the whole state."""
    dual_write: bool = False
    """Write every checkpoint to a second, warm store as well."""


class EvaluationConfig(Section):
    """Held-out evaluation before, during and after training."""

    every: NonNegativeInt = 20
    """RL steps between two evaluations; 0 evaluates before and after only."""
    prompts: PositiveInt = 256
    """Held-out prompts an evaluation, at the most."""
    samples_per_prompt: PositiveInt = 1
    """Sampled completions a prompt, beside one greedy completion."""


class HealthConfig(Section):
    """Alarms on structural faults."""

    action: Literal["warn", "stop"] = "warn"
    """What an alarm does: `warn` logs it with its evidence, `stop` ends the run resumable as well."""
    kl_spike: PositiveFloat = 10.0
    """Alarm when the KL divergence exceeds this multiple of its recent median."""
    dead_steps: PositiveInt = 10
    """Alarm after this many steps in a row in which every group was without variance."""
    throughput_drop: Fraction = 0.5
    """Alarm when generation throughput stays below this share of its recent median."""
    window: PositiveInt = 20
    """Steps that count as recent."""


class MonitorConfig(Section):
    """What is logged beside the metrics of every step."""

    artifact_every: PositiveInt = 10
    """Steps between two updates of the table and the curves shown in Prefect."""
    completions_per_step: NonNegativeInt = 4
    """Sample completions written a step."""
    tensorboard: bool = True
    """Write TensorBoard event files."""


class StorageConfig(Section):
    """Where the run's data lies."""

    url: Text | None = None
    """Folder or URL of requests, pool, policy versions and checkpoints; without it, the run folder. Credentials
    come from the environment."""


def _as_mapping(section: object) -> Any:
    """A section as a dictionary of its own, holding what was set on it; anything else as it is."""
    if isinstance(section, Section):
        return section.model_dump(exclude_unset=True)
    return dict(section) if isinstance(section, Mapping) else section


class GyreConfig(Section):
    """The whole configuration of a run."""

    experiment: ExperimentConfig = ExperimentConfig()
    models: ModelsConfig = ModelsConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    learning: LearningConfig = LearningConfig()
    experience: ExperienceConfig = ExperienceConfig()
    elastic: ElasticConfig = ElasticConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    health: HealthConfig = HealthConfig()
    monitor: MonitorConfig = MonitorConfig()
    storage: StorageConfig = StorageConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_dependent_defaults(cls, data: object) -> object:
        """Give the defaults that depend on another section: `launcher`, `clock` and `reward.functions`.

        Sections that arrive as models are taken apart into what was set on them, so that their defaults follow too.
        """
        if not isinstance(data, Mapping):
            return data
        values = {str(name): _as_mapping(value) for name, value in data.items()}
        rollout, models = values.setdefault("rollout", {}), values.get("models", {})
        experience, elastic = values.setdefault("experience", {}), values.get("elastic", {})
        # Sections of a wrong type are left as they are, for pydantic to refuse by name.
        if isinstance(rollout, dict):
            enabled = isinstance(elastic, dict) and elastic.get("enabled") is True
            rollout.setdefault("launcher", "pool" if enabled else "inline")
            if isinstance(experience, dict):
                experience.setdefault("clock", "steps" if rollout["launcher"] == "inline" else "seconds")
        if isinstance(models, dict) and models.get("reward") is not None:
            reward = values.setdefault("reward", {})
            if isinstance(reward, dict):
                reward.setdefault("functions", ())
        return values

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> GyreConfig:
        """Refuse values that are right each by itself and impossible together."""
        conflicts = find_conflicts(self)
        if conflicts:
            raise ConflictError(conflicts)
        return self
