"""A real run whose demand rises and falls: workers that come and go against a fixed number, kills included.

A learner takes a step every `SLOW` seconds, then every `FAST` seconds, then slowly again; workers release so many
tokens a second that one to six of them are needed. Both are timed, so that a small machine's cores are not the limit.
Prefect and everything else are real. Once a minute a worker is killed (`kill -9`). The same steps are taken with six
workers all the time. The last line is one JSON object: hours of workers held, the wait of the learner, the reward.

    python benchmarks/elastic_run.py [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from deployments.launch import run_training
from gyre_core.config import GyreConfig
from gyre_core.learner.local import LocalLearner
from gyre_core.monitor.metrics import read_metrics
from gyre_core.storage import open_storage
from gyre_core.training.remote import read_view
from gyre_core.training.resume import NEW

SLOW, FAST = 6.0, 1.8
PHASES = ((20, SLOW), (70, FAST), (20, SLOW))
"""Steps, and the seconds that the learner takes for each."""
STEPS = sum(steps for steps, _ in PHASES)
TOKENS_PER_SECOND = 75.0
MOST = 6
KILL_EVERY = 60.0
LONGEST_WAY = 15.0
"""Seconds from a decision to the process that it causes, at the most."""


def make_config(output: Path, elastic: bool, seed: int) -> GyreConfig:
    return GyreConfig.model_validate(
        {
            "experiment": {
                "name": "elastic" if elastic else "fixed",
                "seed": seed,
                "steps": STEPS,
                "output": str(output),
                "threads": 1,
            },
            "rollout": {
                "launcher": "pool",
                "batch_size": 16,
                "samples_per_prompt": 8,
                "groups_per_request": 1,
                "max_tokens": 5,
                "tokens_per_second": TOKENS_PER_SECOND,
                "min_worker": 1,
                "max_worker": MOST,
                "worker_count": 2 if elastic else MOST,
                "heartbeat_timeout": 5,
                "orphan_timeout": 60,
            },
            "learning": {"lr": 3e-4, "warmup_steps": 5, "final_lr_fraction": 0.05, "update_steps": 2},
            "elastic": {"enabled": elastic, "scale_interval": 10, "scale_cooling": 15},
            "evaluation": {"every": 0},
            "monitor": {"tensorboard": False},
        }
    )


@contextmanager
def timed_learner() -> Generator[None]:
    """Has each step's two updates take as long as its phase says."""
    seconds = (pace / 2 for steps, pace in PHASES for _ in range(2 * steps))
    apply = LocalLearner.apply

    def timed(learner: LocalLearner, *arguments: Any) -> dict[str, float]:
        until = time.monotonic() + next(seconds, 0.0)
        metrics = apply(learner, *arguments)
        time.sleep(max(0.0, until - time.monotonic()))
        return metrics

    LocalLearner.apply = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalLearner.apply = apply  # type: ignore[method-assign]


class Watch(threading.Thread):
    """Counts the workers of a run every second, times their starts, and kills one now and then."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(daemon=True)
        self._storage = open_storage(folder)
        self._target = folder / "fleet" / "target.json"
        self._rng = random.Random(seed)
        self._stopped = threading.Event()
        self._wanted = 0
        self._grown_at = 0.0
        self.held: list[int] = []
        self.kills = 0
        self.starts: dict[str, dict[str, float]] = {}
        """Seconds of each phase of the starts that a decision to grow caused, by worker."""

    def run(self) -> None:
        next_kill = time.monotonic() + KILL_EVERY
        while not self._stopped.wait(1.0):
            self._time_starts()
            view = read_view(self._storage) if self._storage.exists("learner/workers.json") else None
            if view is None:
                continue
            alive = [worker for worker in view["workers"] if worker["phase"] in ("starting", "ready", "draining")]
            self.held.append(max(len(alive), view["wanted"]))
            ready = [worker for worker in alive if worker["phase"] == "ready"]
            if time.monotonic() > next_kill and len(ready) > 1:
                os.kill(self._rng.choice(ready)["pid"], signal.SIGKILL)
                self.kills += 1
                next_kill += KILL_EVERY
                self._grown_at = 0.0  # Whoever starts now may be a replacement.

    def _time_starts(self) -> None:
        if not self._target.exists():
            return
        wanted = json.loads(self._target.read_text())["workers"]
        if wanted > self._wanted:
            self._grown_at = self._target.stat().st_mtime
        self._wanted = wanted
        for name in self._storage.list("workers"):
            beat = json.loads(self._storage.read(name))
            if self._grown_at and "first_token" in beat["start"] and beat["worker"] not in self.starts:
                with suppress(psutil.NoSuchProcess):
                    begun = psutil.Process(beat["pid"]).create_time() - self._grown_at
                    if 0.0 < begun < LONGEST_WAY:
                        self.starts[beat["worker"]] = {"decision_to_process": begun, **beat["start"]}

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def measure(output: Path, elastic: bool, seed: int) -> dict[str, Any]:
    config = make_config(output, elastic, seed)
    folder = output / config.experiment.name / "a"
    watch = Watch(folder, seed)
    watch.start()
    started = time.monotonic()
    with timed_learner():
        code = run_training(config, origin=NEW, run_id="a", keep_server=False)
    elapsed = time.monotonic() - started
    watch.stop()
    assert code == 0, f"the run ended with exit code {code}"
    rows = read_metrics(folder)
    waited = sum(row.metrics["time/wait_for_batch"] for row in rows[1:])
    return {
        "minutes": round(elapsed / 60, 1),
        "worker_hours": round(sum(watch.held) / 3600, 3),
        "average_workers": round(statistics.fmean(watch.held), 2),
        "most_workers": max(watch.held),
        "least_workers": min(watch.held),
        "course": watch.held[::15],
        "kills": watch.kills,
        "learner_wait_share": round(waited / elapsed, 3),
        "reward": round(statistics.fmean(row.metrics["reward"] for row in rows[-20:]), 3),
        "start_seconds": {
            phase: round(statistics.median(start[phase] for start in watch.starts.values()), 2)
            for phase in next(iter(watch.starts.values()), {})
        },
        "starts": len(watch.starts),
        "reissued": int(rows[-1].metrics["rollout/reissued"]),
    }


def main() -> None:
    """Measure both and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GYRE_HOME"] = str(Path(folder) / "home")
        for name, elastic in (("elastic", True), ("fixed", False)):
            results[name] = measure(Path(folder), elastic, arguments.seed)
            print(f"{name}: {results[name]}", flush=True)
    results["worker_hours_saved"] = round(1 - results["elastic"]["worker_hours"] / results["fixed"]["worker_hours"], 3)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
