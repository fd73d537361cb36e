"""The pool across owners: restored exactly, and nothing deleted that a restored run could need."""

import numpy as np
import pytest
from experience_samples import grpo, make_group, plain
from pool_samples import REQUEST, admit, all_ids, consume, draw, live_groups, new_pool

from gyre_core.cluster.epochs import SupersededError, claim_epoch
from gyre_core.config.sections import ExperienceConfig
from gyre_core.experience.pool import Pool
from gyre_core.experience.segments import delete_segment, drop_tombstones, segment_ids, write_segment
from gyre_core.storage import open_storage


@pytest.fixture
def storage(tmp_path):
    return open_storage(tmp_path)


def busy_pool(storage, seed, steps=6, **settings):
    """A pool that has lived through some steps."""
    rng = np.random.default_rng(seed)
    pool = new_pool(storage, buffer_size=80, time_window=4.5, max_uses=2, **settings)
    for step in range(1, steps + 1):
        for shard in range(3):
            groups = [
                make_group(
                    f"{step}-{shard}-{n}", rng.integers(0, 2, 4).astype(float).tolist(), prompt_id=str(n), step=step
                )
                for n in range(4)
            ]
            admit(pool, storage, f"{step:08d}-{shard:04d}", groups, step=step, now=step)
        consume(pool, step, draw(pool, step, minibatches=2, size=3, now=step), now=step)
        pool.expire(step)
    return pool


@pytest.mark.parametrize("seed", range(6))
def test_a_restored_pool_goes_on_exactly_as_the_original(storage, seed, tmp_path):
    pool = busy_pool(storage, seed)
    snapshot = pool.snapshot(6).to_table()
    restored = Pool.restore(storage, pool._config, 2, snapshot)
    for step in range(7, 12):
        for each in (pool, restored):
            if step == 8:
                write_segment(storage, "00000008-0000", live_groups("xyz"))
                each.admit("00000008-0000", 8, grpo, 8.0, skip_dead_groups=True)
        first, second = (draw(each, step, minibatches=2, size=3, now=step) for each in (pool, restored))
        assert plain(first) == plain(second)
        ids = all_ids(first)
        assert plain(pool.training_groups(ids)) == plain(restored.training_groups(ids))
        for each in (pool, restored):
            consume(each, step, first, now=step)
            each.expire(step)
        ours, theirs = pool.metrics(step), restored.metrics(step)
        for name in ("samples", "groups", "fresh_samples", "stale_share", "consumed", "mean_age"):
            assert ours.get(f"experience/{name}") == theirs.get(f"experience/{name}")


def test_a_restored_pool_ignores_what_was_admitted_and_takes_what_was_not(storage):
    pool = busy_pool(storage, 1, steps=2)
    snapshot = pool.snapshot(2).to_table()
    admit(pool, storage, "00000003-0000", live_groups("a"), step=3)
    restored = Pool.restore(storage, pool._config, 2, snapshot)
    assert restored.admit("00000002-0001", 3, grpo, 3.0, skip_dead_groups=True).outcome == "ignored"
    assert restored.admit("00000003-0000", 3, grpo, 3.0, skip_dead_groups=True).outcome == "admitted"


@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_stays_what_it_was_while_the_pool_goes_on(storage, seed):
    pool = busy_pool(storage, seed)
    snapshot = pool.snapshot(6)
    before = snapshot.to_table()
    for step in range(7, 14):
        admit(pool, storage, f"{step:08d}-0000", live_groups([f"late{step}-{name}" for name in "abc"]), step=step)
        drawn = draw(pool, step, minibatches=2, size=3, now=step)
        consume(pool, step, drawn, now=step)
        pool.record_policy_change({name: 0.5 for name in all_ids(drawn) if name in pool._index})
        pool.expire(step)
    assert snapshot.to_table().equals(before, check_metadata=True)
    assert not pool.snapshot(13).to_table().equals(before)


def test_a_foreign_snapshot_is_refused(storage):
    table = new_pool(storage).snapshot(0).to_table().replace_schema_metadata({"gyre.format": "snapshot/9"})
    with pytest.raises(ValueError, match="has format 'snapshot/9', and this version reads 'snapshot/1'"):
        Pool.restore(storage, ExperienceConfig(), 1, table)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_that_a_kept_checkpoint_refers_to_is_ever_deleted(storage, seed):
    pool = busy_pool(storage, seed)
    early = pool.snapshot(6).to_table()
    for step in range(7, 14):
        consume(pool, step, draw(pool, step, minibatches=2, size=3, now=step), now=step)
        pool.expire(step)
    pool.snapshot(13)
    pool.pin_from(6)
    restored = Pool.restore(storage, pool._config, 2, early)
    for group_id in restored._index.group_ids:
        restored.training_groups([group_id])
    before = len(segment_ids(storage))
    assert pool.pin_from(13) > 0
    assert len(segment_ids(storage)) < before
    assert pool.pin_from(13) == 0


def test_leftovers_of_frozen_workers_go_and_never_come_back(storage):
    pool = new_pool(storage, max_uses=1)
    admit(pool, storage, REQUEST, live_groups("a"), step=1)
    consume(pool, 1, draw(pool))
    consume(pool, 2, [])
    pool.close(before_step=1)
    pool.snapshot(2)
    assert pool.pin_from(2) == 1
    data = b"published by a worker that checked for the tombstone before it was written"
    storage.create(f"pool/{REQUEST}.parquet", data)
    storage.create("pool/00000000-0000.parquet", data)
    assert pool.admit(REQUEST, 3, grpo, 0.0, skip_dead_groups=True).outcome == "ignored"
    assert pool.pin_from(2) == 2
    assert segment_ids(storage) == []


def test_a_straggler_that_a_restored_run_must_make_again_is_not_barred(storage):
    """Closed since the checkpoint, the request is open again for whoever restores it."""
    pool = new_pool(storage)
    checkpoint = pool.snapshot(0).to_table()
    pool.close(before_step=9)
    write_segment(storage, REQUEST, live_groups("a"))
    pool.pin_from(0)
    restored = Pool.restore(storage, ExperienceConfig(), 2, checkpoint)
    assert restored.admit(REQUEST, 1, grpo, 0.0, skip_dead_groups=True).outcome == "admitted"


def test_who_goes_back_may_make_anew_what_was_deleted_of_later_steps(storage):
    pool = new_pool(storage)
    admit(pool, storage, REQUEST, live_groups("a"))
    snapshot = pool.snapshot(1).to_table()
    later = "00000002-0000"
    write_segment(storage, later, live_groups("b"))
    delete_segment(storage, later)
    with pytest.raises(FileExistsError):
        write_segment(storage, later, live_groups("b"))
    restored = Pool.restore(storage, ExperienceConfig(), claim_epoch(storage, "next"), snapshot)
    delete_segment(storage, REQUEST)
    drop_tombstones(storage, restored.admitted)
    assert storage.list("tombstones") == [f"tombstones/{REQUEST}"], "what is settled stays so"
    assert admit(restored, storage, later, live_groups("b"), step=2).outcome == "admitted"


def test_requests_and_tombstones_of_closed_steps_are_pruned(storage):
    pool = new_pool(storage)
    for name in ("requests/00000001-0000.1", "claims/00000001-0000.1", "requests/00000002-0000.1"):
        storage.create(name, b"x")
    pool.close(before_step=2)
    pool.snapshot(2)
    pool.pin_from(2)
    assert storage.list("requests") == ["requests/00000002-0000.1"]
    assert storage.list("claims") == []


def test_a_superseded_owner_deletes_nothing(storage):
    pool = busy_pool(storage, 0)
    pool.snapshot(6)
    claim_epoch(storage, "the next owner")
    before = segment_ids(storage)
    with pytest.raises(SupersededError, match="owned by the next owner"):
        pool.pin_from(6)
    assert segment_ids(storage) == before


def test_a_snapshot_in_the_middle_of_a_step_is_refused(storage):
    pool = busy_pool(storage, 0, steps=3)
    with pytest.raises(AssertionError, match="step 3 was consumed, so the state after 2 is gone"):
        pool.snapshot(2)
