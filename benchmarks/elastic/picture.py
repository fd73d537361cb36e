"""A picture of one simulated day."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from elastic.world import World
from matplotlib.figure import Figure


def draw(world: World, file: Path, band: tuple[float, float]) -> None:
    """Workers against demand, and fill below with the `band` of its thresholds, of the world's first lane."""
    trace = world.trace
    hours = np.arange(len(trace.demand)) / 60
    held, fill = (np.array([minute[part][0] for minute in world.minutes]) for part in (0, 1))
    figure = Figure(figsize=(9, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    upper.plot(hours, trace.demand / trace.worker_rate, color="0.6", linewidth=1, label="demand, in workers")
    upper.step(hours, held, where="post", color="C0", label=f"workers held, {held.mean():.1f} in the mean")
    for number, hour in enumerate(hours[trace.kill > 0]):
        upper.axvline(hour, color="C3", linewidth=0.8, linestyle=":", label=None if number else "a worker killed")
    upper.set(ylabel="workers", ylim=(0, 1.25 * held.max()), title=trace.name)
    upper.legend(loc="upper right", ncols=3)
    lower.plot(hours, fill, color="C2", linewidth=1)
    lower.axhspan(*band, color="C2", alpha=0.1)
    lower.set(xlabel="hours", ylabel="fill of the pool", ylim=(0, 1.02), xlim=(0, hours[-1]))
    figure.savefig(file, dpi=100)
