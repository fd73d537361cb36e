"""One thread for all tests, as toy models gain nothing by more, and on a busy machine two threads wait for each other;
and what several folders of tests use: small volumes, and S3 services, started when a test first asks for one."""

import os
import subprocess

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Before torch is imported, and for the processes that tests start.

import pytest


@pytest.fixture
def small_volume(tmp_path):
    """Mounts a volume of so many KiB and returns its folder; skips where nothing may be mounted."""
    folder = tmp_path / "small-volume"
    folder.mkdir()

    def mount(size):
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small volume needs privileges")
        return folder

    yield mount
    # What a test that failed left open must not keep the volume there.
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)


@pytest.fixture(scope="session")
def moto(tmp_path_factory):
    """A moto server with a bucket."""
    import s3_servers

    with s3_servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory):
    """A SeaweedFS server with a bucket."""
    import s3_servers

    with s3_servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server
