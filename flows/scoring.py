"""Where a run's reward functions run, by `reward.launcher`."""

from __future__ import annotations

import os
from pathlib import Path

from gyre_core.config import GyreConfig
from gyre_core.rewards.runner import FunctionRunner

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, Ray takes loopback for the machine's own address, on any system; read as `ray` is imported."""


def function_runner(config: GyreConfig) -> FunctionRunner | None:
    """What runs the reward functions; None for processes beside this one.

    Files of functions are relative to the working folder. Raises ValueError where Ray is not installed.
    """
    if config.reward.launcher == "process":
        return None
    if config.reward.ray.address is None:
        os.environ.setdefault(LOOPBACK_VARIABLE, "0")
    try:
        from flows.ray_scoring import RayRunner
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "prefect_ray"):
            raise
        raise ValueError(
            f"reward.launcher: ray needs the module {error.name}; install it by `pip install 'gyre[ray]'`, or set the "
            "launcher to process"
        ) from None
    return RayRunner(config.reward, Path.cwd())
