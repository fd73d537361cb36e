"""The sections about the run itself: its name and length, checkpoints, evaluation, health, monitoring, storage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gyre_core.config.sections.base import AsTuple, Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section, Text


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


class CheckpointConfig(Section):
    """Resumable checkpoints."""

    interval: PositiveFloat = 600.0
    """Seconds between checkpoints; one more is always written at the end."""
    every: NonNegativeInt = 0
    """Steps between checkpoints at the most, whatever the time; 0 leaves it to `interval`."""
    keep: PositiveInt = 2
    """Complete checkpoints that are kept, newest first."""
    keep_best: NonNegativeInt = 0
    """Further full checkpoints that are kept, those with the highest held-out reward. One is written with the step that
    follows the evaluation."""
    keep_every: NonNegativeInt = 0
    """Full checkpoints are kept for good at the steps that are multiples of this and at which one is written; 0 keeps
    none."""
    incremental: bool = False
    """Write what changed since the last full checkpoint instead of the whole state."""
    exact: Literal["auto", "replay", "always"] = "auto"
    """How an increment holds the learner: `replay` names the batches since the last full checkpoint, which a recovery
    trains on again; `always` holds the difference of weights and moments; `auto` takes `replay` on a CPU where a test
    at the start finds that updates repeat bit for bit."""
    replay_budget: PositiveFloat = 30.0
    """Seconds of updates that a recovery may have to repeat; beyond them the next checkpoint is a full one."""
    url: Text | None = None
    """Folder, or s3://BUCKET/FOLDER, of the checkpoints; without it, they lie with the run's other data."""
    dual_write: bool = False
    """Write every checkpoint to a second, warm store as well."""
    warm_url: Text | None = None
    """Folder, or s3://BUCKET/FOLDER, of the warm store; without it, a folder beside `experiment.output` whose name
    ends in `-warm`."""


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
    """Folder, or s3://BUCKET/FOLDER, of requests, pool, policy versions and checkpoints; without it, the run folder.
    Credentials come from `storage.block` or the environment."""
    endpoint: Text | None = None
    """URL of an S3 service other than Amazon's; without it, that of `storage.block`, or `AWS_ENDPOINT_URL`."""
    block: Text | None = None
    """Prefect block of the type `gyre-s3-access` that holds endpoint, region and credentials."""
    min_free: NonNegativeInt = 500_000_000
    """Bytes of each volume that always stay free beside the next step and checkpoint: as it gets short of them, old
    checkpoints and samples go, then steps stop to overlap, then the run pauses; 0 lets it fill up."""
    pause_timeout: PositiveFloat = 1800.0
    """Seconds that a run pauses for want of space before it stops, resumable."""
