"""The Prefect server killed again and again under a real run: how long the run pauses, and how it ends.

A run of the quickstart's policy with two slow workers on a Prefect of its own. Now and then its server is killed
(`kill -9`); the supervisor starts it again. Measured from the kill: the outage, until the server answers again, and
the pause, by which a step came later than steps do otherwise. At the end every flow run and task run of the training
is asked for: none may be open. The last line is one JSON object; times are seconds.

    python benchmarks/server_recovery.py [--kills 5] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from elastic.live_run import LiveRun, live_run, summary

from deployments.local import LocalServer, stop_local_server
from gyre_core.monitor.metrics import read_metrics

STEPS_BETWEEN = 20
"""Steps of a run from one kill to the next, before the first, and after the last."""


def server_of(run: LiveRun) -> LocalServer | None:
    return LocalServer.known(run.home / "server")


def answers(server: LocalServer | None) -> bool:
    if server is None or not server.process.running():
        return False
    try:
        return httpx.get(f"{server.api_url}/health", timeout=1.0).status_code == 200
    except httpx.HTTPError:
        return False


def steps_done(run: LiveRun) -> int:
    return max((row.step for row in read_metrics(run.folder)), default=0)


def kill_server(run: LiveRun) -> tuple[float, float]:
    """Kill the server and wait until it is back; returns both times, in seconds since 1970."""
    server = server_of(run)
    assert server is not None
    server.process.find().kill()
    killed_at = time.time()
    run.wait_for("the server to answer again", lambda: answers(server_of(run)))
    return killed_at, time.time()


def pauses(run: LiveRun, outages: list[tuple[float, float]]) -> list[float]:
    """By how much the longest wait for a step around each outage exceeded the usual one."""
    times = [row.time for row in read_metrics(run.folder)]
    usual = statistics.median(later - earlier for earlier, later in pairwise(times))
    return [
        max(later - earlier - usual for earlier, later in pairwise(times) if later > killed and earlier < back + 60.0)
        for killed, back in outages
    ]


def states(api_url: str) -> dict[str, dict[str, int]]:
    """How many runs of flows and of tasks there are in each state."""
    found: dict[str, dict[str, int]] = {}
    for kind in ("flow_runs", "task_runs"):
        runs: list[dict[str, Any]] = []
        while page := httpx.post(f"{api_url}/{kind}/filter", json={"limit": 200, "offset": len(runs)}).json():
            runs += page
        found[kind] = dict(Counter(run["state_name"] for run in runs))
    return found


def main() -> None:
    """Run, kill, wait for the end and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    outages: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GYRE_HOME"] = str(Path(folder) / "home")
        steps = STEPS_BETWEEN * (arguments.kills + 1)
        with live_run(Path(folder), seed=arguments.seed, steps=steps, keep_server=True) as run:
            for number in range(arguments.kills):
                run.wait_for("steps", lambda number=number: steps_done(run) >= STEPS_BETWEEN * (number + 1))
                time.sleep(rng.uniform(0.0, 3.0))
                outages.append(kill_server(run))
                print(f"kill {number + 1}: down for {outages[-1][1] - outages[-1][0]:.1f} s", flush=True)
            exit_code = run.process.wait(STEPS_BETWEEN * 10.0)
        server = server_of(run)
        assert server is not None
        found = states(server.api_url)
        stop_local_server()
        paused = pauses(run, outages)
        done = steps_done(run)
    down = [back - killed for killed, back in outages]
    print(
        json.dumps(
            {
                "kills": len(outages),
                "exit_code": exit_code,
                "steps": done,
                "outage": summary(down),
                "pause": summary(paused),
                "pause_beyond_outage": summary([pause - outage for pause, outage in zip(paused, down, strict=True)]),
                "states": found,
            }
        )
    )


if __name__ == "__main__":
    main()
