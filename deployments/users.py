"""Who uses something on this machine: a file for each process, so that the last one to leave can end it.

A process that dies without leaving counts no more: its file names it with the time of its start.
"""

from __future__ import annotations

import os
from pathlib import Path

from deployments.home import write_whole
from deployments.processes import ProcessId


def join(folder: Path) -> None:
    """Count this process as a user."""
    folder.mkdir(exist_ok=True)
    write_whole(folder / str(os.getpid()), str(ProcessId.of(os.getpid()).started_at))


def leave(folder: Path) -> None:
    """Count this process no more."""
    (folder / str(os.getpid())).unlink(missing_ok=True)


def living(folder: Path) -> list[int]:
    """Users that live; files of processes that died without leaving are removed."""
    users: list[int] = []
    for file in folder.glob("[0-9]*"):
        try:
            started_at = float(file.read_text())
        except FileNotFoundError:
            continue  # It has left meanwhile.
        if ProcessId(int(file.name), started_at).running():
            users.append(int(file.name))
        else:
            file.unlink(missing_ok=True)
    return users
