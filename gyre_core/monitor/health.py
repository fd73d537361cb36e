"""Alarms on structural faults of a run, judged from its metrics alone.

The law
-------
After every step each rule measures how far the run is from the rule's limit, as a severity: 1 is the limit. An alarm
is raised when the severity reaches 1, once; it clears when the severity falls below 0.8, and may be raised again
after that. Medians are taken over the `health.window` steps before the present one ("recent"), and a rule that needs
a median is silent until it has 10 of them (all of the window, if that is shorter). A metric that a step lacks leaves
its history as it was, and its rule silent.

- **kl_spike**: the KL divergence exceeds `health.kl_spike` times its recent median (0.001 nats a token at the least,
  so that a policy still at its reference raises nothing), and lies 6 robust standard deviations above it on the log
  scale, so that neither steady growth nor a heavy-tailed estimate counts as a spike. Without a reference model the
  divergence from the policy before the step is judged in its place.
- **reward_up_length_up**: over the last four windows (20 steps at the least), both the reward and the mean length
  rise by the Mann-Kendall test (z of 3 each), and the median length of the last 5 steps is 1.5 times that of the
  run's first 5. A reward that is bought with length is often a hacked one.
- **constant_reward**: a reward function gave one and the same value to every completion of the run's first
  `health.window` steps. It teaches nothing, and its weight may hide a mistake, such as a format that the chat template
  makes impossible.
- **dead_signal**: every group was without variance for `health.dead_steps` steps in a row.
- **throughput_drop**: generation stayed below `health.throughput_drop` times its recent median for 3 steps in a row.
- **reward_failures**: more than 2% of the completions of the last 3 steps failed to be scored.
- **log_probability_drift**: at lag 0, where learner and engine hold the same weights, their log-probabilities of the
  same tokens differed by more than 0.05 nats on average for 3 steps in a row.
- **skipped_updates**: half of the minibatches of the last `health.dead_steps` steps had no token to learn from.
- **non_finite**: a metric was NaN or infinite.

The functions are pure. `Alarms` holds the little history that the rules need; it goes into checkpoints as JSON, so
that a resumed run judges as the undisturbed one would have.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from gyre_core.config.sections import HealthConfig

CLEAR_SEVERITY = 0.8
MIN_MEDIAN_STEPS = 10
KL_FLOOR = 0.001
KL_LEAST = 1e-6
KL_ROBUST_DEVIATIONS = 6.0
TREND_WINDOWS = 4
MIN_TREND_STEPS = 20
TREND_Z = 3.0
LENGTH_GROWTH = 1.5
LENGTH_STEPS = 5
STREAK_STEPS = 3
FAILURE_SHARE = 0.02
DRIFT_NATS = 0.05
SKIPPED_SHARE = 0.5
CONSTANT_SPREAD = 1e-9

KL = "kl"
POLICY_KL = "policy_kl"
REWARD = "reward"
LENGTH = "completions/mean_length"
DEAD_SHARE = "frac_reward_zero_std"
THROUGHPUT = "perf/generation_throughput"
FAILURES = "reward/failure_share"
DRIFT = "sampling/sampling_logp_difference/mean"
LAG = "off_policy/max"
SKIPPED = "optim/skipped_updates"
UPDATES = "optim/updates"
FUNCTION_MEAN = re.compile(r"rewards/([^/]+)/mean")
WATCHED = (KL, POLICY_KL, REWARD, LENGTH, DEAD_SHARE, THROUGHPUT, FAILURES, DRIFT, SKIPPED, UPDATES)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A fault that began at `step`: what was seen, in a sentence with its numbers, and what may help."""

    name: str
    step: int
    sentence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Finding:
    """How far a run is from a rule's limit (1 is the limit), and the evidence in a sentence."""

    severity: float
    sentence: str


@dataclass(frozen=True, slots=True)
class View:
    """What a rule looks at: the values of each watched metric up to the present step, and the step's own metrics."""

    config: HealthConfig
    history: Mapping[str, Sequence[float]]
    first_lengths: Sequence[float]
    constants: Mapping[str, tuple[float, int]]
    """Reward functions that gave one value so far: the value, and the number of steps."""
    present: Mapping[str, float]

    def before(self, name: str) -> list[float]:
        """The metric's recent values, without the present one; empty when they are too few for a median."""
        recent = list(self.history[name])[-self.config.window - 1 : -1]
        return recent if len(recent) >= min(self.config.window, MIN_MEDIAN_STEPS) else []


class Alarms:
    """Watches a run's metrics, step by step."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        kept = max(TREND_WINDOWS * config.window, MIN_TREND_STEPS, config.dead_steps)
        self._history: dict[str, deque[float]] = {name: deque(maxlen=kept) for name in WATCHED}
        self._first_lengths: list[float] = []
        self._constants: dict[str, tuple[float, int]] = {}
        self._varied: set[str] = set()
        self._raised: dict[str, Alarm] = {}
        self._last_step = -1

    @property
    def raised(self) -> list[Alarm]:
        """The alarms that were raised and have not cleared, oldest first."""
        return list(self._raised.values())

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Take in a step's metrics; returns the alarms that this step raises.

        A step that was observed before changes nothing.
        """
        if step <= self._last_step:
            return []
        self._last_step = step
        for name in WATCHED:
            if math.isfinite(metrics.get(name, math.nan)):
                self._history[name].append(metrics[name])
        if len(self._first_lengths) < LENGTH_STEPS and math.isfinite(metrics.get(LENGTH, math.nan)):
            self._first_lengths.append(metrics[LENGTH])
        self._watch_functions(metrics)
        view = View(self._config, self._history, self._first_lengths, self._constants, metrics)
        new = [alarm for name in RULES if (alarm := self._judge(name, step, view)) is not None]
        self._raised.update({alarm.name: alarm for alarm in new})
        return new

    def state(self) -> dict[str, Any]:
        """All that `observe` depends on, as JSON values."""
        return {
            "last_step": self._last_step,
            "history": {name: list(values) for name, values in self._history.items()},
            "first_lengths": list(self._first_lengths),
            "constants": {name: list(constant) for name, constant in self._constants.items()},
            "varied": sorted(self._varied),
            "raised": [[a.name, a.step, a.sentence, a.remedy] for a in self._raised.values()],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._last_step = state["last_step"]
        for name, values in self._history.items():
            values.clear()
            values.extend(state["history"].get(name, []))
        self._first_lengths = list(state["first_lengths"])
        self._constants = {name: (value, steps) for name, (value, steps) in state.get("constants", {}).items()}
        self._varied = set(state.get("varied", ()))
        self._raised = {fields[0]: Alarm(*fields) for fields in state["raised"]}

    def _watch_functions(self, metrics: Mapping[str, float]) -> None:
        """Count the steps of the functions that gave one value since the run began."""
        for match in filter(None, map(FUNCTION_MEAN.fullmatch, metrics)):
            name, mean = match[1], metrics[match[0]]
            value, steps = self._constants.pop(name, (mean, 0))
            reach = CONSTANT_SPREAD * max(1.0, abs(value))
            same = abs(mean - value) <= reach and metrics.get(f"rewards/{name}/std", 0.0) <= reach
            if same and name not in self._varied:
                self._constants[name] = value, steps + 1
            else:
                self._varied.add(name)

    def _judge(self, name: str, step: int, view: View) -> Alarm | None:
        """The alarm that a rule raises now; clears the rule's earlier one when the fault is gone."""
        rule, remedy = RULES[name]
        finding = rule(view)
        if finding is None:
            return None
        if finding.severity < CLEAR_SEVERITY:
            self._raised.pop(name, None)
        if finding.severity < 1.0 or name in self._raised:
            return None
        return Alarm(name, step, finding.sentence, remedy)


def trend_z(values: Sequence[float]) -> float:
    """Mann-Kendall statistic of a series: about standard normal without a trend, positive for a rising one.

    Mann, 'Nonparametric tests against trend' (1945); the variance is the one without ties, which can only make the
    test more careful.
    """
    series = np.asarray(values, dtype=np.float64)
    count = len(series)
    signs = np.sign(series[None, :] - series[:, None])
    score = float(np.triu(signs, 1).sum())
    return score / math.sqrt(count * (count - 1) * (2 * count + 5) / 18)


def _kl_spike(view: View) -> Finding | None:
    name = KL if KL in view.present else POLICY_KL
    recent = view.before(name)
    value = view.present.get(name, math.nan)
    if not recent or not math.isfinite(value):
        return None
    median = float(np.median(recent))
    logs = np.log(np.maximum(recent, KL_LEAST))
    deviation = 1.4826 * float(np.median(np.abs(logs - np.median(logs))))
    distance = math.log(max(value, KL_LEAST)) - float(np.median(logs))
    multiple = value / max(median, KL_FLOOR)
    outlier = distance / deviation / KL_ROBUST_DEVIATIONS if deviation > 0 else math.inf
    sentence = (
        f"{name} is {value:.4g} nats a token, {multiple:.3g} times the level of the last {len(recent)} steps "
        f"({max(median, KL_FLOOR):.4g}); the limit is {view.config.kl_spike:g} times"
    )
    return Finding(min(multiple / view.config.kl_spike, outlier), sentence)


def _reward_up_length_up(view: View) -> Finding | None:
    span = max(TREND_WINDOWS * view.config.window, MIN_TREND_STEPS)
    rewards, lengths = list(view.history[REWARD])[-span:], list(view.history[LENGTH])[-span:]
    if min(len(rewards), len(lengths)) < MIN_TREND_STEPS or LENGTH not in view.present:
        return None
    start = float(np.median(view.first_lengths))
    growth = float(np.median(lengths[-LENGTH_STEPS:])) / max(start, 1e-9)
    reward_z, length_z = trend_z(rewards), trend_z(lengths)
    sentence = (
        f"reward and length rise together: over {len(rewards)} steps the reward went from {rewards[0]:.4g} to "
        f"{rewards[-1]:.4g} (trend z {reward_z:.1f}) and the mean length from {lengths[0]:.4g} to {lengths[-1]:.4g} "
        f"tokens (trend z {length_z:.1f}), {growth:.2f} times that of the first steps"
    )
    return Finding(min(reward_z / TREND_Z, length_z / TREND_Z, growth / LENGTH_GROWTH), sentence)


def _constant_reward(view: View) -> Finding | None:
    steps = max((steps for _, steps in view.constants.values()), default=0)
    named = [f"{name} ({value:.4g})" for name, (value, count) in view.constants.items() if count == steps]
    sentence = f"one value for every completion of the first {steps} steps: {', '.join(named)}"
    return Finding(steps / view.config.window, sentence)


def _dead_signal(view: View) -> Finding | None:
    if DEAD_SHARE not in view.present:
        return None
    dead = sum(1 for _ in takewhile(lambda share: share >= 1.0, reversed(view.history[DEAD_SHARE])))
    reward = view.present.get(REWARD, math.nan)
    sentence = f"no group had any variance in its rewards for {dead} steps in a row; the mean reward is {reward:.4g}"
    return Finding(dead / view.config.dead_steps, sentence)


def _throughput_drop(view: View) -> Finding | None:
    recent = view.before(THROUGHPUT)
    if not recent or THROUGHPUT not in view.present:
        return None
    median = float(np.median(recent))
    best = max(list(view.history[THROUGHPUT])[-STREAK_STEPS:])
    limit = view.config.throughput_drop * median
    sentence = (
        f"generation made at most {best:.4g} tokens/s in the last {STREAK_STEPS} steps, {best / max(median, 1e-9):.0%} "
        f"of the level before ({median:.4g}); the limit is {view.config.throughput_drop:.0%}"
    )
    return Finding(limit / best if best > 0 else math.inf, sentence)


def _reward_failures(view: View) -> Finding | None:
    if FAILURES not in view.present:
        return None
    recent = list(view.history[FAILURES])[-STREAK_STEPS:]
    share = sum(recent) / max(1, len(recent))
    sentence = f"{share:.1%} of the completions of the last {len(recent)} steps could not be scored"
    return Finding(share / FAILURE_SHARE, sentence)


def _log_probability_drift(view: View) -> Finding | None:
    if view.present.get(LAG, math.nan) != 0 or len(view.history[DRIFT]) < STREAK_STEPS:
        return None
    least = min(list(view.history[DRIFT])[-STREAK_STEPS:])
    sentence = (
        f"with the same weights, learner and engine differ by {least:.4g} nats a token or more in the last "
        f"{STREAK_STEPS} steps; the limit is {DRIFT_NATS:g}"
    )
    return Finding(least / DRIFT_NATS, sentence)


def _skipped_updates(view: View) -> Finding | None:
    span = view.config.dead_steps
    if not {SKIPPED, UPDATES} <= view.present.keys() or len(view.history[SKIPPED]) < span:
        return None
    skipped, made = (sum(list(view.history[name])[-span:]) for name in (SKIPPED, UPDATES))
    sentence = f"{skipped:g} of the last {skipped + made:g} minibatches had no token to learn from"
    return Finding(skipped / max(1.0, skipped + made) / SKIPPED_SHARE, sentence)


def _non_finite(view: View) -> Finding | None:
    names = sorted(name for name, value in view.present.items() if not math.isfinite(value))
    return Finding(float(len(names)), f"not finite: {', '.join(names)}")


Rule = Callable[[View], Finding | None]
RULES: Mapping[str, tuple[Rule, str]] = {
    "kl_spike": (_kl_spike, "lower learning.lr, or raise learning.kl_coef"),
    "reward_up_length_up": (
        _reward_up_length_up,
        "read the sample completions; if they pad, add a length penalty to the reward or raise learning.kl_coef",
    ),
    "constant_reward": (
        _constant_reward,
        "read the sample completions beside the reward function: can a completion earn anything else? Check what the "
        "chat template puts before it, the column the function compares with, and rollout.max_tokens",
    ),
    "dead_signal": (
        _dead_signal,
        "use prompts that the policy solves sometimes, more rollout.samples_per_prompt, or a reward with finer steps",
    ),
    "throughput_drop": (
        _throughput_drop,
        "look for another load on the machine, for lost workers, and at completions/clipped_ratio",
    ),
    "reward_failures": (_reward_failures, "read the errors in the sample completions and mend the reward function"),
    "log_probability_drift": (
        _log_probability_drift,
        "use models.dtype float32, or check that the engine loaded the weights that the learner holds",
    ),
    "skipped_updates": (
        _skipped_updates,
        "look at completions/clipped_ratio and frac_reward_zero_std; raise rollout.max_tokens, or use other prompts",
    ),
    "non_finite": (_non_finite, "lower learning.lr, compute in float32, and check the reward functions"),
}
