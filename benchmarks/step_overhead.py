"""What Prefect costs per RL step: one flow of four tasks on the local server, against the same calls without it.

Two measurements on the server that `gyre train` starts: steps whose tasks do nothing, which gives the seconds that
orchestration adds to a step, and steps whose tasks wait for five seconds together, which gives its share of a step
of usual length. The last line is one JSON object.

    python benchmarks/step_overhead.py [--steps 50] [--long-steps 6]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import time
from collections.abc import Awaitable, Callable

from elastic.live_run import percentile_95
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from deployments.local import prefect_api

LONG_STEP = {"rollout": 2.5, "reward": 0.25, "sample": 0.05, "update": 2.2}
"""Seconds that each task of a five-second step takes."""

Step = Callable[[int, float], Awaitable[None]]


async def stage(name: str, scale: float) -> None:
    """A stand-in for a stage: waits, as for a thread that computes."""
    if scale > 0:
        await asyncio.sleep(scale * LONG_STEP[name])


STAGES = {
    name: task(stage, name=name, task_run_name=f"{name}-{{name}}", cache_policy=NO_CACHE, persist_result=False)
    for name in LONG_STEP
}


@flow(flow_run_name="step-{step:06d}", persist_result=False, validate_parameters=False)
async def orchestrated_step(step: int, scale: float) -> None:
    """A step as `flows.rl_step` makes it: an asynchronous subflow of four tasks, awaited one by one."""
    for name, run in STAGES.items():
        await run(name, scale)


async def plain_step(step: int, scale: float) -> None:
    """The same calls without Prefect."""
    for name in STAGES:
        await stage(name, scale)


async def seconds_per_step(step: Step, count: int, scale: float) -> list[float]:
    """Seconds of each of `count` steps, taken one after the other."""
    seconds: list[float] = []
    for number in range(count):
        started = time.perf_counter()
        await step(number, scale)
        seconds.append(time.perf_counter() - started)
    return seconds


@flow(persist_result=False)
async def measure(steps: int, long_steps: int) -> dict[str, float]:
    """Alternate both kinds of steps under one parent flow, as in training."""
    await seconds_per_step(orchestrated_step, 5, 0.0)  # connections and caches
    empty = await seconds_per_step(orchestrated_step, steps, 0.0)
    baseline = await seconds_per_step(plain_step, steps, 0.0)
    long_plain = await seconds_per_step(plain_step, 1, 1.0)
    long = await seconds_per_step(orchestrated_step, long_steps, 1.0)
    added = statistics.fmean(long) - long_plain[0]
    return {
        "seconds_per_step": statistics.fmean(empty) - statistics.fmean(baseline),
        "seconds_per_step_median": statistics.median(empty),
        "seconds_per_step_p95": percentile_95(empty),
        "long_step_seconds": long_plain[0],
        "long_step_added_seconds": added,
        "long_step_share": added / statistics.fmean(long),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="empty steps")
    parser.add_argument("--long-steps", type=int, default=6, help="five-second steps")
    arguments = parser.parse_args()
    logging.getLogger("prefect").setLevel(logging.WARNING)
    with prefect_api():
        result = asyncio.run(measure(arguments.steps, arguments.long_steps))
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
