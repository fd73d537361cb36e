"""Rollout workers killed again and again in a real run: what is lost, and how long until others have taken over.

A run of the quickstart's policy with two slow workers on a Prefect of its own, heartbeat timeout three seconds. At
random times a worker that has requests in hand is killed (`kill -9`). Measured from the kill: until each of its
requests is taken by a live worker, and until the worker that takes its place has committed its first segment; the
phases of that worker's start are its own words. At the end the ledger tells whether a request was lost or taken in
twice. The last line is one JSON object; times are seconds.

    python benchmarks/worker_recovery.py [--kills 30] [--standby 0] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from gyre_core.checkpoint.store import CheckpointStore
from gyre_core.cluster.requests import request_name
from gyre_core.storage import Storage, open_storage
from gyre_core.training.remote import read_view

PATIENCE = 180.0
"""Seconds after which the benchmark gives up waiting for anything."""
REQUESTS_PER_STEP, WORKERS = 8, 2
CONFIG = """
experiment: {{name: recovery, seed: {seed}, steps: 100000, output: {output}, threads: 1}}
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

Worker = dict[str, Any]
"""A worker as the run's owner sees it."""


def wait_for(what: str, found: Callable[[], Any], run: subprocess.Popen[bytes]) -> Any:
    """What `found` returns, once that is true."""
    deadline = time.monotonic() + PATIENCE
    while not (result := found()):
        if run.poll() is not None:
            raise SystemExit(f"the run ended with exit code {run.returncode} while waiting for {what}")
        if time.monotonic() > deadline:
            raise SystemExit(f"gave up waiting for {what} after {PATIENCE:g} s")
        time.sleep(0.05)
    return result


def workers_in(storage: Storage, phase: str) -> list[Worker]:
    view = read_view(storage)
    return [worker for worker in view["workers"] if worker["phase"] == phase] if view else []


def beats(storage: Storage) -> list[Worker]:
    """The workers' own words, newer than the owner's view of them."""
    return [json.loads(storage.read(name)) for name in storage.list("workers")]


def taken_over(storage: Storage, attempt_name: str) -> bool:
    """Whether the request is in other hands, or answered."""
    request_id, _, attempt = attempt_name.rpartition(".")
    return storage.exists(f"claims/{request_id}.{int(attempt) + 1}") or storage.exists(f"pool/{request_id}.parquet")


def kill_one(storage: Storage, standby: int, rng: random.Random, run: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Kill a worker with requests in hand, and wait until others have taken over."""

    def ready() -> list[Worker]:
        busy = [worker for worker in workers_in(storage, "ready") if worker["in_flight"]]
        return busy if len(busy) == WORKERS and len(workers_in(storage, "standby")) == standby else []

    wait_for("all workers at work", ready, run)
    time.sleep(rng.uniform(0.0, 2.0))
    victim = rng.choice(wait_for("all workers at work", ready, run))
    at_work = {worker["token"] for worker in beats(storage) if worker["state"] != "standby"}
    held = victim["in_flight"]
    os.kill(victim["pid"], signal.SIGKILL)
    killed, killed_at = time.monotonic(), time.time()
    taken: dict[str, float] = {}
    replacement: Worker | None = None

    def all_over() -> bool:
        nonlocal replacement
        for name in held:
            if name not in taken and taken_over(storage, name):
                taken[name] = time.monotonic() - killed
        if replacement is None:
            new = (worker for worker in beats(storage) if worker["served"] and worker["token"] not in at_work)
            replacement = next(new, None)
            if replacement is not None:
                replacement["first_segment"] = time.monotonic() - killed
        return len(taken) == len(held) and replacement is not None

    wait_for("a takeover", all_over, run)
    assert replacement is not None
    started = psutil.Process(replacement["pid"]).create_time() - killed_at
    return {
        "taken": list(taken.values()),
        "first_segment": replacement["first_segment"],
        "phases": {"detect_and_start": started, **replacement["start"]} if started > 0 else {},
    }


def count_requests(storage: Storage) -> dict[str, int]:
    """Requests of the committed steps: how many there were, were lost, and were taken in twice."""
    checkpoint = CheckpointStore(storage, 1).newest()
    assert checkpoint is not None
    names = [name.rpartition("admit-")[2].removesuffix(".json") for name in storage.list("learner/0001")]
    admitted = Counter(name for name in names if "-" in name and name[0].isdecimal())
    steps = range(1, checkpoint.step + 1)
    planned = {request_name(step, shard) for step in steps for shard in range(REQUESTS_PER_STEP)}
    missing = planned - admitted.keys() - set(checkpoint.state["stragglers"])
    doubled = sum(count - 1 for count in admitted.values())
    return {"steps": checkpoint.step, "requests": len(planned), "lost": len(missing), "doubled": doubled}


def summary(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 2),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 2),
        "most": round(ordered[-1], 2),
    }


def main() -> None:
    """Run, kill, count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--standby", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "recovery.yaml"
        config.write_text(CONFIG.format(output=folder, standby=arguments.standby, seed=arguments.seed))
        command = [sys.executable, "-m", "deployments.cli", "train", "--config", str(config), "--run-id", "a"]
        log = (Path(folder) / "run.log").open("wb")
        environment = os.environ | {"GYRE_HOME": str(Path(folder) / "home")}
        run = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        storage = open_storage(Path(folder) / "recovery" / "a")
        kills: list[dict[str, Any]] = []
        try:
            for number in range(arguments.kills):
                kills.append(kill_one(storage, arguments.standby, rng, run))
                print(f"kill {number + 1}: {kills[-1]}", flush=True)
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(PATIENCE)
        counts = count_requests(storage)
    phases = {
        name: [kill["phases"][name] for kill in kills if name in kill["phases"]]
        for kill in kills
        for name in kill["phases"]
    }
    print(
        json.dumps(
            {
                "kills": len(kills),
                "standby": arguments.standby,
                **counts,
                "request_taken": summary([seconds for kill in kills for seconds in kill["taken"]]),
                "first_segment": summary([kill["first_segment"] for kill in kills]),
                "phases": {name: summary(values) for name, values in phases.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
