"""What every storage must keep: whole or absent, created once, listed as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from gyre_core.storage import LocalStorage, OutOfSpaceError, exercise_storage, open_storage

WRITERS = Path(__file__).with_name("storage_writers.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["local", "memory", "moto", "seaweedfs"])
def storage(request, tmp_path):
    if request.param == "local":
        yield open_storage(tmp_path)
    elif request.param == "memory":
        root = f"/{uuid.uuid4().hex}"
        yield open_storage(f"memory:/{root}")
        if fsspec.filesystem("memory").exists(root):
            fsspec.filesystem("memory").rm(root, recursive=True)
    else:
        server = request.getfixturevalue(request.param)
        yield server.storage()


@pytest.fixture(params=["local", "moto", "seaweedfs"])
def shared(request, tmp_path):
    """A storage, and the URL and the environment by which other processes open it."""
    if request.param == "local":
        return open_storage(tmp_path / "storage"), str(tmp_path / "storage"), {}
    server = request.getfixturevalue(request.param)
    url = server.url
    return server.storage(url), url, server.environment()


def start_writer(*arguments: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WRITERS), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_is_created_is_read(storage):
    for data in (b"", b"x", os.urandom(3_000_000)):
        name = f"a/b/{len(data)}"
        storage.create(name, data)
        assert storage.read(name) == data
        assert storage.size(name) == len(data)
        assert storage.exists(name)


def test_a_name_is_created_once(storage):
    storage.create("a", b"first")
    with pytest.raises(FileExistsError):
        storage.create("a", b"second")
    assert storage.read("a") == b"first"


def test_ones_own_write_repeated_is_a_success(storage):
    storage.create("a", b"mine")
    storage.create("a", b"mine")


def test_create_file_is_exclusive_whatever_the_content(storage):
    assert storage.create_file("f/a", lambda path: path.write_bytes(b"12345")) == 5
    with pytest.raises(FileExistsError):
        storage.create_file("f/a", lambda path: path.write_bytes(b"12345"))
    with storage.local_file("f/a") as path:
        assert path.read_bytes() == b"12345"
    assert storage.list("f") == ["f/a"]


def test_a_writer_that_raises_leaves_nothing(storage):
    def broken(path):
        path.write_bytes(b"half")
        raise RuntimeError("lost power")

    with pytest.raises(RuntimeError, match="lost power"):
        storage.create_file("f/a", broken)
    assert storage.list("f") == []
    if isinstance(storage, LocalStorage):
        assert files_below(storage.root) == []


def test_replace_puts_the_new_object_over_the_old(storage):
    storage.replace("a", b"long old content")
    storage.replace("a", b"new")
    assert storage.read("a") == b"new"
    assert storage.list() == ["a"]


def test_what_is_missing_raises(storage):
    for call in (storage.read, storage.size):
        with pytest.raises(FileNotFoundError):
            call("no/such")
    with pytest.raises(FileNotFoundError), storage.local_file("no/such"):
        pass
    assert not storage.exists("no/such")
    storage.delete("no/such")
    storage.delete_folder("no")


def test_listing_is_sorted_flat_and_fresh(storage):
    assert storage.list("f") == []
    for name in ("f/b", "f/a", "f/deep/c", "g"):
        storage.create(name, b"x")
        assert name in storage.list(name.rpartition("/")[0])
    assert storage.list("f") == ["f/a", "f/b"]
    assert storage.folders("f") == ["f/deep"]
    assert storage.list() == ["g"]
    assert storage.folders() == ["f"]
    storage.delete("f/a")
    assert storage.list("f") == ["f/b"]
    storage.delete_folder("f")
    assert storage.list("f") == []
    assert storage.folders() == []


def test_a_child_is_the_folder(storage):
    child = storage.child("f")
    child.create("a", b"x")
    assert storage.read("f/a") == b"x"
    assert child.list() == ["a"]
    child.delete("a")
    assert child.list() == storage.list("f") == child.folders() == []


def test_the_promises_are_tried_and_nothing_is_left(storage):
    assert exercise_storage(storage.child("f")) > 0
    assert storage.list("f") == []


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.hidden", "."])
def test_names_outside_the_folder_or_private_are_refused(storage, name):
    with pytest.raises(AssertionError):
        storage.create(name, b"x")


def test_of_eight_threads_one_creates_each_name(storage):
    barrier = threading.Barrier(8)

    def write(token: int) -> list[int]:
        won = []
        barrier.wait()
        for number in range(40):
            try:
                storage.create(f"race/{number:03d}", f"{token}:{number};".encode() * 500)
                won.append(number)
            except FileExistsError:
                continue
        return won

    with ThreadPoolExecutor(8) as threads:
        wins = list(threads.map(write, range(8)))
    assert sorted(number for won in wins for number in won) == list(range(40))
    for token, won in enumerate(wins):
        for number in won:
            assert storage.read(f"race/{number:03d}") == f"{token}:{number};".encode() * 500


def test_readers_see_the_old_or_the_new_object_and_nothing_between(storage):
    contents = {bytes([value]) * 50_000 for value in range(4)}
    storage.replace("a", min(contents))
    stop, torn = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            if storage.read("a") not in contents:
                torn.append(True)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(30):
        for content in contents:
            storage.replace("a", content)
    stop.set()
    for reader in readers:
        reader.join(timeout=60)
    assert not torn


def test_of_four_processes_one_creates_each_name(shared, tmp_path):
    storage, url, environment = shared
    names = 100 if isinstance(storage, LocalStorage) else 30
    arguments = ("race", url, str(tmp_path), str(names))
    writers = [start_writer(*arguments, str(token), environment=environment) for token in range(4)]
    try:
        while len(list(tmp_path.glob("ready-*"))) < 4:
            assert all(writer.poll() is None for writer in writers), "a writer ended before the start"
            time.sleep(0.01)
        (tmp_path / "start").touch()
        wins = [[int(line) for line in writer.communicate(timeout=120)[0].split()] for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert sorted(number for won in wins for number in won) == list(range(names))
    assert storage.list("race") == [f"race/{number:03d}" for number in range(names)]
    for token, won in enumerate(wins):
        for number in won:
            assert storage.read(f"race/{number:03d}") == f"{token} {number} ".encode() * 1000


def test_a_listing_shows_what_another_process_wrote_and_a_size_what_is_there_now(shared):
    storage, url, environment = shared
    storage.replace("f/a", b"short")
    assert (storage.list("f"), storage.size("f/a")) == (["f/a"], 5)
    writer = start_writer("create", url, "f/b", environment=environment)
    assert writer.communicate(timeout=60) == ("", None)
    assert storage.list("f") == ["f/a", "f/b"]
    storage.replace("f/a", b"longer than before")
    assert storage.size("f/a") == 18
    assert storage.read("f/a") == b"longer than before"


def test_a_writer_killed_halfway_leaves_nothing_visible(shared):
    storage, url, environment = shared
    writer = start_writer("hang", url, environment=environment)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
    finally:
        writer.kill()
        writer.communicate()
    assert storage.list("folder") == []
    assert not storage.exists("folder/victim")
    storage.create("folder/victim", b"the next writer is not in the way of what was left")
    assert storage.list("folder") == ["folder/victim"]


def test_a_full_volume_is_named_and_nothing_of_the_write_is_left(small_volume):
    folder = small_volume(1024)
    storage = open_storage(folder)
    storage.create("pool/kept", b"k" * 600_000)
    for write in (
        lambda: storage.create("pool/new", b"n" * 600_000),
        lambda: storage.replace("pool/kept", b"n" * 600_000),
        lambda: storage.create_file("pool/new", lambda path: path.write_bytes(b"n" * 600_000)),
    ):
        with pytest.raises(
            OutOfSpaceError,
            match=f"^no space left in {folder}/pool for (new|kept) of (600000 bytes|[0-9]+ bytes or more); free some",
        ):
            write()
        assert files_below(folder) == ["pool/kept"]
        assert storage.read("pool/kept") == b"k" * 600_000
    storage.delete("pool/kept")
    storage.create("pool/new", b"n" * 600_000)
