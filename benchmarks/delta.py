"""Differences of policy versions: how small, how near to their entropy, and how fast, beside other schemes.

States one optimiser step apart and eight, by real policy gradients, at several learning rates: of SmolLM2-135M on one
of its examples (`make smollm2` first), whose de-quantised checkpoint is made to look trained (its exact zeros are
spread over their cell, and what lies below the last place of bf16 is drawn uniformly), and of a Qwen3 of 30M that was
trained on sums. Speeds are of one thread, per byte of the whole weights, beside memcpy, zstd and safetensors on the
same array. The last line is one JSON object, of SmolLM2.

    python benchmarks/delta.py [--model smollm2|qwen3] [--lr 5e-7 1e-6 1e-5]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from deltas.schemes import entropy_bytes, gap_value_zstd, xor_zstd, zstd
from deltas.states import APART, train
from safetensors.numpy import load_file, save_file

from gyre_core.weights.chain import LONGEST_CHAIN
from gyre_core.weights.codec import apply_delta, encode_delta
from gyre_core.weights.delta import WeightState, encode_weights
from gyre_core.weights.flat import FlatWeights

REPEATS = 5


def speed(size: int, work: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> float:
    """MB/s of the best of some runs, each after `prepare`."""
    best = float("inf")
    for _ in range(REPEATS):
        prepare()
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return round(size / best / 1e6)


def measure(states: tuple[FlatWeights, FlatWeights, FlatWeights]) -> dict[str, Any]:
    """Ratios to the full bytes and speeds of a difference of one step, and the ratio of one of eight."""
    (size,) = states[0].patterns
    old, new = (state.patterns[size] for state in states[:2])
    whole = [WeightState.of(state) for state in states]
    delta = encode_delta(old, new)
    result = old.copy()
    apply_delta(result, delta)
    assert np.array_equal(result, new), "lossless"
    stored = len(encode_weights(whole[0], whole[1]))
    eight = len(encode_weights(whole[0], whole[2]))
    gap_value = gap_value_zstd(old, new)
    figures = {
        "changed_share": round(float(np.mean(old != new)), 6),
        "ratio": round(old.nbytes / stored, 1),
        f"ratio_{APART}_steps": round(old.nbytes / eight, 1),
        "share_of_bound": round(entropy_bytes(old, new) / len(delta), 3),
        "over_gap_value_zstd": round(gap_value / stored, 2),
        "over_xor_zstd": round(xor_zstd(old, new) / stored, 2),
        "chain_average_ratio": round(chain_average(old.nbytes, stored), 1),
    }
    target = old.copy()
    figures["encode_mb_s"] = speed(old.nbytes, lambda: encode_delta(old, new))
    figures["decode_mb_s"] = speed(old.nbytes, lambda: apply_delta(target, delta), lambda: np.copyto(target, old))
    return figures


def chain_average(full: int, delta: int) -> float:
    """How many times smaller versions are on average, with the whole one that begins each chain counted in."""
    length = min(LONGEST_CHAIN, full // delta)
    return full * (1 + length) / (full + length * delta)


def beside(weights: FlatWeights) -> dict[str, float]:
    """Speeds of copying, compressing, writing and reading the same array."""
    (patterns,) = weights.patterns.values()
    target = np.empty_like(patterns)
    with TemporaryDirectory(dir="/dev/shm") as folder:
        file = Path(folder) / "weights.safetensors"
        return {
            "memcpy": speed(patterns.nbytes, lambda: np.copyto(target, patterns)),
            "zstd": speed(patterns.nbytes, lambda: zstd(patterns)),
            "safetensors_save": speed(patterns.nbytes, lambda: save_file({"weights": patterns}, file)),
            "safetensors_load": speed(patterns.nbytes, lambda: load_file(file)),
        }


def main() -> None:
    """Train, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=["qwen3", "smollm2"], default=["qwen3", "smollm2"])
    parser.add_argument("--lr", nargs="+", default=["5e-07", "1e-06", "1e-05"])
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for model in arguments.model:
        results = {"bf16": {}, "fp32": {}}
        for lr in arguments.lr:
            states = train(model, float(lr))
            for kind, triple in (("bf16", states.bf16), ("fp32", states.fp32)):
                results[kind][lr] = {"gyre": measure(triple)}
                print(f"{model} {kind} {lr}: {results[kind][lr]['gyre']}", flush=True)
        results["beside_mb_s"] = beside(states.bf16[0])
        print(f"{model}: {results['beside_mb_s']}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
