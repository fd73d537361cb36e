"""Objects in a folder of a local disk, of S3 or of memory: whole or absent, created once, listed as they are.

Three promises hold on every backend, and all protocols of Gyre rest on them alone:

- an object becomes visible whole or not at all, and is durable once the call returns;
- of several writers that create the same name, exactly one succeeds;
- a listing shows what is there now (no cache).

Names are relative to the folder, with `/` between parts. A name whose last part begins with a dot is
private to this module (an unfinished write) and never listed.
"""

from __future__ import annotations

import os
from pathlib import Path

from gyre_core.storage.base import (
    OutOfSpaceError,
    Storage,
    StorageError,
    WriteFile,
    system_errors,
    telling_out_of_space,
    unwatched,
)
from gyre_core.storage.local import LocalStorage, put_file
from gyre_core.storage.memory import MemoryStorage
from gyre_core.storage.s3_options import S3Options
from gyre_core.storage.trial import exercise_storage

__all__ = [
    "LocalStorage",
    "MemoryStorage",
    "OutOfSpaceError",
    "S3Options",
    "Storage",
    "StorageError",
    "WriteFile",
    "exercise_storage",
    "open_storage",
    "put_file",
    "system_errors",
    "telling_out_of_space",
    "unwatched",
]


def open_storage(url: str | os.PathLike[str], *, trial: bool = False) -> Storage:
    """The storage at a local path or at a `file://`, `s3://BUCKET/FOLDER` or `memory://` URL.

    Credentials for S3 come from the environment, or from the block that the URL's query names (`s3_options`). A storage
    opened as a `trial` gives up after seconds, for a look whether a place can be used at all. Nothing is sent yet.
    Raises ValueError for a URL that Gyre cannot write to, or a block that was not loaded.
    """
    text = os.fspath(url)
    protocol, separator, path = text.partition("://")
    if not separator or protocol == "file":
        return LocalStorage(Path(path if separator else text))
    if protocol == "memory":
        return MemoryStorage(path)
    if protocol == "s3":
        from gyre_core.storage.s3 import S3Storage  # Its libraries take half a second to import.

        return S3Storage.open(text, trial=trial)
    raise ValueError(
        f"storage URL {text!r}: the protocol {protocol!r} is not supported; use a path, s3://BUCKET/FOLDER or memory://"
    )
