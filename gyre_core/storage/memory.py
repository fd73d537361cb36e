"""Objects in the memory of this process."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path

import fsspec

from gyre_core.storage.base import Storage, WriteFile, check_name


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
        return f"{self.root}/{check_name(name)}"

    def _entries(self, folder: str, kind: str) -> list[str]:
        try:
            entries = self.files.ls(f"{self.root}/{folder}".rstrip("/"), detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].removeprefix(f"{self.root}/") for entry in entries if entry["type"] == kind)
