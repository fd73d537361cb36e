"""Programs for the other processes of the storage contract: `python storage_writers.py WHAT ROOT …`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from gyre_core.storage import open_storage


def race(root: str, token: str) -> None:
    """Create the same names as the rivals, once the start file is there; print the names that were won."""
    storage = open_storage(root)
    Path(root, f"ready-{token}").touch()
    while not Path(root, "start").exists():
        time.sleep(0.001)
    for number in range(100):
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


if __name__ == "__main__":
    {"race": race, "hang": hang_in_the_middle}[sys.argv[1]](*sys.argv[2:])
