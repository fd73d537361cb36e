"""One platform for all tests here, as `gyre train` has it around a run, with toy flows in place of rollout workers."""

import asyncio
import os
from pathlib import Path

import pytest
from platform_tools import TOYS, all_processes
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

from deployments.deploy import register
from deployments.platform import local_platform
from deployments.platform_state import PlatformState


def pytest_collection_modifyitems(items):
    """Starting a platform takes its time on a busy machine; what does not come has a deadline of its own."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A `GYRE_HOME` of the tests' own, without an API that is configured."""
    settings = temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}, restore_defaults={PREFECT_API_URL})
    with pytest.MonkeyPatch.context() as patch, settings:
        folder = tmp_path_factory.mktemp("gyre home")
        patch.setenv("GYRE_HOME", str(folder))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.chdir(tmp_path_factory.mktemp("folder"))
        yield folder


@pytest.fixture(scope="session")
def platform(home):
    """The state of a running platform; afterwards nothing of it may be left."""
    with local_platform():
        asyncio.run(_register_toys())
        yield PlatformState.load()
        processes = all_processes()
    assert [process for process in processes if process.running()] == []
    assert PlatformState.load() is None


async def _register_toys():
    async with get_client() as client:
        for toy in TOYS:
            await register(client, toy)
