"""The folder `~/.gyre` (`GYRE_HOME` moves it): state and logs of what Gyre runs on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path


def gyre_home() -> Path:
    """The folder; made if absent."""
    home = Path(os.environ.get("GYRE_HOME", Path.home() / ".gyre")).absolute()
    home.mkdir(parents=True, exist_ok=True)
    return home


def write_whole(file: Path, text: str) -> None:
    """Write a file so that whoever is killed in between leaves the old one, or none."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(file)


def last_lines(file: Path, count: int) -> str:
    """The last lines of a log; empty when there is none."""
    try:
        return "\n".join(file.read_text(errors="replace").splitlines()[-count:])
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def locked(file: Path, timeout: float) -> Generator[None]:
    """Hold a lock file for the length of a `with` block; raises TimeoutError when another process keeps it."""
    deadline = time.monotonic() + timeout
    with file.open("w") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process holds {file}; end it, or set GYRE_HOME") from None
                time.sleep(0.1)
        yield
