"""Which settings a resumed run may change."""

from __future__ import annotations

from typing import Any

from gyre_core.config import GyreConfig

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
    "checkpoint",
    "evaluation",
    "health",
    "monitor",
    "storage.endpoint",
    "storage.block",
    "storage.min_free",
    "storage.pause_timeout",
)
"""Settings and sections that do not change what is learned from what."""


def check_same_run(before: GyreConfig, now: GyreConfig) -> None:
    """Raise ValueError, both values side by side, when a setting differs that a resumed run must keep."""
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    changed = [name for name in names if not name.startswith(CHANGEABLE)]
    if changed:
        rows = "\n".join(f"  {name}: was {old.get(name)!r}, is now {new.get(name)!r}" for name in changed)
        raise ValueError(
            f"the run to resume was started with other settings; set them back, or start a new run:\n{rows}"
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
