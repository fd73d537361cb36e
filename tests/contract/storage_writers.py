"""Programs for the other processes of the storage contract: `python storage_writers.py WHAT ROOT …`.

Credentials of an S3 service come from the environment.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from gyre_core.storage import open_storage
from gyre_core.storage.s3 import S3Storage


def race(root: str, signals: str, names: str, token: str) -> None:
    """Create the same names as the rivals, once the start file is there; print the names that were won."""
    storage = open_storage(root)
    storage.exists("warm")
    Path(signals, f"ready-{token}").touch()
    while not Path(signals, "start").exists():
        time.sleep(0.001)
    for number in range(int(names)):
        try:
            storage.create(f"race/{number:03d}", f"{token} {number} ".encode() * 1000)
        except FileExistsError:
            continue
        print(number)


def hang_in_the_middle(root: str) -> None:
    """Write half an object, say so, and hang until killed."""

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(b"half" * 1000)
            file.flush()
            print("writing", flush=True)
            time.sleep(600)

    open_storage(root).create_file("folder/victim", write)


def create(root: str, name: str) -> None:
    """Create an object."""
    open_storage(root).create(name, b"from another process")


def upload(root: str) -> None:
    """Send a file in parts."""
    storage = open_storage(root)
    assert isinstance(storage, S3Storage)
    storage = S3Storage(storage._client, storage.bucket, storage.folder, whole_bytes=0)
    storage.create_file("folder/victim", lambda path: path.write_bytes(b"part" * 1000))


if __name__ == "__main__":
    {"race": race, "hang": hang_in_the_middle, "create": create, "upload": upload}[sys.argv[1]](*sys.argv[2:])
