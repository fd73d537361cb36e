"""Processes that outlive a command: started in a session of their own, known by id and start time, ended in time."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_START_TOLERANCE = 1.0
# Seconds by which the start time that the system tells may differ between two readings.

_started: list[subprocess.Popen[bytes]] = []
# Handles of what this process started: dropping one while it runs is a ResourceWarning.


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One very process: its number, and when it began (seconds since 1970), for numbers are used again."""

    pid: int
    started_at: float

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process that has this number now; raises psutil.NoSuchProcess."""
        return cls(pid, psutil.Process(pid).create_time())

    def running(self) -> bool:
        """Whether this very process still runs."""
        return self.find() is not None

    def find(self) -> psutil.Process | None:
        """The running process, or None when it has ended or another one has its number."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started_at) <= _START_TOLERANCE
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


def start_process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command whose output is appended to `log`; its handle is kept here too.

    It runs in a session of its own, so that Ctrl-C reaches only the command that started it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    _started.append(process)
    return process


def end_processes(processes: Iterable[ProcessId], timeout: float) -> None:
    """Ask processes to end, and kill those that still run after `timeout` seconds, with all that they started."""
    asked = [process for identity in processes if (process := identity.find()) is not None]
    family = {process.pid: process for parent in asked for process in [parent, *_children(parent)]}
    for process in asked:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(list(family.values()), timeout=timeout)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=5.0)
    reap()


def reap() -> None:
    """Take note of processes started here that have ended."""
    _started[:] = [handle for handle in _started if handle.poll() is None]


def wait_for_end(process: ProcessId, timeout: float) -> bool:
    """Whether a process has ended within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while process.running():
        if time.monotonic() > deadline:
            return False
        reap()
        time.sleep(0.05)
    reap()
    return True


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
