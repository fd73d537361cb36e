"""Policy versions are published beside the training of the next step, in order, and nobody runs ahead of them."""

import asyncio
import contextvars
import threading
from contextlib import asynccontextmanager

import pytest
from training_configs import tiny_config

from gyre_core.cluster.waiting import WaitExpiredError
from gyre_core.training import stages
from gyre_core.training.build import open_run


class Publications:
    """Holds each publication of a run until it is let go, and fails as many as it is told to."""

    def __init__(self, run, failures=0):
        self.held, self.free, self.failures = threading.Event(), threading.Event(), failures
        self._real = run.chain.publish
        run.chain.publish = self._publish

    def _publish(self, *arguments):
        self.held.set()
        assert self.free.wait(30)
        if self.failures:
            self.failures -= 1
            raise OSError("the storage is away")
        return self._real(*arguments)


@asynccontextmanager
async def opened(folder, **sections):
    run = await open_run(tiny_config(folder, **sections))
    try:
        yield run
    finally:
        await run.close()


async def train(run, step):
    """All of a step but its generation."""
    for stage in (stages.reward, stages.sample, stages.update):
        await stage(run, step)
    await run.finish(step)


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_next_step_trains_while_a_version_is_published(tmp_path):
    async with opened(tmp_path, rollout={"max_lag": 1}) as run:
        publications = Publications(run)
        await stages.rollout(run, 1)
        await stages.rollout(run, 2)
        await train(run, 1)
        first = run.version
        await until(publications.held.is_set)
        assert run.publisher.busy
        assert not run.chain.exists(first)
        generation = asyncio.create_task(stages.rollout(run, 3))
        training = asyncio.create_task(train(run, 2))
        await until(lambda: 2 in run.open_steps and run.open_steps[2].update_metrics)
        await asyncio.sleep(0.1)
        assert not run.chain.exists(first)
        assert not generation.done(), "step 3 generates with the version that is on its way"
        assert not training.done(), "one version after the other"
        publications.free.set()
        await asyncio.gather(generation, training)
        await run.publisher.settled()
        assert run.open_steps[3].requests[0].version == first
        assert run.chain.manifest(run.version).parent == first
        weights = run.learner.policy_weights()
        assert all(weights[name].equal(tensor) for name, tensor in run.chain.load(run.version).items())


async def test_a_version_holds_the_weights_of_its_step_whatever_is_trained_meanwhile(tmp_path):
    async with opened(tmp_path, rollout={"max_lag": 1}) as run:
        publications = Publications(run)
        await stages.rollout(run, 1)
        await train(run, 1)
        left = {name: tensor.clone() for name, tensor in run.learner.policy_weights().items()}
        for tensor in run.learner.policy_weights().values():
            tensor.zero_()
        publications.free.set()
        await run.publisher.settled()
        assert all(left[name].equal(tensor) for name, tensor in run.chain.load(run.version).items())


async def test_who_waits_for_a_failed_publication_tries_it_again(tmp_path):
    async with opened(tmp_path) as run:
        publications = Publications(run, failures=2)
        publications.free.set()
        await stages.rollout(run, 1)
        await train(run, 1)
        assert run.step == 1, "the step is done, its version is not"
        while publications.failures:
            with pytest.raises(OSError, match="the storage is away"):
                await run.publisher.settled()
        await stages.rollout(run, 2)
        assert run.chain.exists(run.version)
        assert not run.publisher.busy


async def test_a_wait_for_a_publication_ends_and_names_the_storage(tmp_path):
    async with opened(tmp_path) as run:
        publications = Publications(run)
        await stages.rollout(run, 1)
        await train(run, 1)
        usual = run.config
        run.config = usual.model_copy(update={"rollout": usual.rollout.model_copy(update={"timeout": 0.2})})
        with pytest.raises(WaitExpiredError, match=f"policy version {run.version} .*{run.storage.url}"):
            await run.publisher.settled()
        run.config = usual
        publications.free.set()
        await run.publisher.settled()
        assert run.chain.exists(run.version)


async def test_a_cancelled_wait_leaves_the_publication_alone(tmp_path):
    async with opened(tmp_path) as run:
        publications = Publications(run)
        await stages.rollout(run, 1)
        await train(run, 1)
        waiting = asyncio.create_task(run.publisher.settled())
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        publications.free.set()
        await run.publisher.settled()
        assert run.chain.exists(run.version)


async def test_the_threads_of_a_run_know_whose_work_they_do(tmp_path):
    """Prefect tells by a context variable which flow run a log line is of."""
    whose = contextvars.ContextVar("whose")
    seen = []
    async with opened(tmp_path) as run:
        await stages.rollout(run, 1)
        whose.set("step 1")
        assert await run.in_order(whose.get) == "step 1"
        real = run.chain.publish
        run.chain.publish = lambda *arguments: (seen.append(whose.get()), real(*arguments))
        await train(run, 1)
        await run.publisher.settled()
        assert seen == ["step 1"]


async def test_a_run_closes_with_its_last_version_published(tmp_path):
    async with opened(tmp_path) as run:
        publications = Publications(run)
        await stages.rollout(run, 1)
        await train(run, 1)
        closing = asyncio.create_task(run.close())
        await asyncio.sleep(0.1)
        assert not closing.done()
        publications.free.set()
        await closing
        assert run.chain.exists(run.version)
