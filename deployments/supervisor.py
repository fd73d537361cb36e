"""The small process that `gyre up` leaves: it starts server, pools, Prefect workers and deployments, and keeps them.

    python -m deployments.supervisor [--port N] [--owned]

It ends on SIGTERM, or, when it is owned, with its last owner: it drains the flow runs, and ends what it started.
Whatever fails on the way up ends it the same way, with the reason in the report that `gyre up` shows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
from prefect.client.orchestration import get_client

from deployments import users
from deployments.automations import remove_automations
from deployments.dead_runs import DeadRuns, end_flow_processes
from deployments.deploy import deploy
from deployments.drain import drain
from deployments.exit_codes import FAILED, USER_ERROR
from deployments.flow_processes import flow_processes, prune_logs, was_started_here
from deployments.home import gyre_home, last_lines, locked
from deployments.local import (
    LocalServer,
    ServerStartError,
    configured_api,
    prefect_api,
    revive_server,
    server_home,
)
from deployments.platform_state import (
    PlatformError,
    PlatformState,
    Supervised,
    owners_folder,
    report_file,
    state_file,
)
from deployments.pools import POOLS
from deployments.prefect_workers import is_online, start_prefect_worker, worker_log
from deployments.processes import ProcessId, end_processes, reap
from deployments.restarts import Restarts
from flows.recover import crashed_runs, recover_run

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Pause between two looks at what is supervised."""
STUCK_LOOKS = 20
"""Looks between two at runs that are stuck on their way to a process, or crashed without a process that ended here."""
ONLINE_TIMEOUT = 90.0
"""Seconds until a Prefect worker must have reached the server."""
DRAIN_TIMEOUT = 60.0
"""Seconds that flow runs have to end; Prefect kills a cancelled one after 30."""
WORKER_STOP_TIMEOUT = 15.0
"""Seconds that Prefect workers have to end."""


class Supervisor:
    """Runs and keeps the platform until it is told to stop."""

    def __init__(self, state: PlatformState) -> None:
        self._state = state
        self._told_to_stop = False
        self._dead_runs = DeadRuns()
        self._restarts: dict[str, Restarts] = {}
        self._started_at: dict[str, float] = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop())

    def run(self, port: int | None) -> None:
        """Start everything, keep it, and end it again.

        Raises ValueError or ServerStartError like `prefect_api`, and PlatformError.
        """
        state = self._state
        state.local = configured_api() is None
        with prefect_api(port=port) as url:
            state.api_url = url
            if state.local:
                self._note_server()
            state.save()
            with contextlib.ExitStack() as ending:
                ending.callback(lambda: asyncio.run(self._tell_ends()))
                ending.callback(lambda: end_flow_processes(WORKER_STOP_TIMEOUT))
                ending.callback(lambda: end_processes(state.worker_processes(), WORKER_STOP_TIMEOUT))
                ending.callback(lambda: asyncio.run(self._drain()))
                asyncio.run(self._keep())

    def _stop(self) -> None:
        self._told_to_stop = True

    @property
    def _stopping(self) -> bool:
        return self._told_to_stop or (self._state.owned and not users.living(owners_folder()))

    async def _keep(self) -> None:
        """Bring everything up, then look after it until it is time to stop."""
        await self._start()
        for looks in itertools.count(1):
            if self._stopping:
                break
            reap()
            if self._state.local:
                await self._revive("server", self._state.server, self._revive_server)
            for pool, worker in self._state.workers.items():
                await self._revive(pool, worker, lambda pool=pool: self._start_worker(pool))
            await self._look_after_runs(looks)
            await asyncio.sleep(LOOK_SECONDS)
        self._state.stage = "stopping"
        self._state.save()

    async def _start(self) -> None:
        prune_logs()
        if self._stopping:
            return
        async with get_client() as client:
            await deploy(client)
        for pool in POOLS:
            self._state.workers[pool] = Supervised()
            await self._start_worker(pool)
        deadline = time.monotonic() + ONLINE_TIMEOUT
        for pool in POOLS:
            await self._wait_until_online(pool, deadline)
        if not self._stopping:
            self._state.stage = "ready"
            self._state.save()

    async def _start_worker(self, pool: str) -> None:
        self._state.workers[pool].process = start_prefect_worker(pool, self._state.api_url)
        self._started_at[pool] = time.monotonic()
        self._state.save()

    async def _wait_until_online(self, pool: str, deadline: float) -> None:
        process = self._state.workers[pool].process
        async with get_client() as client:
            while not self._stopping and not await is_online(client, pool):
                if process is None or not process.running() or time.monotonic() > deadline:
                    raise PlatformError(
                        f"the Prefect worker of {pool} did not come up; the end of its log:\n"
                        + last_lines(worker_log(pool), 15)
                    )
                await asyncio.sleep(0.2)

    async def _revive(self, name: str, supervised: Supervised, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start again what has ended, after a pause that grows, until it ended too often."""
        now, restarts = time.monotonic(), self._restarts.setdefault(name, Restarts())
        if supervised.process is not None:
            if supervised.process.running():
                return
            log = server_home() / "server.log" if name == "server" else worker_log(name)
            supervised.process, supervised.last_error = None, last_lines(log, 5)
            restarts.ended(now, lived=now - self._started_at[name])
            supervised.given_up = restarts.exhausted
            self._state.save()
        if supervised.given_up or now < restarts.due_at:
            return
        logger.warning("%s has ended and is started again; the end of its log:\n%s", name, supervised.last_error)
        supervised.restarts += 1
        try:
            await start()
        except (ValueError, ServerStartError) as error:
            supervised.last_error = str(error)
            restarts.ended(time.monotonic(), lived=0.0)
            supervised.given_up = restarts.exhausted
            self._state.save()

    async def _revive_server(self) -> None:
        await asyncio.to_thread(revive_server)
        self._note_server()
        for pool, worker in self._state.workers.items():
            # It would ask the server again a minute later, and after long enough give up and end its flow runs.
            # Killed, it leaves them alone, and its successor asks at once.
            if process := worker.process and worker.process.find():
                process.kill()
            await self._start_worker(pool)

    def _note_server(self) -> None:
        server = LocalServer.known(server_home())
        assert server is not None, "it was started, or found running, just now"
        self._state.server.process = server.process
        self._started_at["server"] = time.monotonic()

    async def _look_after_runs(self, looks: int) -> None:
        try:
            processes = flow_processes().values()
            if processes:
                await self._settle_runs()
            if looks % STUCK_LOOKS == 0 and self._state.local:
                async with get_client() as client:
                    await self._dead_runs.release_stuck(client)
            if looks % STUCK_LOOKS == 0 or not all(process.running() for process in processes):
                await self._recover_runs()
        except httpx.HTTPError:
            pass  # The server is away, or refuses to speak of a run that it was rid of; the next look is soon.
        except Exception:
            logger.exception("flow runs could not be looked after; everything else goes on")

    async def _settle_runs(self) -> None:
        async with get_client() as client:
            await self._dead_runs.settle(client, self._state.worker_processes())

    async def _recover_runs(self) -> None:
        """Start training again that has crashed here, whoever told Prefect so."""
        async with get_client() as client:
            for run in await crashed_runs(client):
                if was_started_here(run.id):
                    try:
                        await recover_run(client, run)
                    except (ValueError, OSError):  # The others shall not wait for this one.
                        logger.exception("crashed flow run %s cannot go on yet, and is looked at again", run.id)

    async def _tell_ends(self) -> None:
        """Tell Prefect of the processes that were killed on the way down."""
        with contextlib.suppress(httpx.HTTPError):
            async with get_client() as client:
                await self._dead_runs.settle(client, [])

    async def _drain(self) -> None:
        """End the flow runs of this machine, and on its own server what would start new ones."""
        try:
            async with get_client() as client:
                late = await drain(client, self._settle_runs, timeout=DRAIN_TIMEOUT, local=self._state.local)
                if self._state.local:
                    await remove_automations(client)
        except httpx.HTTPError as error:
            _report(f"the Prefect server did not answer, so that the flow runs were not drained ({error})")
        else:
            if late:
                _report(f"these flow runs did not end in {DRAIN_TIMEOUT:.0f} s and were killed: {', '.join(late)}")


def _report(text: str) -> None:
    """Leave a remark for the command that started or ended the platform."""
    with report_file().open("a") as file:
        file.write(f"{text}\n")


def main() -> int:
    """Supervise; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deployments.supervisor", description=__doc__)
    parser.add_argument("--port", type=int)
    parser.add_argument("--owned", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        with locked(gyre_home() / "up.lock", timeout=5.0):
            report_file().unlink(missing_ok=True)
            state = PlatformState(ProcessId.of(os.getpid()), owned=arguments.owned)
            state.save()
            try:
                Supervisor(state).run(arguments.port)
            finally:
                state_file().unlink(missing_ok=True)
    except (ValueError, TimeoutError) as error:
        _report(str(error))
        return USER_ERROR
    except (ServerStartError, PlatformError) as error:
        _report(str(error))
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
