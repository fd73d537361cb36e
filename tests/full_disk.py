"""Volumes that are full: at a certain number of free bytes, or at the moment when something is to be written."""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path

BALLAST = "ballast"
UNFINISHED = re.compile(r"\.tmp$|\.unfinished|\.new$|/\.step-")
"""Names that a write has until it is whole."""


def leave_free(folder: Path, size: int) -> None:
    """Have a file take all but `size` bytes of the volume of `folder`, to a page."""
    ballast = folder / BALLAST
    ballast.unlink(missing_ok=True)
    volume = os.statvfs(folder)
    taken = volume.f_bavail * volume.f_frsize - size
    if taken > 0:
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, taken)


def give_space(folder: Path) -> None:
    """Take the file away."""
    (folder / BALLAST).unlink(missing_ok=True)


def unfinished_files(folder: Path) -> list[str]:
    """What writes that failed have left behind."""
    return [str(path) for path in folder.rglob("*") if UNFINISHED.search(str(path))]


class FillingDisk:
    """Fills a volume to its last byte when a file of it is opened to be written, once for each kind of file in a phase.

    So every write meets a disk that is really full, in its turn. `phase` is None for a time without that.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.phase: str | None = None
        self.met: list[tuple[str, str]] = []
        """Phases and kinds of files, names with `#` for their numbers."""
        self._filling = threading.local()
        sys.addaudithook(self._watch)  # For the life of the process: without a phase it does nothing.

    def _watch(self, event: str, arguments: tuple) -> None:
        if event != "open" or self.phase is None or getattr(self._filling, "now", False):
            return
        path, _, flags = arguments
        if not isinstance(path, (str, os.PathLike)) or not flags & (os.O_WRONLY | os.O_RDWR):
            return
        name = os.path.relpath(os.fspath(path), self.folder)
        if name.startswith(".."):
            return
        # Private names are those of what is being written, with a token behind.
        kind = re.sub(r"[0-9]+", "#", re.sub(r"/\.([^/]*)\.[0-9a-f]{16,32}\.(tmp|unfinished)", r"/\1", name))
        if (self.phase, kind) not in self.met:
            self.met.append((self.phase, kind))
            self._filling.now = True
            try:
                leave_free(self.folder, 0)
            finally:
                self._filling.now = False
