"""Groups to test with, and their plain values for exact comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gyre_core.algorithms.advantages import group_advantages
from gyre_core.types import Completion, PolicyVersion, Prompt, Rollout, RolloutGroup, Score

VERSION = PolicyVersion(1, 4)


def make_group(
    group_id: str,
    rewards: Sequence[float | None],
    *,
    prompt_id: str | None = None,
    version: PolicyVersion = VERSION,
    step: int = 0,
    tokens: int = 3,
    reference: bool = False,
) -> RolloutGroup:
    """A group with one completion per reward; None abstains."""
    prompt = Prompt(prompt_id or f"prompt of {group_id}", "1+1=", "1+1=", np.array([5, 6], np.int32), {"answer": "2"})
    rollouts = []
    for index, reward in enumerate(rewards):
        ids = np.arange(index, index + tokens, dtype=np.int32)
        logs = np.full(tokens, -0.5 - index, dtype=np.float32)
        completion = Completion(group_id, index, ids, logs, f"text {index}", "stop", version, 1.5, 2.25)
        status = "abstained" if reward is None else "scored"
        score = Score({"exact": reward}, float("nan") if reward is None else reward, status)
        rollouts.append(Rollout(completion, score, logs - 1 if reference else None))
    return RolloutGroup(group_id, prompt, step, version, tuple(rollouts))


def random_groups(rng: np.random.Generator, count: int) -> list[RolloutGroup]:
    """Groups of every shape that the types allow."""
    groups = []
    for number in range(count):
        version = PolicyVersion(int(rng.integers(0, 3)), int(rng.integers(0, 99)))
        prompt = Prompt(
            f"p{rng.integers(9)}",
            "für ☃" if rng.random() < 0.5 else [{"role": "user", "content": "hi\n"}],
            "text\x00 ☃",
            rng.integers(0, 9, rng.integers(0, 6)).astype(np.int32),
            {"answer": None, "list": [1, 2.5, "x"], "nested": {"a": []}} if rng.random() < 0.5 else {},
        )
        rollouts = tuple(_random_rollout(rng, f"g{number}", index, version) for index in range(rng.integers(1, 5)))
        groups.append(RolloutGroup(f"g{number}", prompt, int(rng.integers(0, 2**40)), version, rollouts))
    return groups


def _random_rollout(rng: np.random.Generator, group_id: str, index: int, version: PolicyVersion) -> Rollout:
    length = int(rng.integers(0, 5))
    logs = -rng.random(length).astype(np.float32)
    status = ("scored", "abstained", "failed")[rng.integers(3)]
    reward = float(rng.normal()) if status == "scored" else float("nan")
    parts = {"a": reward, "b": None} if rng.random() < 0.7 else {}
    score = Score(parts, reward, status, "boom" if status == "failed" else "")
    completion = Completion(
        group_id, index, rng.integers(0, 2**31 - 1, length).astype(np.int32), logs, "é" * length,
        "length" if rng.random() < 0.5 else "stop", PolicyVersion(version.epoch, version.number + 1), 1e9 + 0.1, 2e9,
    )  # fmt: skip
    return Rollout(completion, score, None if rng.random() < 0.5 else logs * 2)


def plain(value: Any) -> Any:
    """The value as nested tuples and text, arrays with their type, equal exactly when the values are (NaN too)."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tobytes())
    if hasattr(value, "__dataclass_fields__"):
        return tuple(plain(getattr(value, name)) for name in value.__dataclass_fields__)
    if isinstance(value, dict):
        return tuple(sorted((key, plain(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(plain(item) for item in value)
    return repr(value)


def grpo(groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
    """Scaled group advantages, as the reward stage computes them."""
    return [group_advantages(group.rewards, scale=True) for group in groups]
