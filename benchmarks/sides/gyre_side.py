"""Gyre's side of the benchmark: a training run that takes a block of steps at each command.

`python gyre_side.py SETTINGS`, settings as JSON (`Case` of `trainer_vs_trl.py`). With Prefect a step is the flow
`rl_step` with its four tasks, on a local server, and the artifacts are renewed as in training; without it, the same
stages are called by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

from prefect import flow
from protocol import Commands

from deployments.local import prefect_api
from flows.artifacts import RunArtifacts
from flows.rl_step import rl_step
from gyre_core.config import GyreConfig
from gyre_core.training import stages
from gyre_core.training.build import open_run
from gyre_core.training.run import TrainingRun

REPORTED = {
    "rewards": "reward",
    "lengths": "completions/mean_length",
    "padding": "perf/padding_share",
}
"""Figures of each step of a block, and the metrics that hold them."""


def make_config(settings: dict[str, Any]) -> GyreConfig:
    """The run's configuration: what TRL is told, and where this side keeps its data."""
    folder = Path(settings["folder"])
    return GyreConfig.model_validate(
        {
            "experiment": {
                "name": "gyre",
                "seed": settings["seed"],
                "steps": 10**6,
                "output": str(folder),
                "threads": settings["threads"],
            },
            "models": {"policy": str(folder / "policy")},
            "data": {"path": str(folder / "prompts.jsonl"), "evaluation_size": 0, "shuffle": False},
            "rollout": {
                "batch_size": settings["prompts"],
                "samples_per_prompt": settings["samples"],
                "max_tokens": settings["max_tokens"],
            },
            "reward": {"functions": [{"path": f"{Path(__file__).with_name('reward.py')}:score"}]},
            "learning": {
                "lr": settings["lr"],
                "schedule": "constant",
                "update_steps": settings["updates"],
                "skip_dead_groups": False,
            },
            "storage": {"url": settings["storage"]},
        }
    )


async def take_block(run: TrainingRun, count: int, artifacts: RunArtifacts | None) -> dict[str, Any]:
    """Take the next `count` steps; returns their figures."""
    steps = range(run.step + 1, run.step + count + 1)
    for step in steps:
        if artifacts is None:
            await stages.take_step(run, step)
        else:
            await rl_step(run.key, step)
            await run.turns.release(step)
        if artifacts is not None and step % run.config.monitor.artifact_every == 0:
            await artifacts.update()
    metrics = [run.results[step].metrics for step in steps]
    return {name: [row[key] for row in metrics] for name, key in REPORTED.items()}


async def serve(settings: dict[str, Any], commands: Commands) -> None:
    """Open the run and obey until there are no more commands."""
    run = await open_run(make_config(settings))
    artifacts = RunArtifacts(run) if settings["prefect"] else None
    try:
        commands.reply({})
        while steps := await asyncio.to_thread(commands.next_steps):
            commands.reply(await take_block(run, steps, artifacts))
    finally:
        await run.close()


@flow(persist_result=False, validate_parameters=False)
async def orchestrated(settings: dict[str, Any], commands: Commands) -> None:
    """`serve` as the parent flow of the steps."""
    await serve(settings, commands)


def main() -> None:
    """Serve, with Prefect or without."""
    settings = json.loads(sys.argv[1])
    commands = Commands()
    logging.getLogger("prefect").setLevel(logging.WARNING)
    with prefect_api() if settings["prefect"] else contextlib.nullcontext():
        asyncio.run(orchestrated(settings, commands) if settings["prefect"] else serve(settings, commands))


if __name__ == "__main__":
    main()
