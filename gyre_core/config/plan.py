"""What a configuration amounts to, in plain units, before anything runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gyre_core.config.paths import TASK_PREFIX
from gyre_core.config.schema import GyreConfig
from gyre_core.config.sections import Section

PASS_RATE = 0.18
"""Share of right answers for which the plan predicts groups without a signal: a hard task at the start."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The amounts of a run; a group is the completions of one prompt.

    `tokens_per_step` counts completion tokens and is an upper bound; `notes` are remarks on settings that do less
    than they seem to.
    """

    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    tokens_per_sample: int
    updates_per_step: int
    groups_per_request: int
    requests_per_step: int
    buffer_size: int
    max_lag: int
    quota: float
    algorithm: str
    max_refills: int
    loss_aggregation: str
    notes: tuple[str, ...]

    @property
    def samples_per_step(self) -> int:
        """Completions that a step generates."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def tokens_per_step(self) -> int:
        """Completion tokens that a step generates at the most."""
        return self.samples_per_step * self.tokens_per_sample

    def describe(self) -> str:
        """The plan as a few lines of text."""
        share = expected_dead_share(PASS_RATE, self.samples_per_prompt)
        policy = "strictly on-policy" if self.max_lag == 0 else f"generation up to {_count(self.max_lag, 'step')} ahead"
        lines = [
            f"a step    {_count(self.prompts_per_step, 'prompt')} x {self.samples_per_prompt} = "
            f"{_count(self.samples_per_step, 'completion')}, at most {_count(self.tokens_per_step, 'token')}",
            f"updates   {self.updates_per_step} a step, {_groups_per_update(self)} each",
            f"requests  {self.requests_per_step} a step, at most {_count(self.groups_per_request, 'group')} each; "
            f"a step waits for {self.quota:.0%} of them",
            f"pool      {_count(self.buffer_size, 'sample')}, {policy}",
            f"loss      {self.algorithm.upper()}, {_AGGREGATION[self.loss_aggregation]}",
            f"in all    {_count(self.steps, 'step')}, {_count(self.steps * self.prompts_per_step, 'prompt')}, "
            f"{_count(self.steps * self.samples_per_step, 'completion')}, "
            f"at most {_count(self.steps * self.tokens_per_step, 'token')}, "
            f"{_count(self.steps * self.updates_per_step, 'update')}",
        ]
        if self.algorithm == "grpo":
            lines.append(
                f"signal    at a pass rate of {PASS_RATE:g}, {share:.0%} of the groups would be without variance"
            )
        if self.max_refills:
            further = self.max_refills * self.prompts_per_step
            lines.append(
                f"refills   on top of these at most {self.max_refills} a step, of {_count(further, 'prompt')} together"
            )
        return "\n".join(lines + [f"note      {note}" for note in self.notes])


_AGGREGATION = {
    "token": "mean over all tokens of an update",
    "sequence": "mean over completions of their means over tokens",
    "constant": "sum over tokens / (completions x max_tokens)",
}


def make_plan(config: GyreConfig) -> Plan:
    """The plan of a configuration."""
    rollout = config.rollout
    groups_per_request = min(rollout.groups_per_request, rollout.batch_size)
    return Plan(
        steps=config.experiment.steps,
        prompts_per_step=rollout.batch_size,
        samples_per_prompt=rollout.samples_per_prompt,
        tokens_per_sample=rollout.max_tokens,
        updates_per_step=config.learning.update_steps,
        groups_per_request=groups_per_request,
        requests_per_step=math.ceil(rollout.batch_size / groups_per_request),
        buffer_size=config.experience.buffer_size,
        max_lag=rollout.max_lag,
        quota=rollout.quota,
        algorithm=config.experiment.algorithm,
        max_refills=rollout.max_refills,
        loss_aggregation=config.learning.loss_aggregation,
        notes=_notes(config),
    )


def expected_dead_share(pass_rate: float, samples_per_prompt: int) -> float:
    """Expected share of groups whose rewards are all equal, hence without a signal.

    For independent completions that are right with probability `pass_rate` p and earn 1 or 0, a group of G is all
    right or all wrong with probability p^G + (1 - p)^G. Raises ValueError for a rate outside 0 to 1.
    """
    if not 0.0 <= pass_rate <= 1.0:
        raise ValueError(f"pass_rate must be within 0 and 1, and is {pass_rate}.")
    return pass_rate**samples_per_prompt + (1.0 - pass_rate) ** samples_per_prompt


def _notes(config: GyreConfig) -> tuple[str, ...]:
    learning = config.learning
    notes: list[str] = []
    if config.models.ref is not None and learning.kl_coef == 0:
        notes.append("models.ref is not loaded, since learning.kl_coef is 0")
    if learning.kl_coef > 0 and learning.kl_in == "loss" and learning.kl_estimator == "k1":
        notes.append(
            "learning.kl_estimator k1 is logged, but as a loss its gradient is 0 in expectation; k2's is exact"
        )
    truncated = config.rollout.top_p < 1.0 or config.rollout.top_k > 0
    if config.experiment.algorithm == "grpo" and learning.kl_in == "reward" and learning.kl_coef > 0 and truncated:
        notes.append(
            "learning.kl_in reward compares what was sampled under top_p and top_k with the whole reference, so that "
            "the divergence is overestimated; loss is exact"
        )
    if config.data.evaluation_path is None and config.data.evaluation_size == 0:
        notes.append("no prompt is held out, so that nothing is evaluated; see data.evaluation_size")
    return (*notes, *_idle_settings(config))


def _idle_settings(config: GyreConfig) -> Iterator[str]:
    """A remark for each group of settings that were changed and have no effect beside the others."""
    rollout, experience = config.rollout, config.experience
    if rollout.launcher == "inline":
        yield from _without_effect("rollout", rollout, ("min_worker", "worker_count", "max_worker"), "inline")
    if rollout.max_lag == 0:
        names = ("priority_alpha", "max_uses", "fresh_share", "max_prompt_share")
        yield from _without_effect("experience", experience, names, "at rollout.max_lag 0")
    if not config.elastic.enabled:
        names = ("scale_interval", "scale_cooling", "pool_low_threshold", "pool_high_threshold")
        yield from _without_effect("elastic", config.elastic, names, "while elastic.enabled is false")
    yield from _idle_inputs(config)
    yield from _idle_parts(config)
    learning = config.learning
    if config.experiment.algorithm == "ppo":
        names = ("advantage", "scale_advantages", "skip_dead_groups")
        yield from _without_effect("learning", learning, names, "with PPO, whose critic makes the advantages")
    else:
        if learning.advantage == "leave_one_out":
            yield from _without_effect("learning", learning, ("scale_advantages",), "with leave_one_out")
        names = tuple(type(config.critic).model_fields)
        yield from _without_effect("critic", config.critic, names, "without PPO")
    if learning.kl_coef == 0:
        names = ("kl_in", "kl_estimator")
        yield from _without_effect("learning", learning, names, "while learning.kl_coef is 0")
    elif learning.kl_in == "reward":
        where = "on a penalty in the reward, which takes k1; it only chooses how kl is logged"
        yield from _without_effect("learning", learning, ("kl_estimator",), where)
    if learning.importance_mode == "truncate":
        where = "while learning.importance_mode is truncate"
        yield from _without_effect("learning", learning, ("importance_floor",), where)


def _idle_inputs(config: GyreConfig) -> Iterator[str]:
    data = config.data
    tasks = [path.startswith(TASK_PREFIX) for path in (data.path, data.evaluation_path or "")]
    if data.path != "arithmetic" and not tasks[0]:
        yield from _without_effect("data", data, ("size",), "for a file of prompts")
    if not any(tasks):
        yield from _without_effect("data", data, ("parameters",), "without a task of reasoning_gym")


def _idle_parts(config: GyreConfig) -> Iterator[str]:
    lora, shaping = config.models.lora, config.reward.shaping
    if not lora.rank:
        yield from _without_effect("models.lora", lora, ("alpha", "targets"), "while models.lora.rank is 0")
    if config.experiment.algorithm != "ppo" or config.critic.trunk == "shared":
        where = "without a critic of its own (experiment.algorithm ppo, critic.trunk own)"
        yield from _without_effect("models", config.models, ("critic",), where)
    if config.models.reward is None:
        yield from _without_effect("reward", config.reward, ("model_weight",), "without models.reward")
    if not shaping.overlong_buffer:
        where = "while reward.shaping.overlong_buffer is 0"
        yield from _without_effect("reward.shaping", shaping, ("overlong_penalty",), where)


def _without_effect(name: str, section: Section, settings: Sequence[str], where: str) -> Iterator[str]:
    default = type(section)()
    changed = [setting for setting in settings if getattr(section, setting) != getattr(default, setting)]
    if changed:
        yield f"{', '.join(f'{name}.{setting}' for setting in changed)}: without effect {where}"


def _groups_per_update(plan: Plan) -> str:
    """The groups of one update, as a range where the share is uneven."""
    low, rest = divmod(plan.prompts_per_step, plan.updates_per_step)
    return f"{low} to {low + 1} groups" if rest else _count(low, "group")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
