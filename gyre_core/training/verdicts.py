"""What preflight concludes from what it measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gyre_core.config import GyreConfig
from gyre_core.training.forecast import Forecast, StepCosts, bytes_text

LARGE_SHARE = 0.8
"""Share of what is free above which a forecast is too close for comfort."""
TRUNCATED_SHARE = 0.2
"""Share of completions cut off by `rollout.max_tokens` above which the reward sees too few whole answers."""
DEAD_SHARE = 0.8
"""Share of groups without a spread of rewards above which most of the generation is for nothing."""
BUSY_SHARE = 0.5
"""Load of the usable cores above which other work is in the way."""
PARITY_LIMITS = {"float32": (1e-3, 1e-3), "bfloat16": (0.05, 0.5)}
"""By type: differences of log-probabilities, in nats, above which preflight warns, and fails."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One conclusion: what was checked, how it came out, the evidence in a sentence, and what to do about it."""

    name: str
    outcome: Literal["ok", "warn", "fail"]
    evidence: str
    remedy: str = ""


def judge_versions(installed: Mapping[str, str], unmet: Mapping[str, str]) -> Verdict:
    """`installed` are versions by package; `unmet` are the requirements that do not hold, with what is there."""
    if unmet:
        wrong = "; ".join(f"{requirement} is required, and {found} is there" for requirement, found in unmet.items())
        return Verdict("versions", "fail", wrong, "install the packages that constraints.txt names")
    return Verdict("versions", "ok", ", ".join(f"{name} {version}" for name, version in installed.items()))


def judge_threads(threads: int, cores: int, load: float) -> Verdict:
    """`cores` are those that the process may use, `load` the mean number of running threads on the machine."""
    evidence = f"{threads} for torch, on {cores} usable cores at a load of {load:.1f}"
    if threads > cores:
        return Verdict("threads", "warn", evidence, f"set experiment.threads to {cores} or less")
    if load > BUSY_SHARE * cores:
        return Verdict("threads", "warn", evidence, "wait for, or move, the other work on this machine")
    return Verdict("threads", "ok", evidence)


def judge_space(name: Literal["disk", "memory"], forecast: Forecast, available: int | None) -> Verdict:
    """A forecast against the bytes that are available, None for no limit."""
    total = sum(forecast.values())
    parts = ", ".join(f"{part} {bytes_text(size)}" for part, size in forecast.items())
    free = "without a limit" if available is None else f"of {bytes_text(available)} free"
    evidence = f"at most {bytes_text(total)} {free}: {parts}"
    remedy = _SPACE_REMEDIES[name]
    if available is not None and total > available:
        return Verdict(name, "fail", evidence, remedy)
    if available is not None and total > LARGE_SHARE * available:
        return Verdict(name, "warn", evidence, remedy)
    return Verdict(name, "ok", evidence)


_SPACE_REMEDIES = {
    "disk": "free some space, set storage.url to a larger volume, or lower checkpoint.keep or checkpoint.interval",
    "memory": "lower learning.tokens_per_micro_batch or rollout.sequences_in_flight, set models.dtype to bfloat16 or "
    "learning.gradient_checkpointing to true, or take a smaller model",
}


def judge_prompts(training: int, too_long: int, duplicates: int, overlapping: int, config: GyreConfig) -> Verdict:
    """Numbers of training prompts, and of rows that were dropped as too long, repeat others, or are held out."""
    evidence = f"{training} prompts to train on"
    remarks = [
        (too_long, f"{too_long} dropped as longer than {config.data.max_prompt_tokens} tokens"),
        (duplicates, f"{duplicates} that repeat another"),
        (overlapping, f"{overlapping} left out, as their prompt is held out"),
        (training < config.rollout.batch_size, f"fewer than the {config.rollout.batch_size} of a step"),
    ]
    remedies = [
        (too_long, "raise data.max_prompt_tokens or shorten the prompts"),
        (duplicates, "remove the repeated rows, or keep them to weigh those prompts more"),
        (overlapping, "take the held-out prompts out of data.path"),
        (training < config.rollout.batch_size, "add prompts, or lower rollout.batch_size: a step takes some twice"),
    ]
    evidence = "; ".join([evidence, *(text for count, text in remarks if count)])
    remedy = "; ".join(text for count, text in remedies if count)
    return Verdict("prompts", "warn" if remedy else "ok", evidence, remedy)


def judge_lengths(longest_prompt: int, max_tokens: int, max_positions: int) -> Verdict:
    """Whether the longest prompt leaves room for a completion in the model's positions."""
    evidence = (
        f"the longest prompt has {longest_prompt} tokens, and completions {max_tokens} at the most, "
        f"of the model's {max_positions} positions"
    )
    if longest_prompt + max_tokens > max_positions:
        remedy = f"set data.max_prompt_tokens to {max(1, max_positions - max_tokens)}, or lower rollout.max_tokens"
        return Verdict("lengths", "fail", evidence, remedy)
    return Verdict("lengths", "ok", evidence)


def judge_tokens(bos_id: int | None, eos_ids: Sequence[int], pad_id: int) -> Verdict:
    """The special tokens that were found; without one that ends a completion, each runs into its limit."""
    begins = "none" if bos_id is None else str(bos_id)
    ends = ", ".join(map(str, eos_ids)) or "none"
    evidence = f"ids that begin a prompt: {begins}; that end a completion: {ends}; that fill up tensors: {pad_id}"
    if not eos_ids:
        remedy = "name the end-of-sequence token in the tokenizer or generation_config.json, or set rollout.stop"
        return Verdict("tokens", "warn", evidence, remedy)
    return Verdict("tokens", "ok", evidence)


def judge_evaluation(prompts: int) -> Verdict:
    """`prompts` are those that an evaluation takes."""
    if not prompts:
        remedy = "set data.evaluation_size or data.evaluation_path"
        return Verdict("evaluation", "warn", "no prompt is held out, so that nothing shows what was learned", remedy)
    return Verdict("evaluation", "ok", f"{prompts} held-out prompts")


def judge_generation(tokens: int, samples: int, seconds: float, costs: StepCosts, timeout: float) -> Verdict:
    """`tokens` of `samples` completions took `seconds`; `timeout` is what a step may wait for its own."""
    evidence = (
        f"{tokens / seconds:,.0f} tokens/s over {samples} completions; a step will take about {costs.seconds:.3g} s: "
        f"generation {costs.generation_seconds:.3g}, reward {costs.reward_seconds:.3g}, "
        f"update {costs.update_seconds:.3g}"
    )
    if costs.generation_seconds + costs.reward_seconds > timeout:
        remedy = f"raise rollout.timeout ({timeout:g} s), or lower rollout.max_tokens or rollout.batch_size"
        return Verdict("generation", "fail", evidence, remedy)
    return Verdict("generation", "ok", evidence)


def judge_truncation(share: float, mean_length: float, max_tokens: int) -> Verdict:
    """`share` of the completions were cut off at `max_tokens`."""
    evidence = f"{share:.0%} of the completions are cut off at {max_tokens} tokens; the mean is {mean_length:.1f}"
    if share > TRUNCATED_SHARE:
        remedy = "raise rollout.max_tokens, or ask for shorter answers in the prompts"
        return Verdict("truncation", "warn", evidence, remedy)
    return Verdict("truncation", "ok", evidence)


def judge_parity(largest: float, mean: float, outside: float, dtype: str) -> Verdict:
    """Differences between the engine's and the learner's log-probabilities with the same weights, in nats a token.

    `outside` is the share of tokens that the learner's own top-p and top-k would not have allowed.
    """
    evidence = f"engine and learner differ by at most {largest:.2g} nats a token, by {mean:.2g} in the mean"
    if outside:
        evidence += f"; the learner's top-p and top-k leave out {outside:.2%} of the tokens"
    warn, fail = PARITY_LIMITS[dtype]
    # Not a number is not within any limit.
    if not largest <= fail:
        remedy = "the engine computes another function: check its weights, its version and the attention in use"
        return Verdict("parity", "fail", evidence, remedy)
    if not largest <= warn:
        return Verdict("parity", "warn", evidence, "set models.dtype to float32, or expect clipped importance weights")
    return Verdict("parity", "ok", evidence)


def judge_reward(
    metrics: Mapping[str, float], first_error: str, max_failure_share: float, algorithm: str = "grpo"
) -> Verdict:
    """`metrics` are those of a step's rollouts, `first_error` what a failed row says.

    `grpo` learns from the spread within groups alone; `ppo` needs none.
    """
    failed, abstained = metrics["reward/failure_share"], metrics["reward/abstained_share"]
    if failed:
        evidence = f"{failed:.0%} of the completions could not be scored; the first failure: {first_error}"
        outcome = "fail" if failed > max_failure_share or failed == 1.0 else "warn"
        return Verdict("reward", outcome, evidence, "mend the reward function")
    if abstained == 1.0:
        return Verdict("reward", "warn", "every completion was abstained from", "check the reward functions and data")
    if algorithm == "ppo":
        return Verdict("reward", "ok", f"mean {metrics['reward']:.3g}")
    spread, dead = metrics.get("reward_std", 0.0), metrics.get("frac_reward_zero_std", 1.0)
    evidence = f"mean {metrics['reward']:.3g}, spread within a group {spread:.3g}; {dead:.0%} of the groups have none"
    if dead == 1.0:
        remedy = "choose prompts that the policy solves sometimes, a finer reward, or a higher rollout.temperature"
        return Verdict("reward", "warn", f"{evidence}: there is nothing to learn from", remedy)
    if dead > DEAD_SHARE:
        remedy = "choose prompts that the policy solves sometimes, more rollout.samples_per_prompt, or a finer reward"
        return Verdict("reward", "warn", evidence, remedy)
    return Verdict("reward", "ok", evidence)
