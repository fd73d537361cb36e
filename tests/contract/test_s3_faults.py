"""S3 under faults: lost replies, conflicts, throttling, rivals and cut bodies end in one clear outcome each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from s3_proxy import faulty_proxy
from s3_servers import free_ports, seaweedfs

from gyre_core.checkpoint.retention import Retention
from gyre_core.checkpoint.store import Checkpoint, CheckpointStore
from gyre_core.cluster.claims import claim
from gyre_core.storage import OutOfSpaceError, S3Options, StorageError, open_storage, s3, s3_client
from gyre_core.storage.s3 import S3Storage
from gyre_core.storage.s3_client import S3Client
from gyre_core.storage.s3_options import s3_url

WRITERS = Path(__file__).with_name("storage_writers.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["moto", "seaweedfs"])
def server(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def faulty(server, monkeypatch):
    """A storage behind a proxy, the proxy, and the same storage without it, as a rival has it."""
    monkeypatch.setattr(s3_client, "FIRST_PAUSE", 0.01)
    url = server.url
    with faulty_proxy(server.options.endpoint) as (proxy, address):
        yield open_storage(s3_url(url, server.name, address)), proxy, server.storage(url)


def in_parts(monkeypatch, storage: S3Storage) -> S3Storage:
    """The same storage, which sends every file in parts of 5 MiB."""
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    return S3Storage(storage._client, storage.bucket, storage.folder, whole_bytes=0)


def writer_of(data: bytes):
    return lambda path: path.write_bytes(data)


def test_a_write_whose_reply_was_lost_is_found_to_be_ones_own(faulty):
    storage, proxy, rival = faulty
    # aiohttp repeats a request whose connection ended once by itself.
    lost = proxy.add("PUT", "/a", "lose_reply", times=2)
    storage.create("a", b"mine")
    assert (lost.met, rival.read("a")) == (2, b"mine")
    assert [status for method, _, status in proxy.answered if method == "PUT"] == [0, 0, 412]
    assert storage.repeated() == {"unreachable": 1}


def test_a_claim_whose_reply_was_lost_is_held_by_one(faulty):
    storage, proxy, rival = faulty
    proxy.add("PUT", "claims", "lose_reply")
    assert claim(storage, "00000001-0000", 1, "mine")
    assert not claim(rival, "00000001-0000", 1, "another")


def test_a_write_whose_reply_was_lost_and_that_a_rival_deleted_is_made_again(faulty):
    storage, proxy, rival = faulty
    proxy.add("PUT", "/a", "lose_reply")
    proxy.add("PUT", "/a", "rival", act=lambda: rival.delete("a"))
    storage.create("a", b"mine")
    assert rival.read("a") == b"mine"


@pytest.mark.parametrize("size", [1000, 12 << 20], ids=["whole", "in parts"])
def test_a_file_whose_reply_was_lost_is_ones_own_and_a_rivals_of_equal_content_is_not(faulty, monkeypatch, size):
    storage, proxy, rival = faulty
    storage = in_parts(monkeypatch, storage) if size > 1000 else storage
    data = os.urandom(size)
    last = ("POST", "f/a?uploadId=") if size > 1000 else ("PUT", "f/a")
    lost = proxy.add(*last, "lose_reply")
    assert storage.create_file("f/a", writer_of(data)) == size
    assert lost.met == 1
    assert rival.read("f/a") == data
    with pytest.raises(FileExistsError):
        storage.create_file("f/a", writer_of(data))
    assert rival.list("f") == ["f/a"]


def test_a_rival_that_wins_is_a_clean_loss(faulty, monkeypatch):
    storage, proxy, rival = faulty
    proxy.add("PUT", "/a", "rival", act=lambda: rival.create("a", b"theirs"))
    with pytest.raises(FileExistsError, match="/a"):
        storage.create("a", b"mine")
    assert rival.read("a") == b"theirs"
    data = os.urandom(6 << 20)
    proxy.add("POST", "/b?uploadId=", "rival", act=lambda: rival.create_file("b", writer_of(data)))
    with pytest.raises(FileExistsError, match="/b"):
        in_parts(monkeypatch, storage).create_file("b", writer_of(data))
    assert storage.repeated() == {}
    assert uploads_under_way(storage) == []


def test_a_conflict_means_try_again(faulty):
    storage, proxy, rival = faulty
    proxy.add("PUT", "/a", 409, times=2)
    storage.create("a", b"mine")
    assert storage.repeated() == {"conflict": 2}
    assert rival.read("a") == b"mine"
    # A rival's write was what the conflict was about.
    proxy.add("PUT", "/b", 409)
    proxy.add("PUT", "/b", "rival", act=lambda: rival.create("b", b"theirs"))
    with pytest.raises(FileExistsError):
        storage.create("b", b"mine")
    assert rival.read("b") == b"theirs"


def test_after_a_conflict_at_its_end_an_upload_is_sent_anew(faulty, monkeypatch):
    storage, proxy, rival = faulty
    data = os.urandom(6 << 20)
    proxy.add("POST", "/a?uploadId=", 409)
    in_parts(monkeypatch, storage).create_file("a", writer_of(data))
    assert rival.read("a") == data
    assert uploads_under_way(storage) == []


@pytest.mark.parametrize("status", [503, 500])
def test_throttling_and_failures_are_waited_for_and_counted(faulty, monkeypatch, status):
    storage, proxy, _ = faulty
    cause = {503: "throttled", 500: "failed"}[status]
    data = os.urandom(6 << 20)
    calls = [
        ("PUT", lambda: storage.create("f/a", b"one")),
        ("PUT", lambda: storage.replace("f/a", b"two")),
        ("GET", lambda: storage.read("f/a")),
        ("GET", lambda: storage.list("f")),
        ("GET", lambda: storage.folders()),
        ("HEAD", lambda: storage.size("f/a")),
        ("HEAD", lambda: storage.exists("f/a")),
        ("DELETE", lambda: storage.delete("f/a")),
        ("PUT", lambda: in_parts(monkeypatch, storage).create_file("f/b", writer_of(data))),
        ("POST", lambda: storage.delete_folder("f")),
    ]
    for number, (method, call) in enumerate(calls, start=1):
        fault = proxy.add(method, "", status, times=3)
        call()
        assert fault.met == 3
        assert storage.repeated() == {cause: 3 * number}
    assert storage.list("f") == []


def test_a_service_that_refuses_for_long_is_named_with_its_last_answer(faulty, monkeypatch):
    storage, proxy, _ = faulty
    monkeypatch.setattr(storage._client, "patience", 0.5)
    proxy.add("PUT", "/a", 503, times=10_000)
    with pytest.raises(StorageError) as caught:
        storage.create("a", b"mine")
    text = str(caught.value)
    assert f"s3://{storage.bucket}/{storage.folder}/a" in text
    assert "within 0.5 s" in text
    assert "503 SlowDown: as the test wants it" in text


def test_a_service_without_space_is_told_at_once_and_nothing_is_left(faulty, monkeypatch):
    storage, proxy, rival = faulty
    told = f"^no space left at {storage._client.endpoint} for s3://{storage.bucket}/{storage.folder}/a"
    for call in (
        lambda: storage.create("a", b"mine"),
        lambda: storage.replace("a", b"mine"),
        lambda: storage.create_file("a", writer_of(b"mine")),
        lambda: in_parts(monkeypatch, storage).create_file("a", writer_of(os.urandom(6 << 20))),
    ):
        proxy.add("PUT", "/a", 507)
        with pytest.raises(OutOfSpaceError, match=told):
            call()
        assert rival.list() == []
    assert uploads_under_way(storage) == []
    assert storage.repeated() == {}


@pytest.mark.parametrize("item", ["tensors.safetensors", "manifest.json"])
def test_a_checkpoint_without_space_leaves_the_one_before_it(faulty, item):
    storage, proxy, rival = faulty
    checkpoints = CheckpointStore(storage, Retention(1))
    checkpoints.save(checkpoint_of(1, size=10), 0.0)
    proxy.add("PUT", item, 507)
    with pytest.raises(OutOfSpaceError, match=f"no space left .*{item}"):
        checkpoints.save(checkpoint_of(2, size=10), 0.0)
    assert rival.folders("checkpoints") == ["checkpoints/00000001-0001"]
    assert checkpoints.newest().tensors["weight"].tolist() == [1.0] * 10
    checkpoints.save(checkpoint_of(2, size=10), 0.0)
    assert checkpoints.newest().tensors["weight"].tolist() == [2.0] * 10


def test_a_seaweedfs_that_is_full_loses_nothing(tmp_path, monkeypatch):
    """Of its reasons it says no more than 500, so that it is asked again until patience ends."""
    with seaweedfs(tmp_path, name="small", volumes=1, volume_megabytes=1) as server:
        storage = server.storage()
        monkeypatch.setattr(storage._client, "patience", 1.0)
        checkpoints = CheckpointStore(storage, Retention(9))
        saved, told = 0, ""
        while not told:
            try:
                checkpoints.save(checkpoint_of(saved + 1, size=50_000), 0.0)
                saved += 1
            except StorageError as error:
                told = str(error)
        assert re.fullmatch(r"s3://.* did not take the request within 1 s .* 500 InternalError: .*", told)
        assert saved >= 1
        assert checkpoints.steps() == list(range(1, saved + 1))
        assert checkpoints.newest().tensors["weight"].tolist() == [float(saved)] * 50_000


def checkpoint_of(step: int, size: int) -> Checkpoint:
    table = pa.table({"row": [step]})
    tensors = {"weight": torch.full((size,), float(step))}
    return Checkpoint(step=step, epoch=1, tensors=tensors, tables={"pool": table}, state={"step": step})


def test_a_service_that_takes_requests_and_never_answers_is_given_up(server, monkeypatch):
    monkeypatch.setattr(s3_client, "READ_SECONDS", 0.3)
    with faulty_proxy(server.options.endpoint) as (proxy, address):
        storage = open_storage(s3_url(server.url, server.name, address))
        monkeypatch.setattr(storage._client, "patience", 0.5)
        proxy.add("GET", "/a", "stall", times=10_000)
        with pytest.raises(StorageError, match=f"/a: {address} did not answer within 0.5 s"):
            storage.read("a")


def test_pauses_between_tries_are_drawn_below_a_bound_that_doubles(monkeypatch):
    """Of 2,000 draws below 0.2, 0.4 … 5 s, the mean is half the bound, within five standard errors."""
    (port,) = free_ports(1)
    client = S3Client(S3Options(f"http://127.0.0.1:{port}", "us-east-1", "key", "secret"), patience=1e9)
    pauses: list[float] = []

    def note(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(s3_client.time, "sleep", note)
    monkeypatch.setattr(client._files, "send", refuse)
    drawn = []
    for _ in range(2000):
        pauses.clear()
        with pytest.raises(KeyboardInterrupt):
            client.call("head_object", {"Bucket": "bucket", "Key": "a"})
        drawn.append(tuple(pauses))
    for bound, column in zip((0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0), zip(*drawn, strict=True), strict=True):
        assert min(column) >= 0.0
        assert max(column) <= bound
        error = bound / 12**0.5 / len(column) ** 0.5
        assert sum(column) / len(column) == pytest.approx(bound / 2, abs=5 * error)
    assert client.repeated() == {"unreachable": 16_000}


async def refuse(operation, arguments):
    raise TimeoutError


def test_an_upload_that_is_killed_before_its_end_leaves_nothing_visible(server, faulty):
    storage, proxy, rival = faulty
    proxy.add("POST", "uploadId", "stall")
    url = s3_url(f"s3://{storage.bucket}/{storage.folder}", None, storage._client.endpoint)
    writer = subprocess.Popen(
        [sys.executable, str(WRITERS), "upload", url],
        env={**os.environ, **server.environment(), "PYTHONPATH": str(ROOT)},
    )
    try:
        assert proxy.stalled.wait(60)
    finally:
        writer.kill()
        writer.wait()
    assert rival.list("folder") == rival.folders() == []
    assert not rival.exists("folder/victim")
    rival.create_file("folder/victim", writer_of(b"the next writer"))
    assert rival.read("folder/victim") == b"the next writer"


def test_a_refusal_without_an_object_is_tried_again_and_named_when_it_stays(faulty):
    storage, proxy, rival = faulty
    proxy.add("PUT", "/a", 412, times=2)
    storage.create("a", b"mine")
    assert rival.read("a") == b"mine"
    proxy.add("PUT", "/b", 412, times=10_000)
    with pytest.raises(StorageError, match="/b: others wrote and deleted it"):
        storage.create("b", b"mine")


def test_a_body_that_was_cut_is_fetched_again(faulty, monkeypatch):
    storage, proxy, rival = faulty
    data = os.urandom(12 << 20)
    rival.create_file("a", writer_of(data))
    proxy.add("GET", "/a", "cut", times=2)
    assert storage.read("a") == data
    proxy.add("GET", "/a", "cut")
    with in_parts(monkeypatch, storage).local_file("a") as path:
        assert path.read_bytes() == data
    assert storage.repeated() == {"unreachable": 3}


def test_a_file_that_is_replaced_while_it_is_read_is_the_old_or_the_new_one(faulty, monkeypatch):
    storage, proxy, rival = faulty
    old, new = os.urandom(11 << 20), os.urandom(12 << 20)
    rival.create_file("a", writer_of(old))
    proxy.add("GET", "/a", "rival", act=lambda: rival.replace("a", new))
    with in_parts(monkeypatch, storage).local_file("a") as path:
        assert path.read_bytes() == new


def test_a_long_listing_comes_in_pages(moto):
    with faulty_proxy(moto.options.endpoint) as (proxy, address):
        storage = open_storage(s3_url(moto.url, moto.name, address))
        names = [f"f/{number}" for number in range(5)] + ["f/deep/x", "f/other/y"]
        for name in names:
            storage.create(name, b"x")
        pages = proxy.add("GET", "list-type=2", "short_pages", times=10_000)
        assert storage.list("f") == names[:5]
        assert storage.folders("f") == ["f/deep", "f/other"]
        assert pages.met == 4 + 4  # Seven entries, two a page.
        storage.delete_folder("f")
        assert storage.list("f") == storage.folders("f") == []


def uploads_under_way(storage: S3Storage) -> list[str]:
    client: S3Client = storage._client
    answer = client.call("list_multipart_uploads", {"Bucket": storage.bucket, "Prefix": storage.folder})
    return [upload["Key"] for upload in answer.get("Uploads", [])]
