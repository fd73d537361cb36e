"""One pass of the reconciler, as the automation runs it after a scaling decision."""

from __future__ import annotations

from prefect import flow

from blocks.storage import open_data_storage
from flows.fleet import describe, reconcile_once


@flow(flow_run_name="resize-{decision}", persist_result=False)
async def resize(run: str, storage: str, decision: int = 0) -> str:
    """Bring the rollout workers of `run`, whose data lies at `storage`, to what it wants; returns what was done.

    It may run at any time, more than once, and beside the train process, which does the same every few seconds.
    """
    return describe(await reconcile_once(run, await open_data_storage(storage)))
