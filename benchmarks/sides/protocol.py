"""How the benchmark drives a side: a line with a number of steps in, a line of JSON with the block's figures out.

Imported by both sides, in environments of their own: the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Commands:
    """A side's end of the two pipes; whatever else the side prints goes to stderr."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._started = (0.0, 0.0)

    def next_steps(self) -> int:
        """Wait for the next command, and start its clocks; 0 when there are no more."""
        steps = int(sys.stdin.readline() or 0)
        self._started = _clocks()
        return steps

    def reply(self, figures: Mapping[str, Any]) -> None:
        """Answer a command, or tell that the side is ready; adds its time, and the peak memory so far."""
        seconds, cpu_seconds = (now - then for now, then in zip(_clocks(), self._started, strict=True))
        times = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_memory_bytes": _peak_memory_bytes()}
        print(json.dumps({**times, **figures}), file=self._replies, flush=True)


def _peak_memory_bytes() -> int:
    """Of this process alone: `getrusage` would count what its parent held when it started it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
