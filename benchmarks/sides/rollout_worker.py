"""A rollout worker without Prefect, for benchmarks and tests.

python rollout_worker.py STORAGE SLOT GENERATION [--standby]
"""

import asyncio
import os
import sys

from gyre_core.cluster.fleet import worker_name
from gyre_core.rollout.build import open_worker, read_config
from gyre_core.rollout.serving import ClaimedRequest, answer_request
from gyre_core.rollout.work import RolloutWorker
from gyre_core.storage import open_storage


async def main(url: str, slot: int, generation: int, standby: bool) -> None:
    storage = open_storage(url)
    config = read_config(storage)
    name = worker_name(slot, generation)
    token = f"{name} {os.getpid()}"
    worker = RolloutWorker(name, token, storage, config.rollout, standby=standby)

    async def answer(claimed: ClaimedRequest) -> bool:
        return await answer_request(claimed) is not None

    print(await worker.run(lambda: open_worker(config, storage, token), answer))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "--standby" in sys.argv))
