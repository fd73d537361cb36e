"""Where a step's time goes, and how much memory the process took."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import psutil

PHASES = ("generation", "reward", "sample", "update", "broadcast_weights")
"""The named parts of a step; the rest of its time is `orchestration`."""


class StepTimer:
    """Seconds of each phase of one step, which starts when the timer is made.

    A phase inside another counts for itself only, so that the phases and the orchestration add up to the step.
    Phases of one timer do not run at the same time; what ran elsewhere is given to `add`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        """Count the block's time as `phase`, also when it raises."""
        start = self._clock()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = self._clock() - start
            self.add(phase, elapsed - self._inner.pop())
            if self._inner:
                self._inner[-1] += elapsed

    def add(self, phase: str, seconds: float) -> None:
        """Count seconds that a phase took elsewhere, within this step."""
        assert phase in PHASES, f"unknown phase {phase!r}"
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def metrics(self, since: float | None = None) -> dict[str, float]:
        """`time/step` up to now, `time/{phase}` of each phase that ran, and the rest as `time/orchestration`.

        The step counts from `since`, a reading of the timer's clock, or from when the timer was made. Where steps
        overlap, a step's phases may have begun before `since`; then nothing is left as orchestration.
        """
        step = self._clock() - (self._start if since is None else since)
        phases = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        return {"time/step": step, **phases, "time/orchestration": max(0.0, step - sum(phases.values()))}


def throughput_metrics(samples: int, completion_tokens: int, seconds: Mapping[str, float]) -> dict[str, float]:
    """The throughput metrics of a step that made `samples` completions; `seconds` as of `StepTimer.metrics`."""
    metrics: dict[str, float] = {}
    if seconds["time/step"] > 0:
        metrics["perf/throughput"] = completion_tokens / seconds["time/step"]
        metrics["perf/samples_per_second"] = samples / seconds["time/step"]
    if seconds.get("time/generation", 0.0) > 0:
        metrics["perf/generation_throughput"] = completion_tokens / seconds["time/generation"]
    return metrics


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far, in bytes.

    Linux's `ru_maxrss` counts what the process was before it executed this program, so the kernel's own mark for the
    program is read there.
    """
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (mark,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(mark) * 1024


def process_started_at() -> float:
    """When this process began, in seconds since 1970."""
    return psutil.Process().create_time()
