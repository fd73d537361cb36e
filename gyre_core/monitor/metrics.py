"""The metrics of a run on disk: `metrics.jsonl` and TensorBoard events, one entry a step.

A line of `metrics.jsonl` is one flat JSON object: `step`, `time` (seconds since 1970) and the step's metrics by
their names. A line counts once its newline is there. A process that is killed leaves at most a torn last line, which
readers pass over and the next writer removes; against a machine that fails, lines are safe once `sync` returns.

A writer begins by putting a copy of the file in its place, and holds it open. So a process that was frozen, and wakes
up while another one owns the run, adds its line to a file that nobody sees.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from gyre_core.monitor.names import find_metric
from gyre_core.storage import put_file, telling_out_of_space, unwatched

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
FLUSH_SECONDS = 5
"""How long TensorBoard's events may wait for their readers."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step, by name; one that was not finite is NaN."""

    step: int
    time: float
    """Seconds since 1970 of the first write for this step."""
    metrics: Mapping[str, float]


class MetricsWriter:
    """Appends the metrics of a run's steps to `folder`/metrics.jsonl and to TensorBoard.

    Opening an existing folder goes on after its last whole line. A resumed run calls `truncate_after` with the step
    of its checkpoint first. `require_owned` raises when another process may write there by now; it is asked before the
    file is replaced, and when it is another one than this writer's. Threads may share a writer.
    """

    def __init__(self, folder: Path, *, tensorboard: bool, require_owned: Callable[[], None] = unwatched) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS_FILE
        self._require_owned = require_owned
        self._writing = threading.RLock()
        self._last_step = max((row.step for row in read_metrics(folder)), default=-1)
        self._tensorboard = _TensorBoard(folder / TENSORBOARD_FOLDER) if tensorboard else None
        self._file = put_file(self._path, _whole_lines(self._path), require_owned)

    def write(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        """Log the metrics of a step at the time `now` (seconds since 1970).

        What is written for a step again joins its line: a retried step replaces its own values, an evaluation that
        ends later adds its. A value that is not finite becomes null and is counted in `health/non_finite`. Raises
        ValueError for a name that is not registered, and OutOfSpaceError with nothing written.
        """
        for name in metrics:
            find_metric(name)
        known: Mapping[str, float] = {}
        with self._writing:
            if step > self._last_step:
                _append(self._own_file(), self._path, _to_line(StepMetrics(step, now, dict(metrics))))
                self._last_step = step
            else:
                known = self._merge(step, metrics, now)
        if self._tensorboard is not None:
            self._tensorboard.write(step, {name: metrics[name] for name in metrics if name not in known}, now)

    def truncate_after(self, step: int) -> int:
        """Remove all that was logged for later steps; returns the number of lines removed."""
        rows = read_metrics(self._path.parent)
        kept = [row for row in rows if row.step <= step]
        if len(kept) < len(rows):
            self._replace(kept)
        if self._tensorboard is not None:
            self._tensorboard.purge_from(step + 1)
        self._last_step = max((row.step for row in kept), default=-1)
        return len(rows) - len(kept)

    def sync(self) -> None:
        """Make every line durable, so that it outlives the machine and not only this process; TensorBoard's events
        outlive the process. Raises OutOfSpaceError."""
        if self._tensorboard is not None:
            self._tensorboard.flush()
        with self._writing, telling_out_of_space(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _merge(self, step: int, metrics: Mapping[str, float], now: float) -> Mapping[str, float]:
        """Join `metrics` to the line of a step that is not the newest; returns the values it had."""
        rows = {row.step: row for row in read_metrics(self._path.parent)}
        earlier = rows.get(step, StepMetrics(step, now, {}))
        rows[step] = StepMetrics(step, earlier.time, {**earlier.metrics, **metrics})
        self._replace([rows[number] for number in sorted(rows)])
        return earlier.metrics

    def _replace(self, rows: Iterable[StepMetrics]) -> None:
        before = self._own_file()
        self._file = put_file(self._path, b"".join(_to_line(row) for row in rows), self._require_owned)
        before.close()

    def _own_file(self) -> FileIO:
        """The open file, when it is in its place; what somebody put there by hand takes its place."""
        if not (self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))):
            self._require_owned()
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
        return self._file


def read_metrics(folder: Path) -> list[StepMetrics]:
    """The metrics of the run in `folder`, in order of steps; empty when none were written.

    A last line without a newline is a write in progress, or was one, and is passed over. Raises ValueError, with
    file and line, for any other line that is not a step's JSON object.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_from_line(line, path, number) for number, line in enumerate(lines, start=1)]


def non_finite_names(metrics: Mapping[str, float]) -> list[str]:
    """Names of the metrics that are NaN or infinite, sorted."""
    return sorted(name for name, value in metrics.items() if not math.isfinite(value))


def _to_line(row: StepMetrics) -> bytes:
    missing = set(non_finite_names(row.metrics))
    values = {name: None if name in missing else float(value) for name, value in row.metrics.items()}
    line: dict[str, Any] = {"step": row.step, "time": row.time, **values, "health/non_finite": len(missing)}
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def _from_line(line: bytes, path: Path, number: int) -> StepMetrics:
    try:
        values: dict[str, Any] = json.loads(line)
        step, time = int(values.pop("step")), float(values.pop("time"))
        metrics = {name: math.nan if value is None else float(value) for name, value in values.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}, line {number}: not the metrics of a step ({error}); remove the line") from error
    return StepMetrics(step, time, metrics)


def _append(file: FileIO, path: Path, data: bytes) -> None:
    """Add a line to the file at `path`, whole or not at all; raises OutOfSpaceError."""
    with telling_out_of_space(path, len(data)):
        end, written = file.seek(0, os.SEEK_END), 0
        try:
            while written < len(data):
                written += file.write(data[written:])
        except OSError:
            file.truncate(end)  # A line that was cut would spoil the next one.
            raise


def _whole_lines(path: Path) -> bytes:
    """What of the file ends with a newline."""
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


class _TensorBoard:
    """Scalars in TensorBoard's event files.

    They are a view of what metrics.jsonl holds, so a write that fails is told and leaves the run alone; the next one
    begins another file.
    """

    def __init__(self, folder: Path) -> None:
        # Loads torch, which readers of metrics do without.
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        self._open: Callable[..., SummaryWriter] = partial(SummaryWriter, str(folder), flush_secs=FLUSH_SECONDS)
        self._writer: SummaryWriter | None = None
        self._purged_from: int | None = None

    def write(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        # One event for all: `add_scalar` makes one for each, which takes ten times as long.
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        with self._telling_failures():
            if self._writer is None:
                self._writer, self._purged_from = self._open(purge_step=self._purged_from), None
            assert self._writer.file_writer is not None, "the writer is open"
            self._writer.file_writer.add_summary(self._summary(value=values), step, walltime=now)

    def flush(self) -> None:
        """Have readers see all that was written."""
        with self._telling_failures():
            if self._writer is not None:
                self._writer.flush()

    def purge_from(self, step: int) -> None:
        """Make readers forget earlier events from `step` on, once something is written."""
        self.close()
        self._purged_from = step

    def close(self) -> None:
        writer, self._writer = self._writer, None
        with self._telling_failures():
            if writer is not None:
                writer.close()

    @contextlib.contextmanager
    def _telling_failures(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("TensorBoard's events of the last seconds are lost, metrics.jsonl has all: %s", error)
            self._writer = None
