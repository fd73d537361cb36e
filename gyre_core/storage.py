"""Objects in a folder of any fsspec file system: whole or absent, created once, listed as they are.

Three promises hold on every backend, and all protocols of Gyre rest on them alone:

- an object becomes visible whole or not at all, and is durable once the call returns;
- of several writers that create the same name, exactly one succeeds;
- a listing shows what is there now (no cache).

Names are relative to the folder, with `/` between parts. A name whose last part begins with a dot is
private to this module (an unfinished write) and never listed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from pathlib import Path

import fsspec
from safetensors import SafetensorError

WriteFile = Callable[[Path], object]


class OutOfSpaceError(OSError):
    """A volume is full; names the object, its folder and the bytes that were wanted."""


class Storage(ABC):
    """A folder that holds objects. Obtain one with `open_storage`."""

    url: str

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

    @abstractmethod
    def child(self, folder: str) -> Storage:
        """The storage of a folder inside this one."""


def open_storage(url: str | os.PathLike[str]) -> Storage:
    """The storage at a local path, `file://` URL or `memory://` URL.

    Raises ValueError for a protocol that Gyre does not write to.
    """
    text = os.fspath(url)
    protocol, separator, path = text.partition("://")
    if not separator or protocol == "file":
        return LocalStorage(Path(path if separator else text))
    if protocol == "memory":
        return MemoryStorage(path)
    raise ValueError(f"storage URL {text!r}: the protocol {protocol!r} is not supported; use a path or memory://")


@contextlib.contextmanager
def system_errors(path: Path) -> Generator[None]:
    """Raise a system error that safetensors tells of in words alone as the OSError that it is, with its number."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def _check_name(name: str) -> str:
    parts = name.split("/")
    assert name and not any(part in ("", ".", "..") for part in parts), f"not an object name: {name!r}"
    assert not parts[-1].startswith("."), f"names with a leading dot are private to the storage: {name!r}"
    return name


class LocalStorage(Storage):
    """Objects as files: written beside the target, synced, then linked to their name."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = str(self.root)

    def read(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def create(self, name: str, data: bytes) -> None:
        try:
            self._publish(name, lambda path: path.write_bytes(data), len(data))
        except FileExistsError:
            if self.read(name) != data:
                raise

    def replace(self, name: str, data: bytes) -> None:
        target = self._path(name)
        with self._unfinished(target, len(data)) as temporary:
            temporary.write_bytes(data)
            _sync_file(temporary)
            temporary.replace(target)
        _sync_folder(target.parent)

    def create_file(self, name: str, write: WriteFile) -> int:
        return self._publish(name, write, None)

    @contextlib.contextmanager
    def local_file(self, name: str) -> Generator[Path]:
        path = self._path(name)
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield path

    def list(self, folder: str = "") -> list[str]:
        return self._entries(folder, os.DirEntry.is_file)

    def folders(self, folder: str = "") -> list[str]:
        return self._entries(folder, os.DirEntry.is_dir)

    def exists(self, name: str) -> bool:
        return self._path(name).is_file()

    def size(self, name: str) -> int:
        return self._path(name).stat().st_size

    def delete(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def delete_folder(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.root / folder)

    def free_bytes(self) -> int:
        existing = next(path for path in (self.root, *self.root.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def child(self, folder: str) -> LocalStorage:
        return LocalStorage(self.root / folder)

    def _path(self, name: str) -> Path:
        return self.root / _check_name(name)

    def _entries(self, folder: str, kind: Callable[[os.DirEntry[str]], bool]) -> list[str]:
        prefix = f"{folder}/" if folder else ""
        try:
            with os.scandir(self.root / folder) as entries:
                return sorted(f"{prefix}{entry.name}" for entry in entries if entry.name[0] != "." and kind(entry))
        except FileNotFoundError:
            return []

    def _publish(self, name: str, write: WriteFile, size: int | None) -> int:
        target = self._path(name)
        with self._unfinished(target, size) as temporary:
            with system_errors(temporary):
                write(temporary)
            written = temporary.stat().st_size
            _sync_file(temporary)
            target.hardlink_to(temporary)
        _sync_folder(target.parent)
        return written

    @contextlib.contextmanager
    def _unfinished(self, target: Path, size: int | None) -> Generator[Path]:
        """A private name beside `target` that is gone when the block ends, however it ends."""
        temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            yield temporary
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            wanted = "" if size is None else f" of {size} bytes"
            message = f"no space left in {target.parent} for {target.name}{wanted}; free some or choose another storage"
            raise OutOfSpaceError(error.errno, message) from error
        finally:
            temporary.unlink(missing_ok=True)


class MemoryStorage(Storage):
    """Objects in this process's memory (fsspec's `memory://`), for benchmarks and tests."""

    _lock = threading.Lock()

    def __init__(self, root: str) -> None:
        self.files = fsspec.filesystem("memory")
        self.root = f"/{root.strip('/')}"
        self.url = f"memory:/{self.root}"

    def read(self, name: str) -> bytes:
        return self.files.cat_file(self._path(name))

    def create(self, name: str, data: bytes) -> None:
        try:
            self._create(name, data)
        except FileExistsError:
            if self.read(name) != data:
                raise

    def replace(self, name: str, data: bytes) -> None:
        with self._lock:
            self.files.pipe_file(self._path(name), data)

    def create_file(self, name: str, write: WriteFile) -> int:
        with tempfile.NamedTemporaryFile() as file:
            write(Path(file.name))
            data = Path(file.name).read_bytes()
        self._create(name, data)
        return len(data)

    @contextlib.contextmanager
    def local_file(self, name: str) -> Generator[Path]:
        with tempfile.NamedTemporaryFile() as file:
            file.write(self.read(name))
            file.flush()
            yield Path(file.name)

    def list(self, folder: str = "") -> list[str]:
        return self._entries(folder, "file")

    def folders(self, folder: str = "") -> list[str]:
        return self._entries(folder, "directory")

    def exists(self, name: str) -> bool:
        # fsspec would look through the names of all objects, here and where one is created.
        return self._path(name) in self.files.store

    def size(self, name: str) -> int:
        try:
            return self.files.store[self._path(name)].size
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._path(name)) from None

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.files.rm_file(self._path(name))

    def delete_folder(self, folder: str) -> None:
        inside = f"{self.root}/{folder}".rstrip("/") + "/"
        for path in list(self.files.store):
            if path.startswith(inside):
                self.files.store.pop(path, None)

    def free_bytes(self) -> None:
        return None

    def child(self, folder: str) -> MemoryStorage:
        return MemoryStorage(f"{self.root}/{folder}")

    def _create(self, name: str, data: bytes) -> None:
        with self._lock:
            if self.exists(name):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._path(name))
            self.files.pipe_file(self._path(name), data)

    def _path(self, name: str) -> str:
        return f"{self.root}/{_check_name(name)}"

    def _entries(self, folder: str, kind: str) -> list[str]:
        try:
            entries = self.files.ls(f"{self.root}/{folder}".rstrip("/"), detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].removeprefix(f"{self.root}/") for entry in entries if entry["type"] == kind)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    _sync_file(path)
