"""Access to a run's storage for commands that use no Prefect otherwise."""

from __future__ import annotations

import asyncio

from blocks.storage import load_access
from deployments.local import prefect_api
from gyre_core.config import GyreConfig


def load_storage_access(config: GyreConfig) -> None:
    """Load `storage.block`, if there is one, from the configured Prefect API or from that of this machine.

    Raises ValueError when Prefect has no such block.
    """
    if config.storage.block is not None:
        with prefect_api():
            asyncio.run(load_access(config.storage.block))
