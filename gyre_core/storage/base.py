"""What every storage promises, and the names of objects."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

WriteFile = Callable[[Path], object]


class OutOfSpaceError(OSError):
    """A volume is full, or a quota used up; says in one sentence where, and what did not fit."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class StorageError(OSError):
    """A storage cannot be used as it is configured, or did not answer in time; says in one sentence what to do."""


class Storage(ABC):
    """A folder that holds objects. Obtain one with `open_storage`."""

    url: str
    """What `open_storage` opens it by, here and in other processes; holds no credentials."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The object's bytes; raises FileNotFoundError."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Publish `data` under `name`, once.

        Raises FileExistsError when another object has the name. An object with the very same bytes is a success:
        it is one's own earlier write, repeated. So whoever must be told from a rival puts a token into `data`.
        """

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Publish `data` under `name`, over what was there; readers see the old or the new object."""

    @abstractmethod
    def create_file(self, name: str, write: WriteFile) -> int:
        """Publish the file that `write` makes at the local path it is given; returns its bytes.

        For objects too large to hold in memory. Raises FileExistsError like `create`, whatever the content.
        """

    @abstractmethod
    def local_file(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """The object as a local file for the length of a `with` block; raises FileNotFoundError."""

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Full names of the objects directly in `folder`, sorted; empty when there is no such folder."""

    @abstractmethod
    def folders(self, folder: str = "") -> list[str]:
        """Full names of the folders directly in `folder`, sorted."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is an object `name`."""

    @abstractmethod
    def size(self, name: str) -> int:
        """The object's bytes; raises FileNotFoundError."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove the object; one that is not there is no error."""

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it; one that is not there is no error."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Free bytes of the volume, or None where there is no limit to be read."""

    def repeated(self) -> Mapping[str, int]:
        """Requests that had to be made again since the storage was opened, by the cause; empty where none ever is."""
        return {}

    @abstractmethod
    def child(self, folder: str) -> Storage:
        """The storage of a folder inside this one."""


@contextlib.contextmanager
def system_errors(path: Path) -> Generator[None]:
    """Raise a system error that safetensors or tokenizers tells of in words alone as an OSError with its number."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # That of tokenizers is no more than an Exception.
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


@contextlib.contextmanager
def telling_out_of_space(target: Path, size: int | None = None, unfinished: Path | None = None) -> Generator[None]:
    """Raise OutOfSpaceError when the volume is full that the block writes `target` to.

    The error tells its `size`, in bytes, where that is known, else how much of it is in the file `unfinished`.
    """
    try:
        with system_errors(target):
            yield
    except OSError as error:
        if isinstance(error, OutOfSpaceError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        wanted = "" if size is None else f" of {size} bytes"
        if size is None and unfinished is not None and unfinished.exists() and (written := unfinished.stat().st_size):
            wanted = f" of {written} bytes or more"
        message = f"no space left in {target.parent} for {target.name}{wanted}; free some or choose another storage"
        raise OutOfSpaceError(error.errno, message) from error


def unwatched() -> None:
    """What is asked before a write where nobody else may own what is written: nothing."""


def check_name(name: str) -> str:
    """The name itself, once it is one that a writer may give an object."""
    parts = name.split("/")
    assert name and not any(part in ("", ".", "..") for part in parts), f"not an object name: {name!r}"
    assert not parts[-1].startswith("."), f"names with a leading dot are private to the storage: {name!r}"
    return name
