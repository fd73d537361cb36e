import contextlib
import io
import logging
import os
import pty
import re
import sys
import threading

import pytest
from rich.console import Console

from gyre_core.monitor.health import Alarm
from gyre_core.monitor.metrics import StepMetrics
from gyre_core.monitor.progress import ProgressDisplay, duration_text, summary_table
from gyre_core.monitor.report import build_summary

METRICS = {
    "reward": 0.5125,
    "kl": 0.00312,
    "completions/mean_length": 5.25,
    "perf/throughput": 12345.6,
    "time/step": 2.0,
}


def plain_lines(updates: list[tuple[float, int]], total: int = 10) -> list[str]:
    """Lines printed for updates at (seconds, finished steps) to a console that is no terminal."""
    output, now = io.StringIO(), [0.0]
    console = Console(file=output, width=40)
    with ProgressDisplay(total, console=console, every_seconds=10.0, clock=lambda: now[0]) as display:
        for now[0], step in updates:
            display.update(step, METRICS)
    return output.getvalue().splitlines()


def test_a_plain_line_shows_the_step_and_what_is_left():
    assert plain_lines([(0.0, 4)]) == ["step 4/10  reward 0.512  kl 0.0031  length 5.2  12,346 tokens/s  12s left"]


def test_plain_lines_keep_their_distance_and_the_last_is_shown():
    lines = plain_lines([(0.0, 1), (4.0, 2), (9.9, 3), (10.0, 4), (12.0, 9), (13.0, 10)])
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "10/10"]
    assert "left" not in lines[-1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (3599.7, "1h00m"), (7650, "2h07m")],
)
def test_durations_are_written_for_people(seconds: float, text: str):
    assert duration_text(seconds) == text


class Screen:
    """What a terminal shows of its output: understands line feeds, returns, and rich's moves and erasures."""

    def __init__(self, output: str) -> None:
        self.lines = [""]
        self.row = self.column = 0
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|.", output, flags=re.DOTALL):
            self._take(part)

    def _take(self, part: str) -> None:
        line = self.lines[self.row]
        if part == "\n":
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        elif part == "\r":
            self.column = 0
        elif part == "\x1b[2K":
            self.lines[self.row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", part):
            self.row -= int(part[2:-1] or 1)
        elif not part.startswith("\x1b"):
            self.lines[self.row] = line[: self.column].ljust(self.column) + part + line[self.column + 1 :]
            self.column += 1


def read_until_closed(master: int, output: bytearray) -> None:
    """Collect what a pseudo-terminal's other end writes; Linux reports its end as an I/O error."""
    with contextlib.suppress(OSError):
        while data := os.read(master, 4096):
            output.extend(data)


def show_on_a_terminal(log: logging.Logger, handler_of: type[logging.Handler] | None) -> list[str]:
    """The screen's lines after a run of three steps with prints and log lines in between."""
    master, slave = pty.openpty()
    output = bytearray()
    reader = threading.Thread(target=read_until_closed, args=(master, output))
    reader.start()
    with os.fdopen(slave, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        console = Console(file=terminal, force_terminal=True, width=80, legacy_windows=False)
        own = Console(file=terminal, force_terminal=True, width=80)
        handler = logging.StreamHandler(terminal) if handler_of is None else handler_of(own)
        log.addHandler(handler)
        with ProgressDisplay(3, console=console) as display:
            for step in (1, 2, 3):
                log.warning("log line %d", step)
                print(f"printed line {step}")
                display.print(f"own line {step}")
                display.update(step, METRICS)
        log.warning("log line after")
        log.removeHandler(handler)
    reader.join(timeout=30)
    assert not reader.is_alive()
    os.close(master)
    return Screen(output.decode()).lines


class ConsoleHandler(logging.StreamHandler):
    """A handler that prints through a rich console of its own."""

    def __init__(self, console: Console) -> None:
        super().__init__(console.file)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(self.format(record))


@pytest.mark.parametrize("handler_of", [None, ConsoleHandler], ids=["stream", "rich console"])
def test_prints_and_log_lines_stay_whole_above_the_progress_line(handler_of: type[logging.Handler] | None):
    log = logging.getLogger("gyre.test.progress")
    log.propagate = False
    lines = [line.rstrip() for line in show_on_a_terminal(log, handler_of)]
    expected = [f"{kind} line {step}" for step in (1, 2, 3) for kind in ("log", "printed", "own")]
    assert lines[:9] == expected
    assert re.match(r"3/3 ━+ reward 0\.512  kl 0\.0031  length 5\.2  12,346 tokens/s$", lines[9])
    assert lines[10:] == ["log line after", ""]


def test_the_final_table_names_what_was_reached():
    steps = [
        StepMetrics(0, 0.0, {"eval/heldout/reward": 0.4471, "eval/heldout/reward_se": 0.031}),
        StepMetrics(
            1,
            1.0,
            {
                "eval/heldout/reward": 0.945,
                "eval/heldout/reward_se": 0.012,
                "time/step": 90.0,
                "time/generation": 45.0,
                "perf/throughput": 2000.0,
                "perf/samples_per_second": 400.0,
                "perf/peak_memory_bytes": 2.0**30,
            },
        ),
    ]
    output = io.StringIO()
    summary = build_summary("completed", steps, 1, [Alarm("dead_signal", 1, "", "")])
    Console(file=output, width=100).print(summary_table(summary))
    text = re.sub(r"  +", "  ", output.getvalue())
    assert [line.strip() for line in text.splitlines()] == [
        "status  completed after 1 steps",
        "held-out reward  0.447 ± 0.031 → 0.945 ± 0.012",
        "training time  1m30s",
        "speed  400.0 samples/s, 2,000 tokens/s",
        "time  generation 50%, reward 0%, update 0%, orchestration 0%",
        "peak memory  1.00 GiB",
        "alarms  dead_signal at step 1",
    ]
