"""The section `reward`: how completions are scored."""

from __future__ import annotations

from typing import Annotated, Literal

from gyre_core.config.sections.base import (
    AsTuple,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
)


class RewardFunctionConfig(Section):
    """One reward function, and its weight in the sum."""

    path: Text
    """Import path `package.module:function`, or `FILE.py:function` relative to the configuration file, or a
    built-in: `exact_match`, `partial_match`, `reasoning_gym`, `math_answer`, `think_format`."""
    weight: Number = 1.0
    """Factor of this function's value in the reward."""
    signature: Literal["trl", "verl"] = "trl"
    """How the function is called: `trl` with lists over completions, `verl` as `compute_score(data_source,
    solution_str, ground_truth, extra_info)` for each."""


class ShapingConfig(Section):
    """What becomes of a reward between scoring and the advantages; everything is off by default."""

    normalize: Literal["off", "scale", "standardize"] = "off"
    """Divide rewards by their running standard deviation (`scale`), after taking off their running mean
    (`standardize`)."""
    source_column: Text = "data_source"
    """Column that names a row's source; each source has running statistics of its own."""
    clip_deviations: NonNegativeFloat = 0.0
    """Rewards further from the running mean of their source than this many standard deviations are moved there;
    0 is off."""
    spread_target: NonNegativeFloat = 0.0
    """Dynamic scaling: all rewards times one factor that holds the running spread within groups at this; 0 is off.
    Without effect on advantages that are scaled by the group's spread."""
    overlong_buffer: NonNegativeInt = 0
    """Tokens before `rollout.max_tokens` over which a penalty grows from 0 to `overlong_penalty` (soft overlong
    punishment, DAPO); 0 is off."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Penalty of a completion of `rollout.max_tokens` tokens."""
    length_penalty: NonNegativeFloat = 0.0
    """Penalty of a completion of `rollout.max_tokens` tokens, less for shorter ones in proportion; 0 is off."""


class RayConfig(Section):
    """The Ray cluster that runs the reward functions, with `reward.launcher: ray`."""

    address: Text | None = None
    """Address of a running cluster, `HOST:PORT`, or `auto` for the one on this machine. Default: a cluster on this
    machine, which starts and ends with the run; inline generation only."""
    tasks: PositiveInt = 4
    """Ray tasks that the rows of a request are shared out between."""
    num_cpus: PositiveFloat = 1.0
    """CPUs that Ray sets aside for each task."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs that Ray sets aside for each task: a share of one, or whole ones."""
    timeout: PositiveFloat = 120.0
    """Seconds in which the cluster must answer, and in which it must have a node that is large enough for a task."""


class RewardConfig(Section):
    """How completions are scored."""

    functions: Annotated[tuple[RewardFunctionConfig, ...], AsTuple] = (RewardFunctionConfig(path="partial_match"),)
    """Reward functions; the reward is their weighted sum. Default: `partial_match`, or none besides
    `models.reward`."""
    model_weight: Number = 1.0
    """Factor of the score of `models.reward` in the reward."""
    launcher: Literal["process", "ray"] = "process"
    """Where reward functions run: `process` in processes beside the one that generates, `ray` on a Ray cluster."""
    processes: PositiveInt = 1
    """Processes that run the reward functions at the same time, with launcher `process`."""
    ray: RayConfig = RayConfig()
    """The Ray cluster that runs the reward functions, with launcher `ray`."""
    shaping: ShapingConfig = ShapingConfig()
    """What becomes of a reward between scoring and the advantages."""
    timeout: PositiveFloat = 60.0
    """Seconds for one call of a reward function; then its process is killed and its rows fail."""
    retries: NonNegativeInt = 1
    """How often a failed row is scored again before it is dropped."""
    max_failure_share: Fraction = 0.5
    """Share of failed rows in a step above which the run stops."""
