"""A process that runs reward functions, as its parent sees it: called under a deadline, killed when it misses one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gyre_core.rewards import frames
from gyre_core.rewards.loader import Signature
from gyre_core.rewards.values import Outcome, RewardError

START_SECONDS = 300.0
"""Deadline of a start: imports of reward functions may be slow."""

_OUTPUT_LINES = 50
_BOOTSTRAP = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from gyre_core.rewards.worker import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""
_logger = logging.getLogger(__name__)


class RewardProcessError(Exception):
    """A call that gave no outcomes, with the reason in full: a traceback, or how the process ended."""


class RewardTimeoutError(RewardProcessError):
    """A call that missed its deadline; its process was killed."""


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[str]
    connection: socket.socket
    lifeline: int
    output: deque[str]
    reader: threading.Thread


class RewardProcess:
    """Runs the functions `name → path` in a process of their own; starts it when needed and again after its death.

    Those named in `verl` are called as verl calls its `compute_score`. Not for use by two threads at once, but for
    `close`, which may interrupt a call. The process and what it started die with this one, however it ends.
    """

    def __init__(self, functions: Mapping[str, str], base_folder: Path, verl: Collection[str] = ()) -> None:
        self._functions = dict(functions)
        self._verl = sorted(verl)
        self._base_folder = base_folder.resolve()
        self._child: _Child | None = None
        self._signatures: dict[str, Signature] = {}
        self._closed = False

    def start(self) -> dict[str, Signature]:
        """Start the process unless it runs, load the functions and return what they ask for.

        Raises ValueError for a function that cannot be loaded, and RewardError for a process that dies or takes longer
        than `START_SECONDS`.
        """
        self._check_open()
        if self._child is None:
            request = {"functions": self._functions, "verl": self._verl, "base_folder": str(self._base_folder)}
            self._child = self._spawn()
            if self._closed:  # Since the check above, by another thread, which saw no child.
                self._kill()
                self._check_open()
            try:
                reply = self._exchange(request, START_SECONDS)
            except RewardProcessError as error:
                raise RewardError(f"the process of the reward functions did not start: {error}") from None
            if "invalid" in reply:
                self._kill()
                raise ValueError(reply["invalid"])
            self._signatures = {
                name: Signature(tuple(fields["required"]), tuple(fields["optional"]), fields["takes_all"])
                for name, fields in reply["signatures"].items()
            }
        return self._signatures

    def call(self, name: str, arguments: Mapping[str, Any], rows: int, timeout: float) -> list[Outcome]:
        """Call a function on `rows` completions; one outcome a row, as `values.read_values` gives them.

        Raises RewardError when it broke its contract, RewardTimeoutError after `timeout` seconds, and
        RewardProcessError with the traceback when it raised, or with the last output when the process died.
        """
        self.start()
        reply = self._exchange({"function": name, "arguments": arguments, "rows": rows}, timeout)
        if "broken" in reply:
            raise RewardError(reply["broken"])
        if "error" in reply:
            raise RewardProcessError(f"reward function '{name}' raised:\n{reply['error']}")
        return reply["outcomes"]

    def close(self) -> None:
        """Kill the process and all that it started, for good: later calls raise RewardError."""
        self._closed = True
        self._kill()

    def _check_open(self) -> None:
        if self._closed:
            raise RewardError("the process of the reward functions is closed")

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            _end(child)

    def _spawn(self) -> _Child:
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        search_path = json.dumps([*sys.path, str(self._base_folder)])
        descriptors = (theirs.fileno(), lifeline_read)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOTSTRAP, search_path, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=descriptors,
                start_new_session=True,
            )
        os.close(lifeline_read)
        output: deque[str] = deque(maxlen=_OUTPUT_LINES)
        assert process.stdout is not None, "the output is a pipe"
        reader = threading.Thread(target=_read_output, args=(process.stdout, output), name="reward-output", daemon=True)
        reader.start()
        return _Child(process, ours, lifeline_write, output, reader)

    def _exchange(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and wait for its reply; the process is gone when this raises."""
        child = self._child
        assert child is not None, "the process was started"
        deadline = time.monotonic() + timeout
        try:
            frames.send(child.connection, request, deadline)
            return frames.receive(child.connection, deadline)
        except TimeoutError:
            self._kill()
            raise RewardTimeoutError(f"no answer within {timeout:g} s; the process was killed{_tail(child)}") from None
        except (EOFError, OSError):
            self._kill()
            self._check_open()
            ending = _ending(child.process.wait())
            raise RewardProcessError(f"the process of the reward functions {ending}{_tail(child)}") from None


def _end(child: _Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()
    child.reader.join(timeout=1.0)
    child.connection.close()
    os.close(child.lifeline)


def _read_output(stream: IO[str], output: deque[str]) -> None:
    """Log what the functions print, and keep the last lines for error messages."""
    with stream:
        for line in stream:
            output.append(line.rstrip("\n"))
            _logger.info("reward function: %s", output[-1])


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _tail(child: _Child) -> str:
    return "; its last output:\n" + "\n".join(child.output) if child.output else ""
