"""When checkpoints are written, in full or as increments, and which stay: worked out by hand."""

import pytest

from gyre_core.checkpoint.cadence import SinceCheckpoint, is_due, is_full
from gyre_core.checkpoint.manifest import CheckpointManifest, checkpoint_name
from gyre_core.checkpoint.retention import Retention
from gyre_core.config.sections import CheckpointConfig


def since(**changes):
    facts = {
        "seconds": 10.0,
        "steps": 3,
        "has_base": True,
        "replay_seconds": 5.0,
        "delta_share": 0.1,
        "untried": 0,
        "better": False,
    }
    return SinceCheckpoint(**(facts | changes))


@pytest.mark.parametrize(
    ("settings", "facts", "due"),
    [
        ({"interval": 11}, {}, False),
        ({"interval": 10}, {}, True),
        ({"interval": 11, "every": 4}, {}, False),
        ({"interval": 11, "every": 3}, {}, True),
        ({"interval": 10, "every": 3}, {"steps": 0}, False),
        ({"interval": 11}, {"better": True}, False),
        ({"interval": 11, "keep_best": 1}, {"better": True}, True),
        ({"interval": 11, "keep_best": 1}, {"better": False}, False),
    ],
)
def test_a_checkpoint_is_due_by_time_by_steps_or_for_a_better_policy(settings, facts, due):
    assert is_due(since(**facts), CheckpointConfig(**settings)) is due


@pytest.mark.parametrize(
    ("settings", "facts", "step", "full"),
    [
        ({"incremental": False}, {}, 5, True),
        ({}, {}, 5, False),
        ({}, {"has_base": False}, 5, True),
        ({}, {}, 20, True),
        ({"replay_budget": 4.9}, {}, 5, True),
        ({"replay_budget": 5.0}, {}, 5, False),
        ({}, {"delta_share": 0.51}, 5, True),
        ({}, {"delta_share": 0.0, "untried": 1}, 5, True),
        ({"keep_every": 5}, {}, 5, True),
        ({"keep_every": 5}, {}, 6, False),
        ({"keep_best": 1}, {"better": True}, 5, True),
        ({}, {"better": True}, 5, False),
    ],
)
def test_an_increment_is_written_unless_there_is_a_reason_for_a_full_one(settings, facts, step, full):
    config = CheckpointConfig(**({"incremental": True} | settings))
    assert is_full(since(**facts), config, step, last_step=20) is full


def manifest(step, epoch=1, base=None, score=None):
    facts = {"step": step, "epoch": epoch, "base": base and checkpoint_name(base, epoch), "score": score}
    return CheckpointManifest(**facts, objects={}, created_at=0.0)


def kept(retention, *manifests):
    return sorted(retention.kept(manifests))


def test_the_newest_stay_with_what_they_build_on():
    checkpoints = [manifest(1), manifest(2, base=1), manifest(3), manifest(4, base=3), manifest(5, base=3)]
    assert kept(Retention(1), *checkpoints) == ["00000003-0001", "00000005-0001"]
    assert kept(Retention(2), *checkpoints) == ["00000003-0001", "00000004-0001", "00000005-0001"]
    assert kept(Retention(4), *checkpoints) == [checkpoint_name(step, 1) for step in (1, 2, 3, 4, 5)]


def test_the_best_and_every_nth_stay_for_good_if_they_are_full():
    checkpoints = [
        manifest(10, score=0.5),
        manifest(20, score=0.9),
        manifest(25, base=20, score=0.95),
        manifest(30, score=0.7),
        manifest(40),
    ]
    assert kept(Retention(1, keep_best=1), *checkpoints) == ["00000020-0001", "00000040-0001"]
    assert kept(Retention(1, keep_best=2), *checkpoints) == ["00000020-0001", "00000030-0001", "00000040-0001"]
    assert kept(Retention(1, keep_every=15), *checkpoints) == ["00000030-0001", "00000040-0001"]


def test_a_branch_that_was_given_up_keeps_no_best_and_the_epoch_decides_what_is_newest():
    checkpoints = [manifest(10, score=0.1), manifest(20, score=0.9), manifest(15, epoch=2, score=0.5)]
    assert kept(Retention(1), *checkpoints) == ["00000015-0002"]
    assert kept(Retention(1, keep_best=2), *checkpoints) == ["00000010-0001", "00000015-0002"]
