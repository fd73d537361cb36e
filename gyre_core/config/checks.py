"""Combinations of settings that cannot work, although each setting is valid by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gyre_core.config.sections import CheckpointConfig, RayConfig

if TYPE_CHECKING:
    from gyre_core.config.schema import GyreConfig

USER_INFORMATION = re.compile(r"(?<=://)[^/@]*@")
"""The part of a URL that may hold a user name and a password."""

RAY_ADDRESS = re.compile(r"auto|[^/\s]+:[0-9]+")
"""What `reward.ray.address` may be."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """An impossible combination: the `key` to change (`section.field`), one sentence with the remedy, and the
    `others` that take part."""

    key: str
    message: str
    others: tuple[str, ...] = ()


class ConflictError(ValueError):
    """Raised by the schema for impossible combinations; `conflicts` holds all of them."""

    def __init__(self, conflicts: Iterable[Conflict]) -> None:
        self.conflicts = tuple(conflicts)
        super().__init__("\n".join(f"{conflict.key}: {conflict.message}" for conflict in self.conflicts))


def find_conflicts(config: GyreConfig) -> list[Conflict]:
    """Every impossible combination in a configuration whose fields are each valid."""
    return [conflict for check in _CHECKS for conflict in check(config)]


def _sampling(config: GyreConfig) -> Iterator[Conflict]:
    rollout = config.rollout
    if config.experiment.algorithm == "grpo" and rollout.samples_per_prompt == 1:
        yield Conflict(
            "rollout.samples_per_prompt",
            "GRPO compares the completions of a prompt with each other, and 1 has nothing to be compared with; "
            "set it to 2 or more.",
            ("experiment.algorithm",),
        )
    if rollout.temperature == 0:
        yield Conflict(
            "rollout.temperature",
            "at temperature 0 all completions of a prompt are equal, whatever top_p and top_k say, and nothing is "
            "learnt; set it above 0 (evaluation samples greedily by itself).",
            ("rollout.top_p", "rollout.top_k"),
        )


def _workers(config: GyreConfig) -> Iterator[Conflict]:
    rollout = config.rollout
    low, count, high = rollout.min_worker, rollout.worker_count, rollout.max_worker
    if low > high:
        yield Conflict(
            "rollout.min_worker",
            f"min_worker {low} exceeds max_worker {high}; lower the one or raise the other.",
            ("rollout.max_worker",),
        )
    elif not low <= count <= high:
        yield Conflict(
            "rollout.worker_count",
            f"worker_count {count} lies outside min_worker {low} to max_worker {high}; set it within, or widen them.",
            ("rollout.min_worker", "rollout.max_worker"),
        )
    if config.elastic.enabled and rollout.launcher != "pool":
        yield Conflict(
            "rollout.launcher",
            f"elastic.enabled scales the workers of the pool, and launcher {rollout.launcher} has none; "
            "set launcher to pool, or elastic.enabled to false.",
            ("elastic.enabled",),
        )


def _thresholds(config: GyreConfig) -> Iterator[Conflict]:
    low, high = config.elastic.pool_low_threshold, config.elastic.pool_high_threshold
    if low >= high:
        yield Conflict(
            "elastic.pool_low_threshold",
            f"pool_low_threshold {low:g} must be below pool_high_threshold {high:g}; lower the one or raise the other.",
            ("elastic.pool_high_threshold",),
        )


def _lag(config: GyreConfig) -> Iterator[Conflict]:
    rollout, experience = config.rollout, config.experience
    if rollout.max_lag == 0 and rollout.quota < 1:
        yield Conflict(
            "rollout.quota",
            f"at max_lag 0 a step trains on its own samples alone, so that stragglers beyond quota {rollout.quota:g} "
            "would be lost; set quota to 1, or max_lag to 1 or more.",
            ("rollout.max_lag",),
        )
    elif rollout.launcher == "inline" and rollout.quota < 1:
        yield Conflict(
            "rollout.quota",
            f"inline, the train process answers all requests of a step itself, so that quota {rollout.quota:g} saves "
            "nothing; leave it out, or set launcher to pool.",
            ("rollout.launcher",),
        )
    if rollout.max_refills and rollout.quota < 1:
        yield Conflict(
            "rollout.quota",
            f"which groups are to be refilled is known once all of a step's requests are answered, and quota "
            f"{rollout.quota:g} goes on without some; set quota to 1, or max_refills to 0.",
            ("rollout.max_refills",),
        )
    if experience.clock == "steps" and rollout.max_lag * experience.step_seconds >= experience.time_window:
        yield Conflict(
            "experience.time_window",
            f"samples may be max_lag {rollout.max_lag} x step_seconds {experience.step_seconds:g} s old when they are "
            f"drawn, and time_window {experience.time_window:g} s drops them first; raise time_window, or lower "
            "max_lag or step_seconds.",
            ("rollout.max_lag", "experience.step_seconds"),
        )


def _sizes(config: GyreConfig) -> Iterator[Conflict]:
    rollout, learning = config.rollout, config.learning
    if learning.update_steps > rollout.batch_size:
        yield Conflict(
            "learning.update_steps",
            f"{learning.update_steps} updates a step cannot share rollout.batch_size {rollout.batch_size} prompts, "
            f"as each needs one at least; set it to {rollout.batch_size} or less, or raise batch_size.",
            ("rollout.batch_size",),
        )
    samples = rollout.batch_size * rollout.samples_per_prompt
    if config.experience.buffer_size < samples:
        yield Conflict(
            "experience.buffer_size",
            f"the pool holds {config.experience.buffer_size} samples and a step makes {samples} "
            f"(batch_size {rollout.batch_size} x samples_per_prompt {rollout.samples_per_prompt}); "
            f"set it to {samples} or more.",
            ("rollout.batch_size", "rollout.samples_per_prompt"),
        )
    if learning.warmup_steps > config.experiment.steps:
        yield Conflict(
            "learning.warmup_steps",
            f"the warm-up of {learning.warmup_steps} steps is longer than the run of experiment.steps "
            f"{config.experiment.steps}, so that lr is never reached; shorten it, or lengthen the run.",
            ("experiment.steps",),
        )


def _algorithm(config: GyreConfig) -> Iterator[Conflict]:
    learning, rollout = config.learning, config.rollout
    if config.experiment.algorithm == "ppo":
        if rollout.max_refills:
            yield Conflict(
                "rollout.max_refills",
                "PPO learns from groups whose rewards are all equal as well, so that nothing is refilled; set it to 0.",
                ("experiment.algorithm",),
            )
        if learning.policy_ratio == "sequence":
            yield Conflict(
                "learning.policy_ratio",
                "PPO's advantages differ from token to token, and a ratio of the whole completion cannot weigh them; "
                "set it to token, or experiment.algorithm to grpo.",
                ("experiment.algorithm",),
            )
        if config.critic.warmup_steps >= config.experiment.steps:
            yield Conflict(
                "critic.warmup_steps",
                f"the policy stands still in the first {config.critic.warmup_steps} steps, and the run has "
                f"{config.experiment.steps}; shorten it, or lengthen the run.",
                ("experiment.steps",),
            )
    elif rollout.max_refills and not learning.skip_dead_groups:
        yield Conflict(
            "rollout.max_refills",
            "refills replace the groups whose rewards are all equal, and skip_dead_groups false trains on those; set "
            "one of them back.",
            ("learning.skip_dead_groups",),
        )
    if learning.importance_mode == "mask" and learning.importance_floor >= learning.importance_cap:
        yield Conflict(
            "learning.importance_floor",
            f"no weight lies between importance_floor {learning.importance_floor:g} and importance_cap "
            f"{learning.importance_cap:g}, so that every token is left out; lower the one or raise the other.",
            ("learning.importance_cap",),
        )


def _shaping(config: GyreConfig) -> Iterator[Conflict]:
    buffer, limit = config.reward.shaping.overlong_buffer, config.rollout.max_tokens
    if buffer > limit:
        yield Conflict(
            "reward.shaping.overlong_buffer",
            f"the penalty would begin {buffer} tokens before the end of completions of at most {limit} "
            f"(rollout.max_tokens); set it to {limit} or less.",
            ("rollout.max_tokens",),
        )


def _rewards(config: GyreConfig) -> Iterator[Conflict]:
    paths = [function.path for function in config.reward.functions]
    if not paths and config.models.reward is None:
        yield Conflict(
            "reward.functions",
            "there is neither a reward function nor models.reward; name one, such as {path: exact_match}.",
        )
    if config.models.reward is not None and "reward_model" in {path.rpartition(":")[2] for path in paths}:
        yield Conflict(
            "reward.functions",
            "a function is named reward_model, as the score of models.reward is in the metrics; rename the function.",
            ("models.reward",),
        )
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        yield Conflict(
            "reward.functions", f"{path} is listed more than once; list it once, with the sum of its weights."
        )


def _reward_launcher(config: GyreConfig) -> Iterator[Conflict]:
    reward, ray = config.reward, config.reward.ray
    if reward.launcher == "process":
        if ray != RayConfig():
            yield Conflict(
                "reward.ray",
                "this is for launcher ray; set reward.launcher to ray, or leave it out.",
                ("reward.launcher",),
            )
        return
    if reward.processes > 1:
        yield Conflict(
            "reward.processes",
            f"{reward.processes} processes are for launcher process, and on Ray the rows of a request are shared out "
            "between reward.ray.tasks; set that, and leave this out.",
            ("reward.launcher",),
        )
    if ray.address is None and config.rollout.launcher == "pool":
        yield Conflict(
            "reward.ray.address",
            "each rollout worker would start a Ray cluster of its own, as if it had the machine to itself; start one "
            "(ray start --head) and give its address, or set rollout.launcher to inline.",
            ("rollout.launcher",),
        )
    if ray.address is not None and not RAY_ADDRESS.fullmatch(ray.address):
        yield Conflict("reward.ray.address", f"{ray.address} is no address of a cluster; write HOST:PORT, or auto.")
    if ray.num_gpus > 1 and not ray.num_gpus.is_integer():
        yield Conflict(
            "reward.ray.num_gpus", f"Ray gives a task a share of one GPU or whole ones, and not {ray.num_gpus:g}."
        )


def data_urls(config: GyreConfig) -> dict[str, str]:
    """Where data of the run is to lie, by the setting that says so."""
    settings = {
        "storage.url": config.storage.url,
        "checkpoint.url": config.checkpoint.url,
        "checkpoint.warm_url": config.checkpoint.warm_url,
    }
    return {key: url for key, url in settings.items() if url is not None}


def _storage(config: GyreConfig) -> Iterator[Conflict]:
    storage, urls = config.storage, data_urls(config)
    for key, url in (*urls.items(), ("storage.endpoint", storage.endpoint)):
        if url is not None and USER_INFORMATION.search(url):
            yield Conflict(
                key,
                "a URL with a user name or password would be written to the run folder; leave them out and set them "
                "in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or in storage.block.",
            )
    if storage.endpoint is not None and not storage.endpoint.startswith(("http://", "https://")):
        yield Conflict("storage.endpoint", "this is no URL of a service; write it as in https://s3.example.org.")
    for key, url in urls.items():
        protocol, _, place = url.partition("://")
        if protocol == "s3" and (not place.partition("/")[0] or "?" in place):
            yield Conflict(
                key, "write it as in s3://BUCKET/FOLDER, and what else is needed in storage.endpoint and block."
            )
    if not any(url.startswith("s3://") for url in urls.values()):
        for key, value in (("storage.endpoint", storage.endpoint), ("storage.block", storage.block)):
            if value is not None:
                yield Conflict(
                    key, "this is for a storage on S3, and storage.url names none; leave it out.", ("storage.url",)
                )
    if "://" in config.experiment.output:
        yield Conflict(
            "experiment.output",
            "the run folder with configuration, logs and metrics is local; name a local folder, and put the data on "
            "S3 by storage.url.",
        )


def _checkpoints(config: GyreConfig) -> Iterator[Conflict]:
    checkpoint, usual = config.checkpoint, CheckpointConfig()
    of_increments = {
        "checkpoint.exact": checkpoint.exact != usual.exact,
        "checkpoint.replay_budget": checkpoint.replay_budget != usual.replay_budget,
    }
    for key, given in of_increments.items():
        if given and not checkpoint.incremental:
            yield Conflict(
                key,
                "this is for increments, and every checkpoint is a full one; set checkpoint.incremental to true, or "
                "leave it out.",
                ("checkpoint.incremental",),
            )
    if checkpoint.keep_best and config.data.evaluation_path is None and config.data.evaluation_size == 0:
        yield Conflict(
            "checkpoint.keep_best",
            "no prompt is held out, so that no checkpoint has a score and none is the best; set data.evaluation_size "
            "to 1 or more, or keep_best to 0.",
            ("data.evaluation_size",),
        )
    elif checkpoint.keep_best and config.evaluation.every == 0:
        yield Conflict(
            "checkpoint.keep_best",
            "with evaluation.every 0 no policy is evaluated while the run learns, so that none is known as the best; "
            "set every to 1 or more, or keep_best to 0.",
            ("evaluation.every",),
        )
    if checkpoint.warm_url is None:
        return
    if not checkpoint.dual_write:
        yield Conflict(
            "checkpoint.warm_url",
            "no second store is written; set checkpoint.dual_write to true, or leave it out.",
            ("checkpoint.dual_write",),
        )
    first = checkpoint.url or config.storage.url or config.experiment.output
    if checkpoint.warm_url.rstrip("/") == first.rstrip("/"):
        yield Conflict(
            "checkpoint.warm_url",
            f"a second copy at {first} would be the first one; name another place, on another volume.",
            ("checkpoint.url", "storage.url", "experiment.output"),
        )


def _shared_storage(config: GyreConfig) -> Iterator[Conflict]:
    url = config.storage.url
    if config.rollout.launcher == "pool" and url is not None and url.startswith("memory://"):
        yield Conflict(
            "storage.url",
            f"workers are processes of their own and cannot see {url}, which lies in the memory of one; give a folder "
            "or an s3:// URL.",
            ("rollout.launcher",),
        )


_CHECKS: tuple[Callable[[GyreConfig], Iterator[Conflict]], ...] = (
    _sampling,
    _workers,
    _thresholds,
    _lag,
    _sizes,
    _algorithm,
    _shaping,
    _rewards,
    _reward_launcher,
    _storage,
    _checkpoints,
    _shared_storage,
)
