"""Objects in a folder of this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Generator
from io import FileIO
from pathlib import Path

from gyre_core.storage.base import Storage, WriteFile, check_name, telling_out_of_space, unwatched


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
        put_file(self._path(name), data).close()

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
        return shutil.disk_usage(self._existing()).free

    def device(self) -> int:
        """The number of the device that the folder lies on, or will lie on; folders of one volume share it."""
        return self._existing().stat().st_dev

    def child(self, folder: str) -> LocalStorage:
        return LocalStorage(self.root / folder)

    def _existing(self) -> Path:
        """The folder, or what is there of its parents."""
        return next(path for path in (self.root, *self.root.parents) if path.exists())

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    def _entries(self, folder: str, kind: Callable[[os.DirEntry[str]], bool]) -> list[str]:
        prefix = f"{folder}/" if folder else ""
        try:
            with os.scandir(self.root / folder) as entries:
                return sorted(f"{prefix}{entry.name}" for entry in entries if entry.name[0] != "." and kind(entry))
        except FileNotFoundError:
            return []

    def _publish(self, name: str, write: WriteFile, size: int | None) -> int:
        target = self._path(name)
        with _unfinished(target, size) as temporary:
            write(temporary)
            written = temporary.stat().st_size
            _sync_file(temporary)
            target.hardlink_to(temporary)
        _sync_folder(target.parent)
        return written


def put_file(target: Path, data: bytes, last_look: Callable[[], None] = unwatched) -> FileIO:
    """Have a file with this data take the place of `target`, durably; returns it, open to be added to.

    `last_look` comes when all that may take long is done; what it raises leaves the target as it was. Raises
    OutOfSpaceError.
    """
    with _unfinished(target, len(data)) as temporary:
        temporary.write_bytes(data)
        _sync_file(temporary)
        file = temporary.open("ab", buffering=0)
        try:
            last_look()
            temporary.replace(target)
        except BaseException:
            file.close()
            raise
    _sync_folder(target.parent)
    return file


@contextlib.contextmanager
def _unfinished(target: Path, size: int | None) -> Generator[Path]:
    """A private name beside `target` that is gone when the block ends, however it ends."""
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    try:
        with telling_out_of_space(target, size, temporary):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    _sync_file(path)
