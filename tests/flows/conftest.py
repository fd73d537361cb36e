"""What all tests of flows share: one Prefect server, in a folder of its own, and one undisturbed run."""

import asyncio

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from tiny_runs import loop_outcome, tiny_config

from deployments.local import prefect_api


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    """The API URL of a running server, which flows of this process use."""
    # Log lines that are still under way when the server ends would hold up the end of the process.
    settings = temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}, restore_defaults={PREFECT_API_URL})
    with pytest.MonkeyPatch.context() as patch, settings:
        patch.setenv("GYRE_HOME", str(tmp_path_factory.mktemp("gyre_home")))
        with prefect_api() as url:
            yield url


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The outcome of the tiny run when nothing disturbs it."""
    return asyncio.run(loop_outcome(tiny_config(tmp_path_factory.mktemp("reference"))))
