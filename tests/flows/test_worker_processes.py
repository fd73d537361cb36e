"""Rollout workers as real processes, killed, stopped and thawed: nothing is lost, nothing comes twice."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tiny_runs import REWARDS, TINY, tiny_config

from gyre_core.cluster.fleet import promote, request_drain
from gyre_core.experience.schema import SEGMENT_FORMAT, table_to_groups
from gyre_core.experience.tables import decode_table
from gyre_core.training import stages
from gyre_core.training.build import open_run

WORKER = Path(__file__).parents[2] / "benchmarks" / "sides" / "rollout_worker.py"
STEPS = 6
DEADLINE = 90.0
ROLLOUT = {
    "launcher": "pool",
    "max_lag": 1,
    "quota": 0.75,
    "groups_per_request": 1,
    "heartbeat_timeout": 1.5,
    "orphan_timeout": 5.0,
    "tokens_per_second": 60.0,
    "worker_count": 2,
    "max_worker": 2,
    "timeout": 60.0,
}


class Workers:
    """The worker processes of a test, all ended with it."""

    def __init__(self, storage):
        self.storage = storage
        self.processes = {}

    def start(self, slot, generation=1, *options):
        command = [sys.executable, str(WORKER), self.storage.url, str(slot), str(generation), *options]
        process = subprocess.Popen(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.processes[f"{slot:03d}.{generation}"] = process
        return process

    def end(self):
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.communicate(timeout=10)


@asynccontextmanager
async def opened_run(tmp_path, reward=TINY["reward"], **rollout):
    config = tiny_config(
        tmp_path,
        rollout={**ROLLOUT, **rollout},
        experiment={"name": "tiny", "seed": 3, "steps": STEPS, "threads": 1},
        reward=reward,
    )
    run = await open_run(config, run_id="a")
    workers = Workers(run.storage)
    try:
        async with asyncio.timeout(DEADLINE):
            yield run, workers
    finally:
        await run.close()
        await asyncio.to_thread(workers.end)


async def train(run, follow=None):
    """Take all steps, at most two of them open; `follow` runs beside them and is cancelled at the end."""
    places = asyncio.Semaphore(1 + run.config.rollout.max_lag)
    beside = asyncio.create_task(follow) if follow else None

    async def take(step):
        await stages.take_step(run, step)
        places.release()

    async with asyncio.TaskGroup() as group:
        for step in range(1, STEPS + 1):
            await places.acquire()
            group.create_task(take(step))
    if beside is not None:
        beside.cancel()
        with suppress(asyncio.CancelledError):
            await beside


async def answered_in_the_end(run):
    """Wait for the stragglers that the last step left."""
    while not set(run.stragglers) <= set(run.arrived(run.stragglers)):
        await asyncio.sleep(0.1)


def committed_rollouts(storage):
    """All rollouts of all segments, each with its group."""
    tables = (decode_table(storage.read(name), SEGMENT_FORMAT, name)[0] for name in storage.list("pool"))
    return [(group, rollout) for table in tables for group in table_to_groups(table) for rollout in group.rollouts]


def check_nothing_lost_or_doubled(run):
    """Every request was admitted once, or waits as a straggler with its segment; no row is there twice."""
    storage = run.storage
    entries = [
        name.rpartition("admit-")[2].removesuffix(".json") for name in storage.list("learner/0001") if "admit-" in name
    ]
    planned = {f"{step:08d}-{shard:04d}" for step in range(1, STEPS + 1) for shard in range(8)}
    assert len(entries) == len(set(entries))
    assert set(entries) | set(run.stragglers) == planned
    assert not set(entries) & set(run.stragglers)
    rows = [(group.group_id, rollout.completion.sample_index) for group, rollout in committed_rollouts(storage)]
    assert len(rows) == len(set(rows))
    assert len(rows) == len(planned) * run.config.rollout.samples_per_prompt
    assert run.samples_seen == len(entries) * run.config.rollout.samples_per_prompt


async def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("seed", [1, 2])
async def test_kills_at_random_times_lose_and_double_nothing(tmp_path, seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with opened_run(tmp_path) as (run, workers):
        generations = {0: 1, 1: 1}
        for slot in generations:
            workers.start(slot)

        async def kill():
            while True:
                await asyncio.sleep(rng.uniform(0.2, 1.0))
                ready = [worker.beat.worker for worker in run.remote.registry.workers if worker.phase == "ready"]
                alive = [slot for slot, generation in generations.items() if f"{slot:03d}.{generation}" in ready]
                if len(alive) == len(generations):  # Or no request would ever be finished.
                    slot = rng.choice(alive)
                    workers.processes[f"{slot:03d}.{generations[slot]}"].kill()
                    generations[slot] += 1
                    workers.start(slot, generations[slot])

        await train(run, kill())
        await answered_in_the_end(run)
        check_nothing_lost_or_doubled(run)


async def test_workers_share_each_step(tmp_path):
    async with opened_run(tmp_path) as (run, workers):
        for slot in (0, 1):
            workers.start(slot)
        await wait_for(lambda: run.remote.registry.count(["ready"]) == 2)
        storage, shares = run.storage, {}

        async def read_claims():
            while True:
                for name in storage.list("claims"):
                    with suppress(FileNotFoundError):  # The owner removes those of steps that are closed.
                        shares[name] = storage.read(name).decode().partition(" ")[0]
                await asyncio.sleep(0.05)

        await train(run, read_claims())
        for step in range(1, STEPS + 1):
            counted = Counter(worker for name, worker in shares.items() if f"/{step:08d}-" in name)
            assert sum(counted.values()) >= 8
            assert min(counted["000.1"], counted["001.1"]) >= 2


async def test_a_worker_that_is_frozen_and_thaws_doubles_nothing(tmp_path):
    async with opened_run(tmp_path) as (run, workers):
        frozen = workers.start(0)
        workers.start(1)

        async def freeze():
            await wait_for(lambda: run.step >= 1)
            frozen.send_signal(signal.SIGSTOP)
            await wait_for(lambda: (found := run.remote.registry.find("000.1")) and found.phase == "lost")
            await wait_for(lambda: run.step >= 3)
            frozen.send_signal(signal.SIGCONT)
            await wait_for(lambda: run.remote.registry.find("000.1").phase == "ready")
            await asyncio.sleep(60)

        await train(run, freeze())
        await answered_in_the_end(run)
        check_nothing_lost_or_doubled(run)


async def test_a_drained_worker_finishes_what_it_holds_and_a_spare_takes_over_when_promoted(tmp_path):
    async with opened_run(tmp_path) as (run, workers):
        first = workers.start(0)
        spare = workers.start(1, 1, "--standby")

        async def replace():
            await wait_for(lambda: run.remote.registry.count(["standby"]) == 1 and run.step >= 1)
            assert run.remote.registry.find("001.1").beat.served == 0
            request_drain(run.storage, "000.1")
            await wait_for(lambda: first.poll() is not None)
            promote(run.storage, "001.1")
            await wait_for(lambda: run.remote.registry.find("001.1").phase == "ready")

        follow = asyncio.create_task(replace())
        await train(run)
        await follow
        assert first.returncode == 0
        assert b"it was asked to drain" in first.stdout.read()
        await answered_in_the_end(run)
        assert run.remote.dispatcher.reissued == 0
        check_nothing_lost_or_doubled(run)
        await run.remote.close()
        await wait_for(lambda: spare.poll() is not None)
        assert b"the run has ended" in spare.stdout.read()


async def test_workers_whose_owner_dies_end_by_themselves(tmp_path):
    async with opened_run(tmp_path, orphan_timeout=3.0) as (run, workers):
        worker = workers.start(0)
        await wait_for(lambda: run.remote.registry.count(["ready"]) == 1)
        run.remote._heart._stopped.set()  # The thread of a process that was killed.
        run.remote._task.cancel()
        await wait_for(lambda: worker.poll() is not None)
        assert b"gave no sign of life" in worker.stdout.read()


async def test_what_fails_at_the_workers_scoring_is_counted_by_the_run(tmp_path):
    reward = {"functions": [{"path": f"{REWARDS}:no_nines"}], "retries": 0, "max_failure_share": 1.0}
    async with opened_run(tmp_path, reward=reward) as (run, workers):
        workers.start(0)
        await train(run)
        await answered_in_the_end(run)
        failed = sum(rollout.score.status == "failed" for _, rollout in committed_rollouts(run.storage))
        assert failed > 0
        metrics = [run.results[step].metrics for step in range(1, STEPS + 1)]
        counted = sum(row.get("rewards/no_nines/failed", 0.0) for row in metrics)
        await wait_for(lambda: run.remote.scoring_totals["rewards/no_nines/failed"] == failed)
        assert counted + run.remote.scoring_metrics()["rewards/no_nines/failed"] == failed


async def test_an_error_of_a_worker_reaches_the_step_with_its_words(tmp_path):
    async with opened_run(tmp_path, attempts=1) as (run, workers):
        run.chain.withdraw(run.version)  # Storage lost the weights that the requests ask for.
        workers.start(0)
        with pytest.raises(RuntimeError, match=r"worker 000\.1: FileNotFoundError"):
            await stages.rollout(run, 1)


async def test_a_step_tells_what_ended_the_look_after_its_queue(tmp_path):
    async with opened_run(tmp_path) as (run, _):
        run.remote.dispatcher.tick = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            await stages.rollout(run, 1)
