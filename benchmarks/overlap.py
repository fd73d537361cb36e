"""Steps per hour with generation and update one after the other, and with them side by side (`rollout.max_lag`).

One rollout worker that releases so many tokens a second that a step's generation takes `--seconds`, and a learner that
takes as long for its update: both are timed, so that the cores are not the limit. The last line is one JSON object;
`ratio` is the steps per hour over those at `max_lag` 0.

    python benchmarks/overlap.py [--steps 12] [--seconds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gyre_core.config import GyreConfig
from gyre_core.training import stages
from gyre_core.training.build import open_run
from gyre_core.training.run import TrainingRun

WORKER = Path(__file__).parent / "sides" / "rollout_worker.py"
PROMPTS, SAMPLES, TOKENS = 16, 4, 4
"""A step's completions are sums of three digits and the end of the sequence."""
WARM_UP = 2


def make_config(output: str, max_lag: int, steps: int, seconds: float) -> GyreConfig:
    return GyreConfig.model_validate(
        {
            "experiment": {"name": f"lag{max_lag}", "seed": 1, "steps": steps, "output": output, "threads": 1},
            "data": {"evaluation_size": 0},
            "models": {"warm_start": {"max_steps": 100}},
            "rollout": {
                "launcher": "pool",
                "max_lag": max_lag,
                "quota": 1.0,
                "batch_size": PROMPTS,
                "samples_per_prompt": SAMPLES,
                "groups_per_request": 4,
                "max_tokens": TOKENS + 1,
                "tokens_per_second": PROMPTS * SAMPLES * TOKENS / seconds,
                "worker_count": 1,
            },
            "learning": {"lr": 1e-4, "update_steps": 1},
            "monitor": {"tensorboard": False},
        }
    )


def slow_down(run: TrainingRun, seconds: float) -> None:
    """Have each update of the learner take `seconds`."""
    apply = run.learner.apply

    def timed(*arguments: Any) -> dict[str, float]:
        started = time.monotonic()
        metrics = apply(*arguments)
        time.sleep(max(0.0, seconds - (time.monotonic() - started)))
        return metrics

    run.learner.apply = timed  # type: ignore[method-assign]


async def measure(output: str, max_lag: int, steps: int, seconds: float) -> dict[str, float]:
    """Take the steps; returns steps per hour after the warm-up, and the shares of time that each side waited."""
    run = await open_run(make_config(output, max_lag, steps, seconds))
    slow_down(run, seconds)
    worker = subprocess.Popen([sys.executable, str(WORKER), run.storage.url, "0", "1"], stdout=subprocess.DEVNULL)
    places = asyncio.Semaphore(1 + max_lag)
    ended: dict[int, float] = {}

    async def take(step: int) -> None:
        await stages.take_step(run, step)
        ended[step] = time.monotonic()
        places.release()

    try:
        async with asyncio.TaskGroup() as group:
            for step in range(1, steps + 1):
                await places.acquire()
                group.create_task(take(step))
        results = [run.results[step] for step in range(WARM_UP + 1, steps + 1)]
    finally:
        await run.close()
        worker.wait(timeout=30)
    elapsed = ended[steps] - ended[WARM_UP]
    idle = [result.metrics["rollout/idle_share"] for result in results if "rollout/idle_share" in result.metrics]
    return {
        "steps_per_hour": round(3600 * len(results) / elapsed, 1),
        "learner_wait_share": round(sum(result.waited for result in results) / elapsed, 3),
        "worker_idle_share": round(sum(idle) / len(idle), 3),
    }


def main() -> None:
    """Measure three lags and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0, help="of generation, and of the update")
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as output:
        for max_lag in (0, 1, 2):
            found = asyncio.run(measure(output, max_lag, arguments.steps + WARM_UP, arguments.seconds))
            base = results["0"]["steps_per_hour"] if results else found["steps_per_hour"]
            results[str(max_lag)] = found | {"ratio": round(found["steps_per_hour"] / base, 2)}
            print(f"max_lag {max_lag}: {results[str(max_lag)]}", flush=True)
    print(json.dumps({"max_lag": results}))


if __name__ == "__main__":
    main()
