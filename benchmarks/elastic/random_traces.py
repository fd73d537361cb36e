"""Other days than the six of `benchmarks/traces`, on which the law was not tuned.

python benchmarks/elastic/random_traces.py DIR [--seed 1]
python benchmarks/elastic_vs_fixed.py --traces DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

MINUTES = 24 * 60
NOISE, NOISE_MEMORY, RATE_NOISE = 0.05, 0.9, 0.02
WORKER_RATE, LENGTH = 0.5, 400.0
"""Samples per second of a worker, at completions of that many tokens."""

Floats = NDArray[np.float64]
Day = tuple[Floats, Floats, int]
"""Workers' worth of demand and mean length, by minute; deaths."""


def noise(rng: np.random.Generator) -> Floats:
    """A factor about 1 that forgets within some ten minutes."""
    values = np.zeros(MINUTES)
    for minute in range(1, MINUTES):
        values[minute] = NOISE_MEMORY * values[minute - 1] + rng.normal(0.0, NOISE * (1 - NOISE_MEMORY**2) ** 0.5)
    return 1.0 + values


def bursts(rng: np.random.Generator) -> Floats:
    """Six workers' worth, and nine bursts of random time, length and height."""
    workers = np.full(MINUTES, 6.0)
    for start in rng.choice(MINUTES - 60, 9, replace=False):
        workers[start : start + rng.integers(8, 40)] = 6.0 * rng.uniform(1.4, 2.8)
    return workers


def steps(rng: np.random.Generator) -> Floats:
    """Another level every 45 minutes."""
    levels = np.exp(np.cumsum(rng.normal(0.0, 0.3, MINUTES // 45)))
    return np.clip(8.0 * np.repeat(levels, 45), 4.5, 20.0)


def walk(rng: np.random.Generator) -> Floats:
    """A wandering level that is drawn back to nine workers' worth."""
    level = np.zeros(MINUTES)
    for minute in range(1, MINUTES):
        level[minute] = 0.998 * level[minute - 1] + rng.normal(0.0, 0.02)
    return np.clip(9.0 * np.exp(level), 4.0, 22.0)


def make_days(rng: np.random.Generator) -> dict[str, Day]:
    """The days by name."""
    time = np.arange(MINUTES)
    same, shorter = np.full(MINUTES, LENGTH), np.linspace(900.0, 200.0, MINUTES)
    period = rng.integers(100, 200)
    return {
        "random_bursts": (bursts(rng), same, 5),
        "random_sawtooth": (4.0 + 12.0 * (time % period / period), same, 5),
        "random_sine": (10.0 + 5.0 * np.sin(2 * np.pi * time / rng.integers(180, 360)), same, 10),
        "random_steps": (steps(rng), same, 8),
        "random_walk": (walk(rng), same, 8),
        "random_storm": (np.full(MINUTES, 12.0), same, 90),
        "random_taper": (5.0 + 12.0 * np.exp(-time / rng.integers(200, 600)), same, 8),
        "random_shorter": (10.0 + 3.0 * np.sin(2 * np.pi * time / 500), shorter, 3),
    }


def write_day(file: Path, day: Day, rng: np.random.Generator) -> None:
    """A day as the benchmark reads it, with noise on demand and rate."""
    workers, length, deaths = day
    rate = WORKER_RATE * LENGTH / length
    columns = {
        "t_s": 60 * np.arange(MINUTES),
        "demand_samples_s": (workers * rate * noise(rng)).round(4),
        "worker_samples_s": (rate * (1.0 + rng.normal(0.0, RATE_NOISE, MINUTES))).round(4),
        "mean_length_tokens": length.astype(int),
        "kill": np.bincount(rng.integers(0, MINUTES, deaths), minlength=MINUTES),
    }
    pd.DataFrame(columns).to_csv(file, index=False)


def main() -> None:
    """Write the days into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, day in make_days(rng).items():
        write_day(arguments.folder / f"{name}.csv", day, rng)


if __name__ == "__main__":
    main()
