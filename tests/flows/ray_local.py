"""A run's scoring on a Ray cluster of its own: prints the processes it has, waits for a line, and closes."""

import asyncio
import sys
from pathlib import Path

import psutil
from ray_rows import group, scores

from flows.scoring import function_runner
from gyre_core.config import GyreConfig
from gyre_core.rewards.scorer import Scorer


async def main() -> None:
    functions = [{"path": "judge.py:judge"}]
    config = GyreConfig.model_validate({"reward": {"functions": functions, "launcher": "ray", "ray": {"tasks": 1}}})
    scorer = Scorer(config.reward, Path.cwd(), function_runner(config))
    try:
        await scorer.start()
        assert [row.reward for row in await scores(scorer, group(0, ["1", "2"]))] == [1.0, 2.0]
        print(*(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
        sys.stdin.readline()
    finally:
        await asyncio.to_thread(scorer.close)
    print(*psutil.Process().children(recursive=True), flush=True)


asyncio.run(main())
