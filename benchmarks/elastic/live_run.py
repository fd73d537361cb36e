"""A real run with rollout workers on a Prefect of its own, as benchmarks of recovery watch it from outside."""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_core.storage import Storage, open_storage
from gyre_core.training.remote import read_view

PATIENCE = 180.0
"""Seconds after which a benchmark gives up waiting for anything."""
WORKERS, REQUESTS_PER_STEP = 2, 8
CONFIG = """
experiment: {{name: recovery, seed: {seed}, steps: {steps}, output: {output}, threads: 1}}
rollout:
  launcher: pool
  batch_size: 32
  samples_per_prompt: 8
  groups_per_request: 4
  max_tokens: 5
  tokens_per_second: 150
  min_worker: 2
  max_worker: 2
  standby: {standby}
  heartbeat_timeout: 3
  orphan_timeout: 60
  attempts: 1000
learning: {{lr: 1e-3, warmup_steps: 5, update_steps: 2}}
evaluation: {{every: 0, prompts: 8}}
monitor: {{tensorboard: false}}
"""
"""The quickstart's policy, two slow workers, a heartbeat timeout of three seconds."""

Worker = dict[str, Any]
"""A worker as the run's owner sees it."""


def wait_for(what: str, found: Callable[[], Any], process: subprocess.Popen[bytes] | None = None) -> Any:
    """What `found` returns, once that is true; ends the benchmark when `process` ends or nothing comes."""
    deadline = time.monotonic() + PATIENCE
    while not (result := found()):
        if process is not None and process.poll() is not None:
            raise SystemExit(f"the run ended with exit code {process.returncode} while waiting for {what}")
        if time.monotonic() > deadline:
            raise SystemExit(f"gave up waiting for {what} after {PATIENCE:g} s")
        time.sleep(0.05)
    return result


@dataclass(frozen=True)
class LiveRun:
    """The process of a run, and its folder."""

    process: subprocess.Popen[bytes]
    folder: Path
    home: Path

    @property
    def storage(self) -> Storage:
        return open_storage(self.folder)

    def wait_for(self, what: str, found: Callable[[], Any]) -> Any:
        """What `found` returns, once that is true; ends the benchmark when the run ends or nothing comes."""
        return wait_for(what, found, self.process)

    def workers(self, phase: str) -> list[Worker]:
        """The workers in a phase, as the owner sees them."""
        view = read_view(self.storage)
        return [worker for worker in view["workers"] if worker["phase"] == phase] if view else []


@contextmanager
def live_run(
    folder: Path, *, seed: int, steps: int = 100_000, standby: int = 0, keep_server: bool = False
) -> Generator[LiveRun]:
    """A run of so many steps, which is interrupted at the end of the block unless it has ended."""
    config, home = folder / "recovery.yaml", folder / "home"
    config.write_text(CONFIG.format(output=folder, standby=standby, seed=seed, steps=steps))
    command = [sys.executable, "-m", "deployments.cli", "train", "--config", str(config), "--run-id", "a"]
    command += ["--keep-server"] if keep_server else []
    with (folder / "run.log").open("wb") as log:
        environment = os.environ | {"GYRE_HOME": str(home)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        yield LiveRun(process, folder / "recovery" / "a", home)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and maximum."""
    return {
        "median": round(statistics.median(values), 2),
        "p95": round(percentile_95(values), 2),
        "most": round(max(values), 2),
    }


def percentile_95(values: Sequence[float]) -> float:
    """The least of the values that 95% of them do not exceed, by nearest rank."""
    return sorted(values)[math.ceil(95 * len(values) / 100) - 1]
