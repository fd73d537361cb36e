"""What a checkpoint of SmolLM2-135M costs: bytes, and seconds for which a step is blocked, beside other ways to save.

A run on one of its examples (`make smollm2` first) writes a checkpoint after every step: a full one, then increments
that are repeated, or that hold differences. Beside them the same state, weights and both moments in float32, is written
by `torch.save` and by safetensors, to the same disk, with the sync that a checkpoint needs and without. At last the run
is resumed, which repeats what the last increment names. The last line is one JSON object.

    python benchmarks/checkpoints.py [--steps 4]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from gyre_core.config import GyreConfig, load_config
from gyre_core.training import stages
from gyre_core.training.build import open_run
from gyre_core.training.checkpoints import open_checkpoints
from gyre_core.training.resume import RESUME

EXAMPLE = Path(__file__).parents[1] / "examples" / "smollm2" / "sentence.yaml"


def config_of(folder: str, exact: str, steps: int) -> GyreConfig:
    """The example with a checkpoint after each step, kept all."""
    settings = load_config(EXAMPLE).model_dump()
    settings["experiment"] |= {"output": folder, "threads": 2, "steps": 100, "name": exact}
    settings["evaluation"] = {"every": 0, "prompts": 1}
    settings["monitor"] = {"tensorboard": False}
    settings["checkpoint"] = {
        "every": 1,
        "keep": steps,
        "incremental": True,
        "exact": exact,
        "replay_budget": 1e9,
        "interval": 1e9,
    }
    return GyreConfig.model_validate(settings)


async def train(folder: str, exact: str, steps: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train some steps; returns what their checkpoints cost, and the learner's last state."""
    run = await open_run(config_of(folder, exact, steps), run_id="a")
    seconds: list[float] = []
    update: list[float] = []
    for step in range(1, steps + 1):
        for stage in (stages.rollout, stages.reward, stages.sample):
            await stage(run, step)
        started = time.perf_counter()
        await stages.update(run, step)
        update.append(time.perf_counter() - started)
        await run.publisher.settled()
        started = time.perf_counter()
        await run.save()
        seconds.append(time.perf_counter() - started)
        run.report(step)
    state = {name: tensor.clone() for name, tensor in run.learner.state()[0].items()}
    store = open_checkpoints(run.config, run.folder)
    manifests = [store.manifest(name) for name in store.names()]
    await run.close()
    increments = [manifest for manifest in manifests if manifest.base is not None]
    blocked = [taken for taken, manifest in zip(seconds, manifests, strict=True) if manifest.base is not None]
    costs = {
        "full_bytes": manifests[0].size,
        "full_seconds": seconds[0],
        "bytes": statistics.mean(manifest.size for manifest in increments),
        "pinned_bytes": increments[-1].pinned_bytes,
        "seconds": statistics.median(blocked),
        "update_seconds": statistics.median(update),
    }
    costs["times_smaller"] = costs["full_bytes"] / costs["bytes"]
    return costs, state


async def resume(folder: str, exact: str, steps: int) -> dict[str, float]:
    """Seconds to restore the last checkpoint, and of these to repeat."""
    run = await open_run(config_of(folder, exact, steps), run_id="a", origin=RESUME)
    assert run.step == steps
    phases = run.recovery.seconds
    await run.close()
    return {"restore": phases["restore"], "replay": phases["replay"], "replayed_steps": run.recovery.steps}


def seconds_of(write: Callable[[Path], object], folder: str, sync: bool) -> float:
    """The median of three times; the file before goes once the new one is written, as it does where one is kept."""
    found: list[float] = []
    paths = [Path(folder) / f"other-{number}" for number in range(3)]
    for before, path in zip([None, *paths], paths, strict=False):
        started = time.perf_counter()
        write(path)
        if sync:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        found.append(time.perf_counter() - started)
        if before is not None:
            before.unlink()
    paths[-1].unlink()
    return statistics.median(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    result: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        for exact in ("replay", "always"):
            result[exact], state = asyncio.run(train(folder, exact, steps))
            result[exact] |= asyncio.run(resume(folder, exact, steps))
            print(exact, json.dumps(result[exact]), flush=True)
        writers = {
            "torch_save": lambda path: torch.save(state, path),
            "safetensors": lambda path: save_file(state, path),
        }
        for name, write in writers.items():
            for sync in (True, False):
                result[name + ("" if sync else "_unsynced")] = seconds_of(write, folder, sync)
    for exact in ("replay", "always"):
        result[exact]["blocked_over_torch_save"] = result[exact]["seconds"] / result["torch_save"]
        result[exact]["blocked_over_safetensors"] = result[exact]["seconds"] / result["safetensors"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
