"""Every metric that Gyre logs: its name, its unit and what it means.

This registry is the single source: `MetricsWriter` refuses a name that is not in it, and the tables of
docs/metrics.md are made from it (`python -m gyre_core.monitor.names docs/metrics.md` writes them anew).
A part of a name in braces stands for any text without `/`: `rewards/{function}/mean` is the pattern of
`rewards/exact_match/mean`. A metric that does not apply to a step is left out; it is never given as NaN.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BEGIN_TABLES = "<!-- tables made from gyre_core/monitor/names.py: begin -->"
END_TABLES = "<!-- tables made from gyre_core/monitor/names.py: end -->"

UNREPEATABLE = ("time/", "perf/", "recovery/")
"""Beginnings of the names of metrics that depend on the clock and the machine, or tell how a run came back. With inline
generation and `rollout.max_lag: 0` all others are, bit for bit, those of a run that nobody interrupted."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or a family of them when `name` has parts in braces."""

    name: str
    unit: str
    meaning: str


_REWARD = (
    Metric("reward", "reward", "Mean reward of the step's scored completions."),
    Metric("reward_std", "reward", "Mean over the groups of the standard deviation (n - 1) of their rewards."),
    Metric("rewards/{function}/mean", "reward", "Mean raw value of one reward function, before its weight."),
    Metric("rewards/{function}/std", "reward", "Standard deviation (n - 1) of one reward function's raw values."),
    Metric("rewards/{function}/failed", "rows", "Rows that a reward function failed on since the step before."),
    Metric("rewards/{function}/retried", "rows", "Rows that were scored again, evaluations included, as in all three."),
    Metric("rewards/{function}/timeouts", "calls", "Calls that missed `reward.timeout`; each cost a process its life."),
    Metric("frac_reward_zero_std", "share", "Groups whose rewards are all equal; they carry no signal."),
    Metric("reward/failure_share", "share", "Completions that a reward function failed on, after all retries."),
    Metric("reward/abstained_share", "share", "Completions that every reward function abstained from."),
    Metric("reward/shaped_mean", "reward", "Mean reward after `reward.shaping`, which the advantages are made of."),
    Metric("reward/outlier_share", "share", "Completions whose reward was moved by `reward.shaping.clip_deviations`."),
    Metric("reward/length_penalty", "reward", "Mean of what `reward.shaping` took off for length."),
    Metric("reward/scale", "factor", "Factor of the dynamic scaling of `reward.shaping.spread_target`."),
)

_COMPLETIONS = (
    Metric("completions/mean_length", "tokens", "Mean length of the step's completions."),
    Metric("completions/min_length", "tokens", "Length of the shortest completion."),
    Metric("completions/max_length", "tokens", "Length of the longest completion."),
    Metric("completions/clipped_ratio", "share", "Completions that ran into `rollout.max_tokens`."),
    Metric("completions/mean_terminated_length", "tokens", "Mean length of the completions that ended by themselves."),
    Metric("num_samples", "completions", "Completions generated in the steps since the run began."),
    Metric("num_tokens", "tokens", "Prompt and completion tokens of those completions."),
)

_LEARNING = (
    Metric("loss", "-", "Mean loss of the policy over the step's minibatches."),
    Metric("kl", "nats a token", "Estimated KL divergence of the policy from the reference model."),
    Metric(
        "policy_kl", "nats a token", "Estimated KL divergence (k3) of the policy in training from the step's start."
    ),
    Metric("entropy", "nats a token", "Mean entropy of the policy at the sampled positions."),
    Metric("clip_ratio/low_mean", "share", "Tokens with a negative advantage whose ratio was clipped from below."),
    Metric("clip_ratio/high_mean", "share", "Tokens with a positive advantage whose ratio was clipped from above."),
    Metric("clip_ratio/region_mean", "share", "Tokens that were clipped on either side."),
    Metric("learning_rate", "-", "Learning rate of the step's last update."),
    Metric("kl_coef", "-", "Coefficient of the KL penalty."),
    Metric("optim/grad_norm", "-", "Mean norm of the gradient before it is scaled down to `learning.max_grad_norm`."),
    Metric("optim/updates", "updates", "Optimiser updates of the step."),
    Metric("optim/skipped_updates", "updates", "Minibatches without a single token to learn from; nothing moved."),
    Metric("sampling/importance_sampling_ratio/mean", "ratio", "Mean weight between learner's and engine's policy."),
    Metric("sampling/importance_sampling_ratio/min", "ratio", "Smallest such weight of a token."),
    Metric(
        "sampling/importance_sampling_ratio/max",
        "ratio",
        "Largest such weight of a token, before it is capped or left out.",
    ),
    Metric(
        "sampling/sampling_logp_difference/mean",
        "nats a token",
        "Mean distance between the learner's and the engine's log-probability of the same token, before any update.",
    ),
    Metric("sampling/sampling_logp_difference/max", "nats", "Largest such distance of a token."),
    Metric(
        "sampling/masked_share",
        "share",
        "Tokens left out because they lie outside the learner's own support, or with `learning.importance_mode` `mask` "
        "because their weight is outside its bounds.",
    ),
    Metric("off_policy/mean", "versions", "Mean number of policy versions between generation and training."),
    Metric("off_policy/max", "versions", "Largest such number in the step."),
)

_CRITIC = (
    Metric("critic/value_loss", "reward^2", "Mean loss of the values, clipped: half a squared error."),
    Metric("critic/clip_ratio", "share", "Tokens whose value is held back by `critic.value_clip`."),
    Metric("critic/grad_norm", "-", "Mean norm of the critic's gradient before it is scaled down."),
    Metric("critic/value_mean", "reward", "Mean value of the trained tokens at the start of the step."),
    Metric("critic/return_mean", "reward", "Mean of what those values should be."),
    Metric(
        "critic/explained_variance",
        "share",
        "1 - Var(returns - values) / Var(returns) at the start of the step: 1 is a perfect critic, 0 one as good as "
        "a constant.",
    ),
)

_EXPERIENCE = (
    Metric(
        "experience/fill",
        "share",
        "Fresh samples ready for later steps, in the pool or in segments, of max_lag times those of a step.",
    ),
    Metric("experience/samples", "samples", "Samples in the pool that may still be drawn, used before or not."),
    Metric("experience/groups", "groups", "Groups in the pool that may still be drawn, used before or not."),
    Metric("experience/fresh_samples", "samples", "Samples in the pool that were never trained on."),
    Metric("experience/segments", "files", "Parquet segments that the pool refers to."),
    Metric("experience/stale_share", "share", "Samples in the pool past half of `experience.time_window`."),
    Metric("experience/effective_sampling_rate", "share", "Effective sample size of the draw over its samples."),
    Metric("experience/dead_groups", "groups", "Groups admitted in the step whose rewards are all equal."),
    Metric("experience/refills", "rounds", "Generations for further prompts in place of groups without a signal."),
    Metric("experience/admitted", "samples", "Samples admitted to the pool in the step."),
    Metric("experience/consumed", "samples", "Samples drawn for training in the step."),
    Metric("experience/reused_share", "share", "Drawn samples that had been trained on before."),
    Metric("experience/mean_age", "seconds", "Mean age of the drawn samples on the pool's clock."),
    Metric("experience/dropped/{reason}", "samples", "Samples dropped in the step, by reason."),
    Metric("experience/quarantined", "files", "Segments put aside as unreadable since the run began."),
)

_PERFORMANCE = (
    Metric("perf/throughput", "tokens/s", "Completion tokens of the step over `time/step`."),
    Metric("perf/generation_throughput", "tokens/s", "Completion tokens of the step over `time/generation`."),
    Metric("perf/samples_per_second", "completions/s", "Completions of the step over `time/step`."),
    Metric("perf/padding_share", "share", "Padding among the token slots of the update's forward passes."),
    Metric("perf/peak_memory_bytes", "bytes", "Largest resident memory of the train process so far."),
    Metric(
        "perf/storage_repeated",
        "requests",
        "Requests to a storage on S3 that were made again since the process began: throttled, in conflict, failed or "
        "unanswered.",
    ),
    Metric("perf/free_bytes", "bytes", "Free bytes of the volume that is shortest of them, at the end of the step."),
    Metric("perf/space_guard", "level", "How short it is: 0 go on, 1 expire, 2 slow, 3 pause (`storage.min_free`)."),
    Metric("perf/pool_bytes", "bytes", "Size of the pool's segments."),
    Metric("perf/warm_lag", "steps", "How far the warm store is behind the newest checkpoint of the primary one."),
    Metric("perf/warm_errors", "errors", "Copies to the warm store that failed, since the process began."),
    Metric("perf/checkpoint_failed", "checkpoints", "1 when there was no space for the checkpoint after the step."),
    Metric(
        "time/step",
        "seconds",
        "From the end of the step before (at the first, its own start) to the step's end, without evaluation and "
        "checkpoint in between.",
    ),
    Metric("time/generation", "seconds", "Generating completions."),
    Metric("time/reward", "seconds", "Scoring completions and admitting them to the pool."),
    Metric("time/sample", "seconds", "Drawing the minibatches."),
    Metric("time/update", "seconds", "Forward and backward passes and optimiser steps."),
    Metric(
        "time/wait_for_batch",
        "seconds",
        "How long the learner, free for the step, waited for its samples; a part of the other times.",
    ),
    Metric(
        "time/broadcast_weights",
        "seconds",
        "Copying the new policy, waiting until the last version is published, and loading it into the engine.",
    ),
    Metric("time/checkpoint", "seconds", "Writing a checkpoint after the step."),
    Metric(
        "time/orchestration", "seconds", "The rest of `time/step`: Prefect, bookkeeping, everything not named here."
    ),
)

_ROLLOUT = (
    Metric("rollout/workers", "workers", "Rollout workers that take requests, at the end of the step."),
    Metric("rollout/workers_starting", "workers", "Workers that load their models."),
    Metric("rollout/standby", "workers", "Warm spares."),
    Metric("rollout/wanted", "workers", "Workers that the run wants."),
    Metric("rollout/open_requests", "requests", "Announced requests without a segment, those of later steps included."),
    Metric("rollout/reissued", "attempts", "Attempts given to another worker since the process began."),
    Metric("rollout/idle_share", "share", "Of the workers' time since the last step, that without a sequence to make."),
)

_RECOVERY = (
    Metric(
        "recovery/detect",
        "seconds",
        "Of a resumed run's first step: from the last sign of life of the process before to the beginning of this one.",
    ),
    Metric("recovery/start", "seconds", "From there until a checkpoint was looked for: libraries, models, rewards."),
    Metric("recovery/restore", "seconds", "Reading the checkpoint and taking it over."),
    Metric("recovery/replay", "seconds", "Training again on what was trained on since the last full checkpoint."),
    Metric("recovery/publish", "seconds", "Publishing the policy that the run goes on with."),
    Metric("recovery/first_sample", "seconds", "From the open run to the first new samples, engine warm-up included."),
    Metric("recovery/first_update", "seconds", "From there to the first step that was committed."),
    Metric("recovery/total", "seconds", "All of these together."),
    Metric("recovery/replayed_steps", "steps", "Steps that were trained on again."),
)

_EVALUATION = (
    Metric("eval/{set}/reward", "reward", "Mean reward of sampled completions of the set's prompts."),
    Metric("eval/{set}/reward_se", "reward", "Standard error of that mean, over prompts."),
    Metric("eval/{set}/greedy_reward", "reward", "Mean reward of the greedy completions."),
    Metric("eval/{set}/greedy_reward_se", "reward", "Standard error of that mean, over prompts."),
    Metric("eval/{set}/mean_length", "tokens", "Mean length of the sampled completions."),
    Metric("eval/{set}/unscored", "completions", "Completions of both kinds without a score; they count in no mean."),
    Metric("time/evaluation", "seconds", "Evaluating, outside of `time/step`."),
)

_HEALTH = (
    Metric("health/non_finite", "metrics", "Metrics of the step that were NaN or infinite; their value is null."),
    Metric("health/alarms", "alarms", "Alarms that are raised and have not cleared."),
)

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Reward": _REWARD,
    "Completions": _COMPLETIONS,
    "Learning": _LEARNING,
    "Critic of PPO": _CRITIC,
    "Experience pool": _EXPERIENCE,
    "Performance": _PERFORMANCE,
    "Rollout workers": _ROLLOUT,
    "Checkpoints and recovery": _RECOVERY,
    "Evaluation": _EVALUATION,
    "Health": _HEALTH,
}
"""The registry, by the heading under which docs/metrics.md shows it."""

_EXACT = {metric.name: metric for metrics in SECTIONS.values() for metric in metrics if "{" not in metric.name}
_PATTERNS = tuple(
    (re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(metric.name))), metric)
    for metrics in SECTIONS.values()
    for metric in metrics
    if "{" in metric.name
)


@cache
def find_metric(name: str) -> Metric:
    """The registry's entry for a metric's name; raises ValueError for a name that is not registered."""
    if name in _EXACT:
        return _EXACT[name]
    for pattern, metric in _PATTERNS:
        if pattern.fullmatch(name):
            return metric
    raise ValueError(f"metric {name!r} is not registered; add it with unit and meaning to gyre_core/monitor/names.py")


def markdown_tables() -> str:
    """The registry as Markdown: one table a section."""
    lines: list[str] = []
    for section, metrics in SECTIONS.items():
        lines += [f"### {section}", "", "| name | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in metrics]
        lines.append("")
    return "\n".join(lines)


def with_current_tables(document: str) -> str:
    """The document with the text between its two markers replaced by the tables of this registry."""
    before, begin, rest = document.partition(BEGIN_TABLES)
    _, end, after = rest.partition(END_TABLES)
    if not begin or not end:
        raise ValueError(f"the document lacks the line {BEGIN_TABLES!r} or {END_TABLES!r} between which the tables go")
    return f"{before}{begin}\n\n{markdown_tables()}\n{end}{after}"


if __name__ == "__main__":
    documentation = Path(sys.argv[1])
    documentation.write_text(with_current_tables(documentation.read_text()))
