"""Peak memory of one update against sequence length and vocabulary, with logits made chunk by chunk and all at once.

Each point is a process of its own: a small model takes one update to touch whatever stays, then one of its size.
What counts is how far resident memory rises in the second above where it stood before. Beside it stands the size of
all logits in float32, which a usual forward pass makes several times over. The last line is one JSON object.

    python benchmarks/memory.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gyre_core.config.sections import LearningConfig
from gyre_core.learner.local import LocalLearner
from gyre_core.policy import logprobs
from gyre_core.types import Minibatch, PolicyVersion, SamplingParameters, TrainingGroup

POINTS = ((32_768, 1024), (32_768, 4096), (151_936, 512), (151_936, 1024), (151_936, 2048))
"""Vocabulary, and completion tokens of the update."""
PROMPT, COMPLETION = 32, 256
MIB = 2**20


def make_minibatch(vocabulary: int, tokens: int) -> Minibatch:
    """One group of completions of 256 tokens."""
    rng = np.random.default_rng(0)
    samples = tokens // COMPLETION
    group = TrainingGroup(
        group_id="0",
        prompt_ids=rng.integers(0, vocabulary, PROMPT).astype(np.int32),
        completions=tuple(rng.integers(0, vocabulary, COMPLETION).astype(np.int32) for _ in range(samples)),
        behaviour=tuple(np.full(COMPLETION, -10.0, dtype=np.float32) for _ in range(samples)),
        reference=None,
        truncated=np.zeros(samples, dtype=bool),
        rewards=np.zeros(samples),
        advantages=np.linspace(-1.0, 1.0, samples, dtype=np.float32),
        version=PolicyVersion(0, 0),
    )
    return Minibatch((group,), lr=1e-6, kl_coef=0.0)


def resident(field: str) -> int:
    """`VmRSS`, the process's resident memory, or `VmHWM`, its peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure(vocabulary: int, tokens: int, chunked: bool) -> int:
    """Bytes that an update of so many completion tokens takes at its peak, besides what stays."""
    torch.set_num_threads(1)
    if not chunked:
        logprobs.CHUNK_ELEMENTS = 2**62
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    learner = LocalLearner(
        Qwen3ForCausalLM(config),
        LearningConfig(tokens_per_micro_batch=2 * tokens),
        sampling=SamplingParameters(tokens // COMPLETION, COMPLETION),
        dtype=torch.float32,
    )
    for size in (COMPLETION, tokens):
        minibatch = make_minibatch(vocabulary, size)
        old = learner.begin_step(minibatch.groups, on_policy=True)
        Path("/proc/self/clear_refs").write_text("5")  # The peak starts anew.
        before = resident("VmRSS")
        learner.apply(minibatch, old)
    return resident("VmHWM") - before


def measure_apart(vocabulary: int, tokens: int, chunked: bool) -> int:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--point", str(vocabulary), str(tokens), str(int(chunked))]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    """Measure one point, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--point", nargs=3, type=int, help=argparse.SUPPRESS)
    point = parser.parse_args().point
    if point:
        print(measure(point[0], point[1], bool(point[2])))
        return
    rows: list[dict[str, int]] = []
    print(f"{'vocabulary':>10} {'tokens':>7} {'all logits':>11} {'chunked':>9} {'at once':>9}  MiB")
    for vocabulary, tokens in POINTS:
        row = {
            "vocabulary": vocabulary,
            "tokens": tokens,
            "logits": vocabulary * tokens * 4,
            "chunked": measure_apart(vocabulary, tokens, True),
            "at_once": measure_apart(vocabulary, tokens, False),
        }
        rows.append(row)
        sizes = [row[name] // MIB for name in ("logits", "chunked", "at_once")]
        print(f"{vocabulary:>10,} {tokens:>7,} {sizes[0]:>11,} {sizes[1]:>9,} {sizes[2]:>9,}", flush=True)
    print(json.dumps({"chunk_bytes": logprobs.CHUNK_ELEMENTS * 4, "points": rows}))


if __name__ == "__main__":
    main()
