"""One thread for all tests, as toy models gain nothing by more, and on a busy machine two threads wait for each other;
and the S3 services that several folders of tests use, started when a test first asks for one."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Before torch is imported, and for the processes that tests start.

import pytest


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
