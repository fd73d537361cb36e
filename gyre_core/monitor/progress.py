"""A run's progress for the person at the terminal, and for the log file of the one who is not there."""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from types import TracebackType
from typing import IO, Any, Self, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

PACE_STEPS = 10
"""Steps whose median duration the remaining time is foretold from."""


class ProgressDisplay:
    """Shows the steps of a run while its `with` block lasts.

    On a terminal one line stays at the bottom, below whatever is printed or logged meanwhile. Elsewhere a plain line
    is printed for the first step, the last, and one every `every_seconds` in between.
    """

    def __init__(
        self,
        total_steps: int,
        finished_steps: int = 0,
        console: Console | None = None,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._finished = finished_steps
        self._console = console if console is not None else Console()
        self._every = every_seconds
        self._clock = clock
        self._printed_at = -math.inf
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._open = contextlib.ExitStack()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            values = TextColumn("{task.fields[values]}", markup=False)
            bar = Progress(MofNCompleteColumn(), BarColumn(bar_width=10), values, console=self._console)
            bar.add_task("training", total=self._total, completed=self._finished, values="")
            with contextlib.ExitStack() as stack:
                stack.enter_context(bar)
                stack.enter_context(_logging_above(self._console))
                self._open = stack.pop_all()
            self._bar = bar
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def update(self, finished_steps: int, metrics: Mapping[str, float]) -> None:
        """Show that `finished_steps` steps are done, and the metrics of the last of them."""
        self._finished = finished_steps
        if math.isfinite(seconds := metrics.get("time/step", math.nan)):
            self._pace.append(seconds)
        values = "  ".join(_shown_values(metrics) + self._remaining())
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=finished_steps, values=values)
        elif self._clock() - self._printed_at >= self._every or finished_steps == self._total:
            self._printed_at = self._clock()
            self.print(f"step {finished_steps}/{self._total}  {values}")

    def print(self, line: str) -> None:
        """Print a line of its own, above the progress line."""
        self._console.print(Text(line), soft_wrap=True)

    def _remaining(self) -> list[str]:
        left = self._total - self._finished
        if not self._pace or left <= 0:
            return []
        return [f"{duration_text(statistics.median(self._pace) * left)} left"]


def duration_text(seconds: float) -> str:
    """A duration for people: `42s`, `3m05s`, `2h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The summary of a run (`build_summary`) as a table of two columns; values that are null are left out."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = {
        "status": f"{summary['status']} after {summary['steps']} steps",
        "held-out reward": _before_after(summary["evaluation"], "reward"),
        "greedy": _before_after(summary["evaluation"], "greedy_reward"),
        "training time": _text(summary["training_seconds"], duration_text),
        "speed": _text(summary["samples_per_second"], lambda value: f"{value:,.1f} samples/s")
        + _text(summary["tokens_per_second"], lambda value: f", {value:,.0f} tokens/s"),
        "time": ", ".join(f"{name} {share:.0%}" for name, share in summary["time_share"].items() if share is not None),
        "peak memory": _text(summary["peak_memory_bytes"], lambda value: f"{value / 2**30:.2f} GiB"),
        "alarms": ", ".join(f"{alarm['name']} at step {alarm['step']}" for alarm in summary["alarms"]),
    }
    for name, value in rows.items():
        if value:
            table.add_row(Text(name, style="bold"), Text(value))
    return table


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


def _before_after(evaluation: Mapping[str, Any], name: str) -> str:
    ends = [evaluation["before"], evaluation["after"]]
    shown = [end for end in ends if end is not None and end.get(name) is not None]
    errors = [_text(end.get(f"{name}_se"), lambda value: f" ± {value:.3f}") for end in shown]
    return " → ".join(f"{end[name]:.3f}{error}" for end, error in zip(shown, errors, strict=True))


def _shown_values(metrics: Mapping[str, float]) -> list[str]:
    forms = {
        "reward": "reward {:.3f}",
        "kl": "kl {:.4f}",
        "completions/mean_length": "length {:.1f}",
        "perf/throughput": "{:,.0f} tokens/s",
    }
    return [form.format(metrics[name]) for name, form in forms.items() if name in metrics]


class _LineProxy(FileProxy):
    """A stream that prints whole lines through a console."""

    @property
    def rich_proxied_file(self) -> IO[str]:
        """Itself: a console that prints here would take the wrapped file of rich's own proxy, and go round it."""
        return cast(IO[str], self)


@contextlib.contextmanager
def _logging_above(console: Console) -> Generator[None]:
    """Send what log handlers write to a terminal through `console` for a while.

    Rich redirects `sys.stdout` and `sys.stderr` only; a handler that took hold of the stream earlier would write into
    the progress line.
    """
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))]
    handlers = {handler for logger in loggers for handler in logger.handlers}
    with contextlib.ExitStack() as restore:
        for handler in handlers:
            own = getattr(handler, "console", None)
            if isinstance(own, Console) and own is not console and own.is_terminal:
                restore.callback(setattr, own, "file", own.file)
                own.file = cast(IO[str], _LineProxy(console, own.file))
            elif isinstance(handler, logging.StreamHandler) and _is_terminal(handler.stream):
                restore.callback(handler.setStream, handler.stream)
                handler.setStream(_LineProxy(console, handler.stream))
        yield


def _is_terminal(stream: Any) -> bool:
    return hasattr(stream, "isatty") and not getattr(stream, "closed", False) and stream.isatty()
