"""Weights of a model in training, one optimiser step apart and eight, by real policy gradients."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gyre_core.config import GyreConfig, load_config
from gyre_core.training import stages
from gyre_core.training.build import open_run
from gyre_core.training.run import TrainingRun
from gyre_core.weights.flat import FlatWeights

WARM_UP, APART = 4, 8
"""Steps before the first state, as AdamW's first ones are larger than those that follow; and from it to the last."""
SMOLLM2 = Path(__file__).parents[2] / "examples" / "smollm2" / "sentence.yaml"
BLOCK = 32
"""Weights of the de-quantised checkpoint that share a scale."""


@dataclass(frozen=True)
class States:
    """The policy in bf16 and its fp32 masters: at some step, one step later, and eight steps later."""

    bf16: tuple[FlatWeights, FlatWeights, FlatWeights]
    fp32: tuple[FlatWeights, FlatWeights, FlatWeights]


def train(model: str, lr: float) -> States:
    """Train with a constant learning rate, one update a step, and keep three states."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_train(_config(model, lr, folder), roughen=model == "smollm2"))


def _config(model: str, lr: float, folder: str) -> GyreConfig:
    experiment = {"name": "delta", "seed": 1, "steps": 1000, "output": folder}
    learning = {"lr": lr, "schedule": "constant", "warmup_steps": 0, "update_steps": 1}
    if model == "smollm2":
        settings = load_config(SMOLLM2).model_dump()
        settings["experiment"] |= experiment | {"threads": 2}
        settings["learning"] |= learning
    else:
        settings: dict[str, Any] = {
            "experiment": experiment | {"threads": 2},
            "models": {
                "tiny": {"hidden_size": 512, "layers": 8},
                "dtype": "bfloat16",
                "warm_start": {"max_steps": 150},
            },
            "data": {"evaluation_size": 0},
            "rollout": {"batch_size": 16, "samples_per_prompt": 8, "max_tokens": 5},
            "learning": learning,
        }
    settings["evaluation"] = {"every": 0, "prompts": 1}
    settings["storage"] = {"url": f"memory://delta-{model}-{lr}"}
    settings["checkpoint"] = {"interval": 1e9}
    settings["monitor"] = {"tensorboard": False}
    return GyreConfig.model_validate(settings)


async def _train(config: GyreConfig, roughen: bool) -> States:
    run = await open_run(config)
    kept: list[tuple[FlatWeights, FlatWeights]] = []
    try:
        if roughen:
            _roughen(run)
        for step in range(1, WARM_UP + APART + 1):
            await stages.take_step(run, step)
            if step in (WARM_UP, WARM_UP + 1, WARM_UP + APART):
                masters = {
                    name: tensor for name, tensor in run.learner.state()[0].items() if name.startswith("weight.")
                }
                kept.append((FlatWeights.of(run.learner.policy_weights()), FlatWeights.of(masters)))
    finally:
        await run.close()
    bf16, fp32 = zip(*kept, strict=True)
    return States(bf16, fp32)


def _roughen(run: TrainingRun) -> None:
    """Make masters that come from a quantised checkpoint look like ones that were trained for long.

    Exact zeros are spread over the cell that was rounded to them, and what lies below the last place of bf16 is drawn
    uniformly.
    """
    generator = torch.Generator().manual_seed(1)
    tensors, counters = run.learner.state()
    rough = {name: _rough(tensor, generator) for name, tensor in tensors.items() if name.startswith("weight.")}
    run.learner.load_state(tensors | rough, counters)


def _rough(master: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    rough = master.clone()
    if rough.numel() % BLOCK == 0 and rough.dim() == 2:
        blocks = rough.view(-1, BLOCK)
        ordered = blocks.sort(dim=1).values
        gaps = ordered.diff(dim=1)
        cell = gaps.masked_fill(gaps <= 0.0, torch.inf).min(dim=1, keepdim=True).values
        spread = (torch.rand(blocks.shape, generator=generator) - 0.5) * cell.masked_fill(cell.isinf(), 0.0)
        blocks[:] = torch.where(blocks == 0.0, spread, blocks)
    below = torch.randint(0, 1 << 16, rough.shape, generator=generator, dtype=torch.int32)
    patterns = rough.view(torch.int32)
    # Half a place down, so that the bf16 weight, rounded to the nearest, stays what it was.
    return ((patterns & -(1 << 16)) + below - (1 << 15)).view(torch.float32)
