"""The learner killed in a real run: how long until it learns again, and where the time goes.

The quickstart's policy is trained through the deployment `train`, on a platform of its own, with an increment of the
checkpoint every five steps. In each trial, some steps after the one before, the train process is killed (`kill -9`),
with `--with-worker` its Prefect worker as well. Nothing is done to bring it back. Measured from the kill: `begun`, till
the next process has begun, and `learning`, until that has committed its first step. Between the two lie the phases that
the run itself logs under `recovery/`. With `--restore-from` the checkpoints in the other store are removed right after
the kill. The last line is one JSON object; times are seconds.

    python benchmarks/learner_recovery.py [--trials 20] [--with-worker] [--restore-from primary|warm] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import psutil
from elastic.live_run import summary, wait_for
from prefect.client.orchestration import get_client

from deployments.platform import local_platform
from deployments.platform_state import PlatformState
from flows.names import LEARNER_POOL, TRAIN_DEPLOYMENT
from gyre_core.config import load_config
from gyre_core.monitor.metrics import StepMetrics, read_metrics
from gyre_core.training.recovery_report import PHASES

NAME, RUN_ID = "quickstart", "a"
QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
CHECKPOINT = {"incremental": True, "every": 5, "replay_budget": 5, "dual_write": True}
STEPS_BETWEEN = (11, 18)
"""The kill comes so many steps after the one before, so that there are new checkpoints by then."""
DEATHS_OF_A_WORKER = 2
"""On one platform: a Prefect worker that dies again and again is started again after longer and longer pauses."""
BARS = {False: 25.0, True: 40.0}
"""Seconds that may pass until the run learns again, without and with the death of its Prefect worker."""


async def start_run(output: Path, seed: int) -> None:
    """Start training through its deployment."""
    config = load_config(QUICKSTART).model_dump(mode="json", exclude_unset=True)
    config["experiment"] |= {"output": str(output), "seed": seed, "steps": 100_000}
    config |= {"checkpoint": CHECKPOINT, "evaluation": {"every": 0}}
    async with get_client() as client:
        deployment = await client.read_deployment_by_name(TRAIN_DEPLOYMENT)
        parameters = {"config": config, "run_id": RUN_ID}
        await client.create_flow_run_from_deployment(deployment.id, parameters=parameters)


def last_step(folder: Path) -> int:
    return max((row.step for row in read_metrics(folder)), default=0)


def owner(folder: Path) -> psutil.Process:
    """The process that trains, or trained last."""
    return psutil.Process(int((folder / "owner.lock").read_text()))


def kill(folder: Path, with_worker: bool) -> float:
    """Kill the train process, and before it its Prefect worker if wanted; returns when, in seconds since 1970."""
    process = owner(folder)
    if with_worker:
        state = PlatformState.load()
        assert state is not None
        worker = state.workers[LEARNER_POOL].process
        assert worker is not None
        os.kill(worker.pid, signal.SIGKILL)
    process.kill()
    return time.time()


def trial(folder: Path, stores: dict[str, Path], arguments: argparse.Namespace, rng: random.Random) -> dict[str, float]:
    """One more death of a run, and its recovery."""
    reached = last_step(folder) + rng.randint(*STEPS_BETWEEN)
    wait_for(f"step {reached}", lambda: last_step(folder) >= reached)
    time.sleep(rng.uniform(0.0, 1.0))
    killed_at = kill(folder, arguments.with_worker)
    for name, place in stores.items():
        if arguments.restore_from not in (None, name):
            shutil.rmtree(place)

    def first_update() -> StepMetrics | None:
        rows = (row for row in read_metrics(folder) if row.time > killed_at and "recovery/total" in row.metrics)
        return next(rows, None)

    row = wait_for("the next update", first_update)
    return {
        "learning": row.time - killed_at,
        "begun": owner(folder).create_time() - killed_at,
        **{phase: row.metrics[f"recovery/{phase}"] for phase in (*PHASES, "replayed_steps")},
    }


def kill_again_and_again(times: int, arguments: argparse.Namespace, rng: random.Random) -> Generator[dict[str, float]]:
    """So many trials with one run, on a platform of its own."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["GYRE_HOME"] = str(Path(place) / "home")
        output = Path(place) / "runs"
        folder = output / NAME / RUN_ID
        stores = {"primary": folder / "checkpoints", "warm": Path(place) / "runs-warm" / NAME / RUN_ID}
        with local_platform():
            asyncio.run(start_run(output, arguments.seed))
            for _ in range(times):
                yield trial(folder, stores, arguments, rng)


def main() -> None:
    """Run the trials and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--with-worker", action="store_true")
    parser.add_argument("--restore-from", choices=("primary", "warm"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    trials: list[dict[str, float]] = []
    while len(trials) < arguments.trials:
        left = arguments.trials - len(trials)
        count = min(left, DEATHS_OF_A_WORKER) if arguments.with_worker else left
        for result in kill_again_and_again(count, arguments, rng):
            trials.append(result)
            told = {name: round(value, 2) for name, value in result.items()}
            print(f"trial {len(trials)}: {told}", flush=True)
    figures = {name: summary([result[name] for result in trials]) for name in trials[0]}
    print(
        json.dumps(
            {
                "trials": len(trials),
                "with_worker": arguments.with_worker,
                "restore_from": arguments.restore_from,
                **figures,
                "bar": BARS[arguments.with_worker],
                "passed": figures["learning"]["p95"] <= BARS[arguments.with_worker],
            }
        )
    )


if __name__ == "__main__":
    main()
