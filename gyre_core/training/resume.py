"""What a resumed run may change, and what one that begins from another run's checkpoint may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from gyre_core.config import GyreConfig
from gyre_core.policy.models import Policy
from gyre_core.policy.tokens import tokenizer_digest
from gyre_core.types import Prompt

CHANGEABLE = (
    "experiment.steps",
    "experiment.output",
    "experiment.tags",
    "experiment.threads",
    "experiment.step_retries",
    "experiment.on_step_failure",
    "rollout.timeout",
    "rollout.attempts",
    "rollout.heartbeat_timeout",
    "rollout.start_timeout",
    "rollout.orphan_timeout",
    "rollout.standby",
    "rollout.tokens_per_second",
    "rollout.min_worker",
    "rollout.max_worker",
    "rollout.worker_count",
    "elastic",
    "reward.launcher",
    "reward.processes",
    "reward.ray",
    "reward.timeout",
    "reward.retries",
    "reward.max_failure_share",
    "checkpoint.interval",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.keep_best",
    "checkpoint.keep_every",
    "checkpoint.incremental",
    "checkpoint.exact",
    "checkpoint.replay_budget",
    "checkpoint.dual_write",
    "checkpoint.warm_url",
    "evaluation",
    "health",
    "monitor",
    "storage.endpoint",
    "storage.block",
    "storage.min_free",
    "storage.pause_timeout",
)
"""Settings and sections that do not change what is learned from what."""


FIXED_IN_FORK = ("experiment.algorithm", "models", "critic.trunk")
"""Settings and sections that a run which begins from another run's checkpoint must share with it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run goes on from; by default nowhere: it is a new one.

    `resume` goes on with the run from its newest checkpoint, or with `step` from the one after that step, and what came
    later is given up. `source` begins a new run from the checkpoint of another one, NAME or NAME/RUN_ID.
    """

    resume: bool = False
    step: int | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if self.source is not None and self.resume:
            raise ValueError(
                "--resume goes on with a run and --resume.from begins a new one from another run's checkpoint; give one"
            )

    @property
    def resumes(self) -> bool:
        """Whether the run itself goes on, rather than a new one begins."""
        return self.resume or (self.step is not None and self.source is None)


NEW, RESUME = Origin(), Origin(resume=True)
"""Of a run that begins from nothing, and of one that goes on from its newest checkpoint."""


def check_same_run(before: GyreConfig, now: GyreConfig) -> list[str]:
    """A line for each setting that differs, all of which a resumed run may change.

    Raises ValueError, both values side by side, when one differs that it must keep.
    """
    changes = _changes(before, now)
    _refuse(
        {name: line for name, line in changes.items() if not name.startswith(CHANGEABLE)},
        "the run to resume was started with other settings; set them back, start a new run, or begin a new one from "
        "this one's checkpoint by --resume.from",
    )
    return list(changes.values())


def check_fork(before: GyreConfig, now: GyreConfig) -> list[str]:
    """The same for a new run that begins from another one's checkpoint; almost everything may change."""
    changes = _changes(before, now)
    _refuse(
        {name: line for name, line in changes.items() if name.startswith(FIXED_IN_FORK)},
        "the learner's state of the other run does not fit these settings; set them back, or start a new run",
    )
    return list(changes.values())


def make_fingerprint(policy: Policy, prompts: Sequence[Prompt]) -> dict[str, str]:
    """What a run learns with and from that its settings name but do not hold, each by its xxh3-128."""
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id} {prompt.columns} {len(prompt.token_ids)}\n".encode())
        digest.update(prompt.token_ids.tobytes())
    return {"tokenizer": tokenizer_digest(policy.tokenizer), "training prompts": digest.hexdigest()}


def check_fingerprint(before: Mapping[str, str], now: Mapping[str, str], *, forked: bool) -> None:
    """Raise ValueError, both digests side by side, for contents that changed; a fork may have other prompts."""
    checked = ("tokenizer",) if forked else tuple(before)
    changes = {
        name: f"  {name}: had digest {before.get(name)}, has {now.get(name)}"
        for name in checked
        if before.get(name) != now.get(name)
    }
    _refuse(
        changes,
        "the files that the run was started with have changed since; put them back, or start a new run",
    )


def _changes(before: GyreConfig, now: GyreConfig) -> dict[str, str]:
    """A line for each setting that differs, by its name."""
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return {name: f"  {name}: was {old.get(name)!r}, is now {new.get(name)!r}" for name in names}


def _refuse(changes: Mapping[str, str], why: str) -> None:
    if changes:
        raise ValueError("\n".join([f"{why}:", *changes.values()]))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
