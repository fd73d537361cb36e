"""A step is a transaction: whatever fails inside it, its retry ends with the same weights, bit for bit."""

import pytest
from tiny_runs import (
    EVERY_STEP,
    Fault,
    fail_everywhere,
    loop_outcome,
    opened_runs,
    optimizer_fault,
    outcome,
    take_steps,
    tiny_config,
)

from flows.train import train
from gyre_core.monitor.metrics import read_metrics
from gyre_core.training.build import open_run

MINIBATCHES = [Fault("learner", "apply", after=True, call=number) for number in range(4)]
PUBLICATION = [
    Fault("chain", "publish"),
    Fault("storage", "create_file", "policy/"),
    Fault("storage", "create", "policy/"),
    Fault("storage", "create", "policy/", after=True),
    Fault("chain", "retain", after=True),
]
GENERATION = [
    Fault("storage", "create", "requests/", call=1),
    Fault("storage", "create", "claims/"),
    Fault("storage", "create", "claims/", after=True),
    Fault("worker.engine", "load_weights"),
    Fault("worker.engine", "load_weights", after=True),
    Fault("worker.scorer", "score", call=1),
    Fault("worker.scorer", "score", after=True),
    Fault("worker.reference", "score"),
    Fault("storage", "create", "pool/", call=1),
    Fault("storage", "create", "pool/", after=True),
]
ADMISSION = [
    Fault("storage", "read", "pool/", after=True, call=1),
    Fault("storage", "create", "/admit-"),
    Fault("storage", "create", "/admit-", after=True, call=1),
    Fault("storage", "create", "/consume-"),
    Fault("storage", "create", "/consume-", after=True),
]
RECORDS = [
    Fault("metrics", "write", after=True, step=3),
    Fault("saver.store._storage", "create_file", "checkpoints/00000002", step=3),
    Fault("saver.store._storage", "create_file", "checkpoints/00000002", step=3, after=True, call=1),
    Fault("saver.store._storage", "create", "checkpoints/00000002", step=3, call=1),
    Fault("saver.store._storage", "create", "checkpoints/00000002", step=3, after=True, call=1),
    Fault("pool", "pin_from", step=3),
]


@pytest.mark.parametrize("fault", [*MINIBATCHES, *PUBLICATION, *GENERATION, *ADMISSION, *RECORDS], ids=str)
async def test_a_retried_step_ends_like_an_undisturbed_one(tmp_path, reference, fault):
    run = await open_run(tiny_config(tmp_path, checkpoint=EVERY_STEP))
    try:
        fault.inject(run)
        await take_steps(run)
        assert fault.raised == 1
        outcome(run).assert_equals(reference)
    finally:
        await run.close()


@pytest.mark.parametrize("call", range(4))
async def test_a_fault_inside_the_optimiser_leaves_no_trace(tmp_path, reference, call):
    run = await open_run(tiny_config(tmp_path))
    try:
        with optimizer_fault(run, call) as calls:
            await take_steps(run)
        assert len(calls) == call + 1 + 4
        outcome(run).assert_equals(reference)
    finally:
        await run.close()


async def test_a_step_gets_through_when_every_storage_operation_fails_before_and_after_it_took_effect(
    tmp_path, reference
):
    run = await open_run(tiny_config(tmp_path, checkpoint=EVERY_STEP))
    try:
        raised = fail_everywhere(run, step=2)
        await take_steps(run, attempts=200)
        assert len(raised) > 60
        outcome(run).assert_equals(reference)
    finally:
        await run.close()


async def test_a_step_is_reported_once(tmp_path):
    """Its time would else begin anew when the checkpoint after it fails and is tried again."""
    run = await open_run(tiny_config(tmp_path, experiment={"steps": 1}))
    try:
        await take_steps(run)
        rows = read_metrics(run.folder.path)
        await run.finish(1)
        assert read_metrics(run.folder.path) == rows
    finally:
        await run.close()


async def test_runs_of_other_seeds_differ(tmp_path, reference):
    other = await loop_outcome(tiny_config(tmp_path, experiment={"seed": 4}))
    for part in ("consumed", "metrics"):
        assert getattr(other, part) != getattr(reference, part)
    with pytest.raises(AssertionError):
        other.assert_equals(reference)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("learner", "apply", after=True, call=2),
        Fault("storage", "create", "policy/"),
        Fault("storage", "create", "policy/", after=True),
        Fault("storage", "create", "pool/", after=True),
        Fault("storage", "create", "/consume-", after=True),
        Fault("saver.store._storage", "create", "checkpoints/00000002", step=3, call=1),
    ],
    ids=str,
)
async def test_the_flow_retries_a_step(prefect_server, tmp_path, monkeypatch, reference, fault):
    with opened_runs(monkeypatch, fault.inject) as runs:
        await train(tiny_config(tmp_path, checkpoint=EVERY_STEP))
    assert fault.raised == 1
    outcome(runs[0]).assert_equals(reference)
