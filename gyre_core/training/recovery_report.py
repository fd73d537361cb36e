"""How long each phase of a recovery took, from the last sign of life before it to the first update after it."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from gyre_core.monitor.metrics import StepMetrics

PREFIX = "recovery/"
PHASES = ("detect", "start", "restore", "replay", "publish", "first_sample", "first_update")
"""In their order. `detect` lasts from the last sign of life of the process before to the beginning of this one, `start`
until a checkpoint is looked for, `first_sample` from the open run to the first new samples, engine warm-up included,
and `first_update` from there to the first step that is committed."""


class Recovery:
    """The phases of one recovery, in seconds; empty for a run that began from nothing."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._since: float | None = None
        self.steps = 0
        """Steps that were trained on again to come back to the state in the checkpoint."""

    def begin(self, died_at: float, started_at: float) -> None:
        """A recovery is under way in a process that began at `started_at`; times are seconds since 1970."""
        self._seconds = {"detect": max(0.0, started_at - died_at), "start": max(0.0, time.time() - started_at)}

    @contextmanager
    def timed(self, phase: str) -> Generator[None]:
        """Count the time of a block as a phase; a phase within another one is not counted twice."""
        before, started = sum(self._seconds.values()), time.monotonic()
        try:
            yield
        finally:  # A checkpoint that could not be restored took its time too.
            inner = sum(self._seconds.values()) - before
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - started - inner

    def opened(self) -> None:
        """The run is open, and what comes first is waited for."""
        if "detect" in self._seconds:
            self._since = time.monotonic()

    def reached(self, phase: str) -> None:
        """The phase ends that began when the one before it ended; only the first time counts."""
        if self._since is not None and phase not in self._seconds:
            self._seconds[phase], self._since = time.monotonic() - self._since, time.monotonic()

    @property
    def seconds(self) -> dict[str, float]:
        """The phases so far."""
        return dict(self._seconds)

    def metrics(self) -> dict[str, float]:
        """The phases and their sum under `recovery/`, from the first update until they are told."""
        if self._since is None or "first_update" not in self._seconds:
            return {}
        return {
            **{f"{PREFIX}{phase}": self._seconds.get(phase, 0.0) for phase in PHASES},
            f"{PREFIX}total": sum(self._seconds.values()),
            f"{PREFIX}replayed_steps": float(self.steps),
        }

    def told(self) -> None:
        """The metrics are written; once they are complete, that is the end of it."""
        if self.metrics():
            self._since = None


def recovery_lines(rows: Sequence[StepMetrics]) -> list[str]:
    """A line for each recovery in a run's metrics, oldest first: where it went on, and how long each phase took."""
    lines: list[str] = []
    for row in rows:
        total = row.metrics.get(f"{PREFIX}total")
        if total is not None:
            seconds = {phase: row.metrics.get(f"{PREFIX}{phase}") or 0.0 for phase in PHASES}
            parts = ", ".join(f"{phase.replace('_', ' ')} {value:.1f}" for phase, value in seconds.items())
            repeated = int(row.metrics.get(f"{PREFIX}replayed_steps") or 0)
            steps = f"; {repeated} steps repeated" if repeated else ""
            lines.append(f"before step {row.step}, {total:.1f} s: {parts}{steps}")
    return lines
