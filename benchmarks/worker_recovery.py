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
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from elastic.live_run import REQUESTS_PER_STEP, WORKERS, LiveRun, Worker, live_run, summary

from gyre_core.checkpoint.retention import Retention
from gyre_core.checkpoint.store import CheckpointStore
from gyre_core.cluster.requests import request_name
from gyre_core.storage import Storage


def beats(storage: Storage) -> list[Worker]:
    """The workers' own words, newer than the owner's view of them."""
    return [json.loads(storage.read(name)) for name in storage.list("workers")]


def unanswered(storage: Storage, worker: Worker) -> list[str]:
    """The attempts that a worker has in hand."""
    return [name for name in worker["in_flight"] if not taken_over(storage, name)]


def taken_over(storage: Storage, attempt_name: str) -> bool:
    """Whether the request is in other hands, or answered."""
    request_id, _, attempt = attempt_name.rpartition(".")
    return storage.exists(f"claims/{request_id}.{int(attempt) + 1}") or storage.exists(f"pool/{request_id}.parquet")


def kill_one(run: LiveRun, standby: int, rng: random.Random) -> dict[str, Any]:
    """Kill a worker with requests in hand, and wait until others have taken over."""
    storage = run.storage

    def at_work() -> list[Worker]:
        ready = {worker["token"] for worker in run.workers("ready")}
        if len(ready) < WORKERS or len(run.workers("standby")) < standby:
            return []
        return [worker for worker in beats(storage) if worker["token"] in ready and unanswered(storage, worker)]

    run.wait_for("all workers at work", at_work)
    time.sleep(rng.uniform(0.0, 2.0))
    victim = rng.choice(run.wait_for("a worker with requests in hand", at_work))
    known = {worker["token"] for worker in beats(storage) if worker["state"] != "standby"}
    held = unanswered(storage, victim)
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
            new = (worker for worker in beats(storage) if worker["served"] and worker["token"] not in known)
            replacement = next(new, None)
            if replacement is not None:
                replacement["first_segment"] = time.monotonic() - killed
        return len(taken) == len(held) and replacement is not None

    run.wait_for("a takeover", all_over)
    assert replacement is not None
    started = psutil.Process(replacement["pid"]).create_time() - killed_at
    return {
        "taken": list(taken.values()),
        "first_segment": replacement["first_segment"],
        "phases": {"detect_and_start": started, **replacement["start"]} if started > 0 else {},
    }


def count_requests(storage: Storage) -> dict[str, int]:
    """Requests of the committed steps: how many there were, were lost, and were taken in twice."""
    checkpoint = CheckpointStore(storage, Retention(1)).newest()
    assert checkpoint is not None
    names = [name.rpartition("admit-")[2].removesuffix(".json") for name in storage.list("learner/0001")]
    admitted = Counter(name for name in names if "-" in name and name[0].isdecimal())
    steps = range(1, checkpoint.step + 1)
    planned = {request_name(step, shard) for step in steps for shard in range(REQUESTS_PER_STEP)}
    missing = planned - admitted.keys() - set(checkpoint.state["stragglers"])
    doubled = sum(count - 1 for count in admitted.values())
    return {"steps": checkpoint.step, "requests": len(planned), "lost": len(missing), "doubled": doubled}


def main() -> None:
    """Run, kill, count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--standby", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    kills: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        with live_run(Path(folder), seed=arguments.seed, standby=arguments.standby) as run:
            for number in range(arguments.kills):
                kills.append(kill_one(run, arguments.standby, rng))
                print(f"kill {number + 1}: {kills[-1]}", flush=True)
        counts = count_requests(run.storage)
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
