"""The fleet on a real platform: a decision travels by event, automation and flow, and the reconciler heals the rest."""

import asyncio

import pytest
from platform_tools import until
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags

from deployments.flow_processes import flow_processes
from flows.fleet import PrefectFleet, read_signs, reconcile_once, request_scale
from flows.names import ROLLOUT_POOL
from gyre_core.cluster.epochs import claim_epoch
from gyre_core.cluster.fleet import Target, write_target
from gyre_core.storage import open_storage

NOBODY = Target(0, 0)


class Fleet:
    """A run that only wants workers."""

    def __init__(self, key, folder):
        self.key = key
        self.storage = open_storage(folder)
        self.epoch = claim_epoch(self.storage, "test")
        self.prefect = PrefectFleet(key, self.storage, self.epoch, drain_timeout=60.0)

    async def flow_runs(self):
        async with get_client() as client:
            tagged = FlowRunFilter(tags=FlowRunFilterTags(all_=[self.key]))
            return await client.read_flow_runs(flow_run_filter=tagged)

    async def names(self, *phases):
        """The names of the workers in these phases, with a star for a spare."""
        members = await self.prefect.members(read_signs(self.storage))
        found = [member for member in members if member.phase in phases]
        return sorted(member.name + ("*" if member.role == "standby" else "") for member in found)

    async def becomes(self, target, *ready):
        """Reconcile until exactly these workers are ready, and no others are there."""
        write_target(self.storage, target)

        async def settled():
            await self.prefect.reconcile(target)
            others = await self.names("pending", "starting", "draining", "lost")
            return not others and await self.names("ready") == list(ready)

        await until(settled, f"{ready} to be ready")


@pytest.fixture
async def fleet(platform, tmp_path, request):
    fleet = Fleet(f"toy/{request.node.name}", tmp_path)
    yield fleet
    await fleet.becomes(NOBODY)


async def pool_limit():
    async with get_client() as client:
        return (await client.read_work_pool(ROLLOUT_POOL)).concurrency_limit


async def test_a_decision_starts_workers_by_way_of_the_automation_and_twice_doubles_nothing(fleet):
    target = Target(2, 0, decision=1, reason="the pool runs empty")
    write_target(fleet.storage, target)
    request_scale(fleet.key, fleet.storage, target)
    request_scale(fleet.key, fleet.storage, target)

    async def ready():
        return await fleet.names("ready") == ["000.1", "001.1"]

    await until(ready, "the automation's workers")
    await asyncio.gather(reconcile_once(fleet.key, fleet.storage), fleet.prefect.reconcile(target))
    assert sorted(run.name for run in await fleet.flow_runs()) == ["worker-000.1", "worker-001.1"]


async def test_the_fleet_grows_and_shrinks_with_the_pools_limit_and_spares_step_in(fleet):
    await fleet.becomes(Target(1, 1), "000.1", "001.1*")
    assert await pool_limit() >= 2
    await fleet.becomes(Target(2, 0), "000.1", "001.1")
    processes = flow_processes()
    (first,) = [processes[run.id] for run in await fleet.flow_runs() if run.name == "worker-000.1"]
    async with get_client() as client:
        assert not await fleet.prefect.any_ended(client)
        first.find().kill()
        await until(lambda: fleet.prefect.any_ended(client), "the end of a worker to be noticed")
    assert fleet.prefect.ended_workers == []
    await fleet.becomes(Target(2, 0), "000.2", "001.1")
    await fleet.becomes(Target(1, 0), "000.2")
    states = {run.name: run.state.name for run in await fleet.flow_runs()}
    assert states == {
        "worker-000.1": "Crashed",
        "worker-000.2": "Running",
        "worker-001.1": "Completed",
    }


async def test_a_worker_that_fails_at_its_start_is_tried_again_more_and_more_slowly(fleet):
    fleet.storage.create("broken", b"")
    target = Target(1, 0)
    write_target(fleet.storage, target)

    async def rests():
        plan = await fleet.prefect.reconcile(target)
        return plan.waiting == (0,) and plan

    plan = await until(rests, "the slot to rest")
    assert plan.start == ()
    assert {run.state.name for run in await fleet.flow_runs()} == {"Failed"}
    assert "no such model" in await fleet.prefect.last_words(0)
    fleet.storage.delete("broken")
    generation = len(await fleet.flow_runs()) + 1
    await fleet.becomes(target, f"000.{generation}")
