"""The pool: admission once, draws by rule, uses counted."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from experience_samples import VERSION, grpo, make_group, plain
from pool_samples import REQUEST, admit, all_ids, consume, draw, drawn_ids, live_groups, new_pool

from gyre_core.cluster.epochs import SupersededError, claim_epoch
from gyre_core.config.sections import ExperienceConfig
from gyre_core.experience.pool import Pool
from gyre_core.experience.segments import segment_ids, write_segment
from gyre_core.storage import open_storage
from gyre_core.types import PolicyVersion


@pytest.fixture
def storage(tmp_path):
    return open_storage(tmp_path)


def test_admission_reports_what_came_in(storage):
    pool = new_pool(storage)
    groups = [make_group("a", [1.0, None, 0.0, 1.0]), make_group("b", [0.3] * 4), make_group("c", [None, 1.0])]
    admission = admit(pool, storage, REQUEST, groups)
    assert admission.outcome == "admitted"
    assert [group.group_id for group in admission.groups] == ["a", "b"]
    assert admission.samples == 7
    assert admission.dead_groups == 1
    assert admission.dropped == {"reward_abstained": 2, "group_too_small": 1}
    [group] = pool.training_groups(["a"])
    np.testing.assert_allclose(group.advantages, [0.577, -1.155, 0.577], atol=1e-3)
    np.testing.assert_array_equal(group.rewards, [1.0, 0.0, 1.0])
    assert [ids.tolist() for ids in group.completions] == [[0, 1, 2], [2, 3, 4], [3, 4, 5]]
    assert group.reference is None


def test_the_same_prompt_twice_is_two_groups(storage):
    """Merged, the two would get advantages of ±0.935; apart, both are dead."""
    pool = new_pool(storage)
    groups = [make_group("a", [0.0] * 4, prompt_id="p"), make_group("b", [1.0] * 4, prompt_id="p")]
    assert admit(pool, storage, REQUEST, groups).dead_groups == 2
    for group in pool.training_groups(["a", "b"]):
        assert group.advantages.tolist() == [0.0] * 4


def test_dead_groups_are_drawn_only_when_they_are_not_skipped(storage):
    groups = [make_group("dead", [0.3] * 4), *live_groups(["live"])]
    skipping = new_pool(storage)
    admit(skipping, storage, REQUEST, groups)
    assert drawn_ids(draw(skipping)) == drawn_ids(draw(skipping, on_policy=True)) == [["live"]]
    taking = new_pool(storage)
    assert taking.admit(REQUEST, 1, grpo, 0.0, skip_dead_groups=False).dead_groups == 1
    assert sorted(all_ids(draw(taking))) == ["dead", "live"]


def test_a_request_is_admitted_once(storage):
    pool = new_pool(storage)
    first = admit(pool, storage, REQUEST, live_groups("ab"))
    assert pool.admit(REQUEST, 1, grpo, 5.0, skip_dead_groups=True) is first
    assert pool.metrics(0.0)["experience/groups"] == 2


def test_a_corrupt_segment_is_put_aside_and_can_be_made_anew(storage):
    pool = new_pool(storage)
    storage.create(f"pool/{REQUEST}.parquet", b"")
    admission = pool.admit(REQUEST, 1, grpo, 0.0, skip_dead_groups=True)
    assert admission.outcome == "corrupt"
    assert admission.reason == f"pool/{REQUEST}.parquet cannot be used: the file is empty"
    assert admit(pool, storage, REQUEST, live_groups("a")).outcome == "admitted"
    assert pool.metrics(0.0)["experience/quarantined"] == 1


def test_a_segment_of_another_branch_is_put_aside_where_only_own_samples_are_trained_on(storage):
    pool = new_pool(storage)
    write_segment(storage, REQUEST, live_groups("a"))
    own = PolicyVersion(VERSION.epoch + 1, VERSION.number)
    admission = pool.admit(REQUEST, 1, grpo, 0.0, skip_dead_groups=True, made_by=own)
    assert admission.outcome == "corrupt"
    assert admission.reason == f"pool/{REQUEST}.parquet was made on an abandoned branch"
    assert segment_ids(storage) == []
    write_segment(storage, REQUEST, [replace(group, version=own) for group in live_groups("a")])
    assert pool.admit(REQUEST, 1, grpo, 0.0, skip_dead_groups=True, made_by=own).outcome == "admitted"
    assert pool.metrics(0.0)["experience/quarantined"] == 0, "nothing was damaged"


def test_a_superseded_owner_leaves_the_segments_of_the_next_one(storage):
    pool = new_pool(storage)
    claim_epoch(storage, "the next one")
    write_segment(storage, REQUEST, live_groups("a"))
    with pytest.raises(SupersededError):
        pool.admit(REQUEST, 1, grpo, 0.0, skip_dead_groups=True, made_by=PolicyVersion(VERSION.epoch - 1, 0))
    assert segment_ids(storage) == [REQUEST]


def test_a_missing_segment_is_an_error(storage):
    with pytest.raises(FileNotFoundError):
        new_pool(storage).admit(REQUEST, 1, grpo, 0.0, skip_dead_groups=True)


def test_a_failing_advantage_function_leaves_the_pool_as_it_was(storage):
    pool = new_pool(storage)
    write_segment(storage, REQUEST, live_groups("a"))

    def broken(groups):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pool.admit(REQUEST, 1, broken, 0.0, skip_dead_groups=True)
    assert pool.admit(REQUEST, 1, grpo, 0.0, skip_dead_groups=True).outcome == "admitted"


def test_a_late_segment_of_a_closed_step_is_ignored(storage):
    pool = new_pool(storage)
    pool.close(before_step=2)
    assert admit(pool, storage, REQUEST, live_groups("a")).outcome == "ignored"
    assert draw(pool) == []


@pytest.mark.parametrize("count", [0, 1, 3, 7, 8])
def test_on_policy_takes_all_own_fresh_groups_evenly(storage, count):
    pool = new_pool(storage)
    admit(pool, storage, REQUEST, live_groups([f"g{n}" for n in range(count)]))
    admit(pool, storage, "00000001-0001", live_groups(["old"], version=PolicyVersion(1, 3)))
    drawn = drawn_ids(draw(pool, minibatches=3, size=2, on_policy=True))
    assert sorted(name for part in drawn for name in part) == sorted(f"g{n}" for n in range(count))
    assert len(drawn) == min(3, count)
    assert not drawn or max(map(len, drawn)) - min(map(len, drawn)) <= 1
    assert all(group.weight == 1.0 for part in draw(pool, on_policy=True) for group in part)


def test_on_policy_never_draws_twice(storage):
    pool = new_pool(storage, max_uses=2)
    admit(pool, storage, REQUEST, live_groups("ab"))
    consume(pool, 1, draw(pool, on_policy=True))
    assert draw(pool, on_policy=True) == []
    assert sorted(all_ids(draw(pool))) == ["a", "b"]


def test_draws_repeat_and_change_nothing(storage):
    pool = new_pool(storage)
    admit(pool, storage, REQUEST, live_groups([f"g{n}" for n in range(30)]))
    assert plain(draw(pool, 5)) == plain(draw(pool, 5))
    assert drawn_ids(draw(pool, 5)) != drawn_ids(draw(pool, 6))


@pytest.mark.parametrize("max_uses", [1, 2, 3])
def test_a_group_is_used_as_often_as_allowed(storage, max_uses):
    pool = new_pool(storage, max_uses=max_uses)
    admit(pool, storage, REQUEST, live_groups("abcdefgh"))
    uses = Counter()
    for step in range(1, 9):
        drawn = draw(pool, step, minibatches=2, size=2)
        consume(pool, step, drawn)
        uses.update(all_ids(drawn))
    assert set(uses.values()) == {max_uses}
    assert len(uses) == 8


def test_half_of_a_draw_is_fresh_while_there_is_that_much(storage):
    pool = new_pool(storage, max_uses=9, fresh_share=0.5, priority_alpha=0.0)
    admit(pool, storage, REQUEST, live_groups([f"used{n}" for n in range(40)]))
    for step in (1, 2):
        consume(pool, step, [[group] for part in draw(pool, minibatches=1, size=40) for group in part])
    admit(pool, storage, "00000002-0000", live_groups([f"new{n}" for n in range(5)]), step=2)
    for seed in range(20):
        names = all_ids(draw(pool, seed, minibatches=2, size=4))
        assert sum(name.startswith("new") for name in names) >= 4
    assert sum(name.startswith("new") for name in all_ids(draw(pool, minibatches=2, size=10))) == 5


def test_no_prompt_takes_more_than_its_share_of_a_minibatch(storage):
    pool = new_pool(storage, max_prompt_share=0.25)
    common = [make_group(f"c{n}", [1.0, 0.0], prompt_id="common") for n in range(50)]
    rare = [make_group(f"r{n}", [1.0, 0.0]) for n in range(20)]
    admit(pool, storage, REQUEST, common + rare)
    for seed in range(10):
        for part in drawn_ids(draw(pool, seed, minibatches=3, size=8)):
            assert len(part) in (7, 8)
            assert sum(name.startswith("c") for name in part) <= 2


def test_weights_correct_for_the_priority(storage):
    """Advantages of 1 0 0 0 spread by .75 on the mean, of 1 1 0 0 by .866; the rewards raise by 0 and 1."""
    pool = new_pool(storage, priority_alpha=0.5)
    admit(pool, storage, REQUEST, [make_group("low", [1.0, 0, 0, 0]), make_group("high", [1.0, 1, 0, 0])])
    weights = {group.group_id: group.weight for part in draw(pool) for group in part}
    assert weights["low"] == 1.0
    assert weights["high"] == pytest.approx(np.sqrt((0.75 + 0.01) / (2 * 0.8660254 + 0.01)))


def test_a_large_policy_change_is_drawn_more(storage):
    pool = new_pool(storage, priority_alpha=1.0)
    admit(pool, storage, REQUEST, live_groups("abcd"))
    pool.record_policy_change({"c": 6.74})  # Spread .75 and floor .01 for each: c weighs 7.5, the others .76.
    first = Counter(all_ids(draw(pool, seed, minibatches=1, size=1))[0] for seed in range(400))
    assert 250 < first["c"] < 350  # 7.5 of 9.78, 307 expected, six standard deviations.


def test_age_weighs_down_and_then_drops(storage):
    pool = new_pool(storage, time_window=90.0, priority_alpha=0.0)
    admit(pool, storage, REQUEST, live_groups(["old"]), now=0.0)
    admit(pool, storage, "00000001-0001", live_groups(["new"]), now=60.0)
    first = Counter(all_ids(draw(pool, seed, minibatches=1, size=1, now=60.0))[0] for seed in range(400))
    assert 20 < first["old"] < 90  # exp(-2) to 1 is 48 expected.
    assert drawn_ids(draw(pool, now=90.0, minibatches=1)) != [["new"]]
    assert drawn_ids(draw(pool, now=90.1, minibatches=1)) == [["new"]]
    assert pool.expire(90.1) == 1
    assert pool.expire(90.1) == 0
    assert pool.metrics(90.1)["experience/groups"] == 1


def test_the_oldest_groups_make_room(storage):
    pool = new_pool(storage, buffer_size=10)
    admit(pool, storage, REQUEST, live_groups("ab"), now=0.0)
    admit(pool, storage, "00000001-0001", live_groups("c"), now=1.0)
    metrics = pool.metrics(1.0)
    assert metrics["experience/samples"] == 8
    assert sorted(all_ids(draw(pool))) == ["b", "c"]


def test_a_pool_that_shrinks_gives_up_its_oldest_groups_and_their_segments(storage):
    pool = new_pool(storage, max_uses=9)
    for number in range(4):
        admit(pool, storage, f"00000001-{number:04d}", live_groups([f"{number}a", f"{number}b"]), now=float(number))
    consume(pool, 1, [])
    pool.close(before_step=2)
    assert pool.shrink(32) == 0
    # 8 groups of 4: the three newest stay, of the last segment and half of the one before.
    assert pool.shrink(12) == 5
    assert sorted(all_ids(draw(pool))) == ["2b", "3a", "3b"]
    assert pool.metrics(4.0)["experience/segments"] == 2
    snapshot = pool.snapshot(1).to_table()
    assert pool.pin_from(1) == 2
    assert segment_ids(storage) == ["00000001-0002", "00000001-0003"]
    restored = Pool.restore(storage, ExperienceConfig(max_uses=9), 2, snapshot)
    assert drawn_ids(draw(restored)) == drawn_ids(draw(pool))
    assert pool.shrink(0) == 3
    empty = pool.snapshot(1).to_table()
    assert pool.pin_from(1) == 2
    assert draw(Pool.restore(storage, ExperienceConfig(), 3, empty)) == draw(pool)


def test_minibatches_follow_the_record(storage):
    pool = new_pool(storage)
    admit(pool, storage, REQUEST, live_groups("abc", reference=True))
    record = consume(pool, 1, draw(pool, minibatches=2, size=2))
    minibatches = pool.minibatches(record)
    assert [[g.group_id for g in part.groups] for part in minibatches] == [
        [g.group_id for g in part.groups] for part in record.minibatches
    ]
    for part, drawn in zip(minibatches, record.minibatches, strict=True):
        assert (part.lr, part.kl_coef) == (0.1, 0.0)
        for group, expected in zip(part.groups, drawn.groups, strict=True):
            assert group.weight == expected.weight
            assert group.advantages.tolist() == expected.advantages.tolist()
            assert len(group.reference) == 4


def test_a_step_is_consumed_once(storage):
    pool = new_pool(storage, max_uses=2)
    admit(pool, storage, REQUEST, live_groups("a"))
    record = consume(pool, 1, draw(pool))
    pool.consume(record, 0.0)
    assert drawn_ids(draw(pool)) == [["a"]]


def test_an_unknown_group_is_named(storage):
    with pytest.raises(ValueError, match="does not hold group 'x'"):
        new_pool(storage).training_groups(["x"])


def test_groups_of_the_step_in_progress_stay_although_others_push_them_out(storage):
    pool = new_pool(storage, buffer_size=4, max_uses=1)
    admit(pool, storage, REQUEST, live_groups("a"), step=1, now=1.0)
    record = consume(pool, 1, draw(pool))
    admit(pool, storage, "00000002-0000", live_groups("b"), step=2, now=2.0)
    admit(pool, storage, "00000002-0001", live_groups("c"), step=2, now=3.0)
    assert [group.group_id for group in pool.minibatches(record)[0].groups] == ["a"]


def test_metrics_by_hand(storage):
    pool = new_pool(storage, time_window=100.0, max_uses=2)
    write_segment(storage, REQUEST, [*live_groups("ab"), make_group("dead", [1.0] * 3), make_group("c", [None, 1.0])])
    pool.admit(REQUEST, 1, grpo, 0.0, skip_dead_groups=True)
    consume(pool, 1, draw(pool, minibatches=1, size=1, now=10.0), now=10.0)
    metrics = pool.metrics(60.0)
    assert metrics.pop("perf/pool_bytes") == storage.size(f"pool/{REQUEST}.parquet")
    assert metrics == {
        "experience/samples": 8.0,
        "experience/groups": 2.0,
        "experience/fresh_samples": 4.0,
        "experience/stale_share": 1.0,
        "experience/segments": 1.0,
        "experience/quarantined": 0.0,
        "experience/admitted": 11.0,
        "experience/dead_groups": 1.0,
        "experience/consumed": 4.0,
        "experience/reused_share": 0.0,
        "experience/mean_age": 10.0,
        "experience/effective_sampling_rate": 1.0,
        "experience/dropped/reward_abstained": 1.0,
        "experience/dropped/group_too_small": 1.0,
    }
