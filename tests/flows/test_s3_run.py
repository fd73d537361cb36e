"""A run whose data lies on S3 learns what it learns on a disk, resumes there, and tells nobody its secrets."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gyre_processes import GyreProcess
from prefect import get_client
from safetensors.torch import load_file
from tiny_runs import EVERY_STEP, opened_runs, outcome, take_steps, tiny_config

from blocks.storage import S3Access, load_access
from flows.evaluate import evaluate_newest
from flows.train import train
from gyre_core.checkpoint.retention import Retention
from gyre_core.checkpoint.store import CheckpointStore
from gyre_core.training.build import open_run
from gyre_core.training.checkpoints import open_checkpoints
from gyre_core.training.export import export_run
from gyre_core.training.preflight import preflight
from gyre_core.training.resume import RESUME
from gyre_core.training.run_folder import checkpoint_storage, warm_storage

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
async def block(seaweedfs):
    """The name of a Prefect block with the access to SeaweedFS."""
    options = seaweedfs.options
    access = S3Access(endpoint=options.endpoint, access_key_id=options.access_key, secret_access_key=options.secret_key)
    await access.asave("seaweedfs-of-tests", overwrite=True)
    return "seaweedfs-of-tests"


def texts_below(folder):
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


async def test_a_run_on_s3_equals_one_on_a_disk_and_so_does_one_that_resumes(
    tmp_path, monkeypatch, seaweedfs, block, reference
):
    config = tiny_config(tmp_path / "flow", storage={"url": seaweedfs.url, "block": block})
    with opened_runs(monkeypatch) as runs:
        state = await train(config, return_state=True)
    assert state.is_completed()
    (whole,) = runs
    outcome(whole).assert_equals(reference)
    assert whole.storage.url.startswith(f"s3://gyre-tests/{config.storage.url[-32:]}/{whole.key}?block=")
    assert CheckpointStore(whole.storage, Retention(2)).steps() == [3]
    assert not (whole.folder.path / "pool").exists()
    async with get_client() as client:
        flow_run = await client.read_flow_run(state.state_details.flow_run_id)
    secret = seaweedfs.options.secret_key
    assert secret not in json.dumps(flow_run.parameters, default=str)
    assert not any(secret.encode() in text for text in texts_below(tmp_path))

    config = tiny_config(tmp_path / "resumed", storage={"url": seaweedfs.url, "block": block}, checkpoint=EVERY_STEP)
    await load_access(block)
    first = await open_run(config)
    await take_steps(first, last=2)
    await first.close()
    with opened_runs(monkeypatch) as runs:
        await train(config, resume=True)
    (resumed,) = runs
    assert (resumed.epoch, resumed.step) == (2, 3)
    outcome(resumed).assert_equals(reference)


@pytest.mark.parametrize("lost", ["primary", "warm"])
async def test_increments_on_s3_with_a_warm_store_on_disk_outlive_the_loss_of_either(
    tmp_path, seaweedfs, block, reference, lost
):
    await load_access(block)
    checkpoint = {**EVERY_STEP, "incremental": True, "exact": "replay", "replay_budget": 1e9, "dual_write": True}
    config = tiny_config(
        tmp_path / "runs",
        storage={"block": block},
        checkpoint={**checkpoint, "url": seaweedfs.url, "warm_url": str(tmp_path / "warm")},
    )
    first = await open_run(config)
    await take_steps(first, last=2)
    await first.close()
    store = open_checkpoints(config, first.folder)
    assert [store.manifest(name).base for name in store.names()] == [None, "00000001-0001"]
    stores = {"primary": checkpoint_storage(config, first.folder), "warm": warm_storage(config, first.folder)}
    stores[lost].delete_folder("checkpoints")
    resumed = await open_run(config, origin=RESUME)
    assert resumed.step == 2
    await take_steps(resumed)
    outcome(resumed).assert_equals(reference)
    await resumed.close()
    for storage in stores.values():
        assert "checkpoints/00000003-0002" in storage.folders("checkpoints")


async def test_preflight_evaluation_and_export_read_what_a_run_left_on_s3(tmp_path, monkeypatch, moto):
    for name, value in moto.environment().items():
        monkeypatch.setenv(name, value)
    config = tiny_config(tmp_path, experiment={"steps": 1}, data={"evaluation_size": 4}, storage={"url": moto.url})
    verdicts = {verdict.name: verdict for verdict in await preflight(config)}
    assert not [verdict for verdict in verdicts.values() if verdict.outcome == "fail"]
    assert "refused to a second writer" in verdicts["storage"].evidence
    assert "disk" not in verdicts
    assert moto.storage(config.storage.url).folders() == []
    with opened_runs(monkeypatch) as runs:
        key = await train(config)
    (run,) = runs
    figures = await evaluate_newest(key, str(tmp_path))
    assert f"version        {run.version}" in figures
    exported = load_file(export_run(key, str(tmp_path), str(tmp_path / "exported")) / "model.safetensors")
    published = run.chain.load(run.version)
    assert exported
    assert all(tensor.equal(published[name]) for name, tensor in exported.items())


async def test_a_command_in_a_process_of_its_own_loads_the_block(tmp_path, prefect_server, seaweedfs, block):
    config = tiny_config(tmp_path, experiment={"steps": 1}, storage={"url": seaweedfs.url, "block": block})
    key = await train(config)
    export = ("export", key, "--output", str(tmp_path), "--to", str(tmp_path / "exported"))
    process = GyreProcess(tmp_path / "log", *export, api_url=prefect_server)
    assert process.wait() == 0, process.output
    assert (tmp_path / "exported" / "model.safetensors").exists()


async def test_a_block_that_is_not_there_is_named_before_anything_is_made(tmp_path):
    config = tiny_config(tmp_path / "runs", storage={"url": "s3://bucket/x", "block": "nobodys"})
    state = await train(config, return_state=True)
    with pytest.raises(ValueError, match=r"^storage\.block: Prefect has no block gyre-s3-access/nobodys"):
        await state.aresult()
    assert not (tmp_path / "runs").exists()


def test_a_block_shows_no_secret():
    access = S3Access(access_key_id="key", secret_access_key="secret-5", session_token="token-5")
    for text in (repr(access), str(access), access.model_dump_json()):
        assert "secret-5" not in text
        assert "token-5" not in text
    assert (access.options().secret_key, access.options().session_token) == ("secret-5", "token-5")


WORKER = Path(__file__).parents[2] / "benchmarks" / "sides" / "rollout_worker.py"
"""A rollout worker, which opens the storage by its URL and the environment."""


def start_worker(storage, server, generation):
    command = [sys.executable, str(WORKER), storage.url, "1", str(generation)]
    environment = os.environ | server.environment() | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


async def test_a_worker_that_is_killed_on_s3_loses_and_doubles_nothing(tmp_path, monkeypatch, seaweedfs):
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    rollout = {"launcher": "pool", "worker_count": 1, "max_worker": 1, "heartbeat_timeout": 5.0, "timeout": 150.0}
    config = tiny_config(
        tmp_path,
        experiment={"name": "tiny", "steps": 2, "threads": 1},
        rollout={**rollout, "groups_per_request": 1, "tokens_per_second": 100.0, "max_lag": 0},
        storage={"url": seaweedfs.url, "endpoint": seaweedfs.options.endpoint},
    )
    run = await open_run(config)
    workers = [start_worker(run.storage, seaweedfs, 1)]
    try:
        steps = asyncio.create_task(take_steps(run))
        while len(run.storage.list("pool")) < 11:  # Of 16.
            assert not steps.done(), steps.result()
            await asyncio.sleep(0.05)
        workers[0].kill()
        workers.append(start_worker(run.storage, seaweedfs, 2))
        await steps
        planned = {f"{step:08d}-{shard:04d}" for step in (1, 2) for shard in range(8)}
        assert {name.removesuffix(".parquet") for name in run.storage.list("pool")} == {
            f"pool/{name}" for name in planned
        }
        assert run.step == 2
        assert run.samples_seen == 16 * 4
    finally:
        await run.close()
        for worker in workers:
            worker.kill()
            worker.communicate(timeout=10)
