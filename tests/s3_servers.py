"""S3 services on this machine for tests: moto and SeaweedFS, each in a process and with data of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from gyre_core.storage import S3Options, Storage, open_storage
from gyre_core.storage.s3_client import S3Client
from gyre_core.storage.s3_options import remember_block, s3_url

START_SECONDS = 60.0
BUCKET = "gyre-tests"
MOTO = Path(__file__).with_name("moto_process.py")
READER = S3Options(access_key="reader", secret_key="reader-secret-9")
"""A user of SeaweedFS who may not write."""


@dataclass(frozen=True)
class S3Server:
    """A running service; this process knows its access as the block of its name."""

    name: str
    options: S3Options
    fresh_buckets: bool
    """Whether each folder gets a bucket of its own: moto looks through all objects of a bucket to list some."""

    @property
    def url(self) -> str:
        """The URL of a folder of the bucket that nobody has used yet, for users whose environment has the access."""
        name = uuid.uuid4().hex
        if not self.fresh_buckets:
            return f"s3://{BUCKET}/{name}"
        _make_bucket(self.options, name)
        return f"s3://{name}/folder"

    def storage(self, url: str | None = None) -> Storage:
        """The storage at a URL, by default a new one."""
        return open_storage(s3_url(url or self.url, self.name, None))

    def environment(self) -> dict[str, str]:
        """What the environment of a user holds."""
        assert self.options.endpoint is not None
        return {
            "AWS_ENDPOINT_URL": self.options.endpoint,
            "AWS_ACCESS_KEY_ID": self.options.access_key or "",
            "AWS_SECRET_ACCESS_KEY": self.options.secret_key or "",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody uses."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@contextmanager
def moto(folder: Path) -> Generator[S3Server]:
    """A moto server."""
    (port,) = free_ports(1)
    with _running([sys.executable, str(MOTO), str(port)], folder, f"http://127.0.0.1:{port}/moto-api/"):
        yield _introduce("moto", f"http://127.0.0.1:{port}", fresh_buckets=True)


@contextmanager
def seaweedfs(
    folder: Path, *, name: str = "SeaweedFS", volumes: int = 0, volume_megabytes: int = 64
) -> Generator[S3Server]:
    """A SeaweedFS server that stores in so many files of a size, 0 for as many as the disk holds.

    Servers that live at the same time have other names.
    """
    users = [("gyre", "gyre-secret-7", ["Admin"]), (READER.access_key, READER.secret_key, ["Read", "List"])]
    identities = [
        {"name": name, "credentials": [{"accessKey": name, "secretKey": secret}], "actions": actions}
        for name, secret, actions in users
    ]
    (folder / "identities.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    flags = [f"{name}{kind}" for name in names for kind in ("", ".grpc")]
    ports = dict(zip(flags, free_ports(len(flags)), strict=True))
    command = [str(Path(sys.executable).with_name("weed")), "-logtostderr=true", "server", "-s3"]
    command += [
        "-master.telemetry=false",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-dir={folder / 'data'}",
        f"-master.volumeSizeLimitMB={volume_megabytes}",
    ]
    command += [f"-volume.max={volumes}", f"-s3.config={folder / 'identities.json'}", "-s3.autoCreateBucket=false"]
    command += ["-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    url = f"http://127.0.0.1:{ports['s3.port']}"
    with _running(command, folder, f"{url}/status"):
        server = _introduce(name, url, fresh_buckets=False)
        _make_bucket(server.options, BUCKET)
        yield server


def _introduce(name: str, url: str, *, fresh_buckets: bool) -> S3Server:
    options = S3Options(endpoint=url, region="us-east-1", access_key="gyre", secret_key="gyre-secret-7")
    remember_block(name, options)
    return S3Server(name, options, fresh_buckets)


def _make_bucket(options: S3Options, name: str) -> None:
    S3Client(options, patience=START_SECONDS).call("create_bucket", {"Bucket": name})


@contextmanager
def _running(command: list[str], folder: Path, probe: str) -> Generator[None]:
    """Run a server in a `with` block, once it answers at `probe`; it is killed, as its data go with it."""
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(probe):
            assert process.poll() is None, f"{command[0]} ended: {log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"{command[0]} does not answer: {log.read_text()[-2000:]}"
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False
