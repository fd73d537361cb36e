"""Objects in a bucket of an S3 service."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from gyre_core.storage.base import OutOfSpaceError, Storage, StorageError, WriteFile, check_name, system_errors
from gyre_core.storage.s3_client import S3Client
from gyre_core.storage.s3_errors import ConflictError
from gyre_core.storage.s3_options import url_options

T = TypeVar("T")

PATIENCE = 60.0
TRIAL_PATIENCE = 5.0
"""Seconds for which a request is made again, in a run and in a trial of a place."""
PART_BYTES = 1 << 25
"""Size of the parts that files are sent and fetched in; smaller ones go in one request."""
MOST_PARTS = 10_000
PARTS_AT_ONCE = 4
ATTEMPTS = 5
"""Attempts at a write or a download that others keep getting in the way of."""

_WRITER = "gyre-writer"
"""Metadata of an object made by `create_file`: the token of the call that made it."""


class S3Storage(Storage):
    """Objects in a folder of a bucket, created by conditional writes (`If-None-Match: *`).

    A write whose reply got lost is made again and refused; so whoever is refused looks whether the object is its own.
    """

    def __init__(
        self, client: S3Client, bucket: str, folder: str, *, access: str = "", whole_bytes: int = PART_BYTES
    ) -> None:
        """`access` is the query of the URL; `whole_bytes` the size up to which a file is sent in one request."""
        self.bucket, self.folder = bucket, folder
        self.url = f"s3://{bucket}/{folder}".rstrip("/") + (f"?{access}" if access else "")
        self._client = client
        self._access = access
        self._whole_bytes = whole_bytes

    @classmethod
    def open(cls, url: str, *, trial: bool) -> S3Storage:
        """The storage at `s3://BUCKET/FOLDER`; a trial gives up soon, and sends even small files in parts.

        Raises ValueError for a URL without a bucket, or with a block that was not loaded.
        """
        parts = urlsplit(url)
        if not parts.netloc:
            raise ValueError(f"storage URL {url!r}: this names no bucket; write it as in s3://BUCKET/FOLDER")
        client = S3Client(url_options(url), TRIAL_PATIENCE if trial else PATIENCE)
        folder, whole_bytes = parts.path.strip("/"), 0 if trial else PART_BYTES
        return cls(client, parts.netloc, folder, access=parts.query, whole_bytes=whole_bytes)

    def read(self, name: str) -> bytes:
        return self._client.fetch(self._at(name))

    def create(self, name: str, data: bytes) -> None:
        def send() -> None:
            self._client.call("put_object", self._at(name, Body=data, IfNoneMatch="*"))

        self._publish(name, send, lambda: self.read(name) == data)

    def replace(self, name: str, data: bytes) -> None:
        self._client.call("put_object", self._at(name, Body=data))

    def create_file(self, name: str, write: WriteFile) -> int:
        token = uuid.uuid4().hex
        with _scratch_file(name) as path:
            with system_errors(path):
                write(path)
            size = path.stat().st_size
            send = self._send_whole if size <= self._whole_bytes else self._send_in_parts
            self._publish(
                name, lambda: send(name, path, token), lambda: self._head(name)["Metadata"].get(_WRITER) == token
            )
        return size

    @contextlib.contextmanager
    def local_file(self, name: str) -> Generator[Path]:
        with _scratch_file(name) as path:
            self._download(name, path)
            yield path

    def list(self, folder: str = "") -> list[str]:
        # A service may list the folder itself, as an object with no name of its own.
        last_parts = ((key, key.rpartition("/")[2]) for key in self._keys(folder, Delimiter="/"))
        return sorted(key for key, last in last_parts if last and not last.startswith("."))

    def folders(self, folder: str = "") -> list[str]:
        # From the objects below: services that keep folders of their own go on listing those that are empty.
        prefix = f"{folder}/" if folder else ""
        below = (key.removeprefix(prefix).partition("/") for key in self._keys(folder))
        return sorted({f"{prefix}{name}" for name, slash, _ in below if slash and not name.startswith(".")})

    def exists(self, name: str) -> bool:
        try:
            self._head(name)
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        return self._head(name)["ContentLength"]

    def delete(self, name: str) -> None:
        self._client.call("delete_object", self._at(name))

    def delete_folder(self, folder: str) -> None:
        assert folder, "a bucket is not deleted"
        for page in self._pages(folder):
            if page:
                asked = {"Objects": [{"Key": entry["Key"]} for entry in page], "Quiet": True}
                answer = self._client.call("delete_objects", {"Bucket": self.bucket, "Delete": asked})
                for error in answer.get("Errors", []):
                    raise StorageError(f"s3://{self.bucket}/{error['Key']} cannot be deleted ({error.get('Code')})")

    def free_bytes(self) -> None:
        return None

    def repeated(self) -> Mapping[str, int]:
        return self._client.repeated()

    def child(self, folder: str) -> S3Storage:
        return S3Storage(
            self._client, self.bucket, self._prefixed(folder), access=self._access, whole_bytes=self._whole_bytes
        )

    def _prefixed(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name

    def _told(self, name: str) -> str:
        """An object as errors name it."""
        return f"s3://{self.bucket}/{self._prefixed(name)}"

    def _at(self, name: str, **arguments: Any) -> dict[str, Any]:
        """The arguments of a request about an object."""
        return {"Bucket": self.bucket, "Key": self._prefixed(check_name(name)), **arguments}

    def _head(self, name: str) -> dict[str, Any]:
        return self._client.call("head_object", self._at(name))

    def _keys(self, folder: str, **arguments: str) -> Iterator[str]:
        """The names below `folder`; with a delimiter those directly in it."""
        start = len(self._prefixed(""))
        for page in self._pages(folder, **arguments):
            for entry in page:
                yield entry["Key"][start:]

    def _pages(self, folder: str, **arguments: str) -> Iterator[Sequence[Mapping[str, Any]]]:
        asked = {"Bucket": self.bucket, "Prefix": self._prefixed(f"{folder}/" if folder else ""), **arguments}
        while True:
            answer = self._client.call("list_objects_v2", asked)
            yield answer.get("Contents", [])
            if not answer.get("IsTruncated"):
                return
            asked["ContinuationToken"] = answer["NextContinuationToken"]

    def _publish(self, name: str, send: Callable[[], None], is_own: Callable[[], bool]) -> None:
        """Make a conditional write by `send`; when it is refused, the object that is there may be its own."""
        for _ in range(ATTEMPTS):
            try:
                return send()
            except (FileExistsError, FileNotFoundError, ConflictError):
                # Taken, or an upload that a repeated request finds closed, or a race that left neither.
                with contextlib.suppress(FileNotFoundError):
                    if is_own():
                        return None
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._told(name)) from None
        raise StorageError(
            f"{self._told(name)}: others wrote and deleted it in each of {ATTEMPTS} attempts to create it"
        )

    def _send_whole(self, name: str, path: Path, token: str) -> None:
        arguments = self._at(name, Body=path.read_bytes(), Metadata={_WRITER: token}, IfNoneMatch="*")
        self._client.call("put_object", arguments)

    def _send_in_parts(self, name: str, path: Path, token: str) -> None:
        opened = self._client.call("create_multipart_upload", self._at(name, Metadata={_WRITER: token}))
        upload = self._at(name, UploadId=opened["UploadId"])

        def send(number: int, start: int, length: int) -> dict[str, Any]:
            with path.open("rb") as file:
                file.seek(start)
                data = file.read(length)
            answer = self._client.call("upload_part", {**upload, "PartNumber": number, "Body": data})
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            parts = _for_each_part(path.stat().st_size, send)
            complete = {**upload, "MultipartUpload": {"Parts": parts}, "IfNoneMatch": "*"}
            # After a conflict the service may have closed the upload: all of it is sent anew.
            self._client.call("complete_multipart_upload", complete, repeat_conflicts=False)
        except BaseException:
            with contextlib.suppress(OSError):
                self._client.call("abort_multipart_upload", upload, patience=0.0)
            raise

    def _download(self, name: str, path: Path) -> None:
        for _ in range(ATTEMPTS):
            head = self._head(name)
            with path.open("wb") as file:
                file.truncate(head["ContentLength"])

            def fetch(number: int, start: int, length: int, tag: str = head["ETag"]) -> None:
                asked = self._at(name, Range=f"bytes={start}-{start + length - 1}", IfMatch=tag)
                data = self._client.fetch(asked)
                with path.open("r+b") as file:
                    file.seek(start)
                    file.write(data)

            with contextlib.suppress(FileExistsError):  # Another object by now.
                _for_each_part(head["ContentLength"], fetch)
                return
        raise StorageError(f"{self._told(name)} was replaced in each of {ATTEMPTS} attempts to read it")


def _for_each_part(size: int, work: Callable[[int, int, int], T]) -> Sequence[T]:
    """The results of `work(number, start, length)` for the parts of a file of `size` bytes, numbered from 1."""
    step = max(PART_BYTES, -(-size // MOST_PARTS))
    starts = range(0, size, step)
    with ThreadPoolExecutor(PARTS_AT_ONCE) as threads:
        lengths = [min(step, size - start) for start in starts]
        return tuple(threads.map(work, range(1, len(starts) + 1), starts, lengths))


@contextlib.contextmanager
def _scratch_file(name: str) -> Generator[Path]:
    """A local path with the last part of `name`, gone when the block ends."""
    try:
        with tempfile.TemporaryDirectory(prefix="gyre-") as folder:
            yield Path(folder, name.rpartition("/")[2])
    except OSError as error:
        # The service's own want of space is told already.
        if isinstance(error, OutOfSpaceError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"no space left in {tempfile.gettempdir()} for a copy of {name}; free some, or set TMPDIR"
        raise OutOfSpaceError(error.errno, message) from error
