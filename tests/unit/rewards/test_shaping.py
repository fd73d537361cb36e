"""Shaping of rewards, by values worked out by hand and by laws."""

import json
import math

import numpy as np
import pytest

from gyre_core.config.sections import ShapingConfig
from gyre_core.rewards.shaping import CLIP_MIN_COUNT, RewardShaper, RunningStatistics
from gyre_core.types import Completion, PolicyVersion, Prompt, Rollout, RolloutGroup, Score

VERSION = PolicyVersion(1, 2)
MAX_TOKENS = 10


def group(rewards, lengths=None, source="a"):
    """A group of completions with these rewards, None for a failed one; `lengths` in tokens, by default 1."""
    columns = {} if source is None else {"data_source": source}
    prompt = Prompt("p", "text", "text", np.arange(2, dtype=np.int32), columns)
    rollouts = []
    for index, (reward, length) in enumerate(zip(rewards, lengths or [1] * len(rewards), strict=True)):
        ids, zeros = np.zeros(length, np.int32), np.zeros(length, np.float32)
        completion = Completion("g", index, ids, zeros, "", "stop", VERSION, 0.0, 1.0)
        score = Score({}, math.nan, "failed", "broken") if reward is None else Score({}, reward, "scored")
        rollouts.append(Rollout(completion, score, None))
    return RolloutGroup("g", prompt, 1, VERSION, tuple(rollouts))


def shaper(**settings):
    return RewardShaper(ShapingConfig(**settings), MAX_TOKENS)


def shape(shaper, *groups):
    return [rewards.tolist() for rewards in shaper.shape(groups)]


def random_calls(seed, calls=6):
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return [
        [
            group(
                [None if rng.random() < 0.1 else float(rng.normal(3, 2)) for _ in range(size)],
                rng.integers(1, MAX_TOKENS + 1, size).tolist(),
                str(rng.integers(3)),
            )
            for size in rng.integers(2, 30, 4).tolist()
        ]
        for _ in range(calls)
    ]


EVERYTHING = {
    "normalize": "standardize",
    "clip_deviations": 1.5,
    "spread_target": 0.7,
    "overlong_buffer": 4,
    "length_penalty": 0.2,
}


def test_nothing_is_on_by_default():
    rewarder = shaper()
    assert shape(rewarder, group([1.0, -2.0], [9, 10])) == [[1.0, -2.0]]
    assert rewarder.metrics() == {}


def test_running_statistics_equal_those_of_all_values_at_once():
    seed = 7
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    values = rng.normal(1e4, 1.0, 500)
    statistics = RunningStatistics()
    for part in np.split(values, np.sort(rng.integers(0, 500, 20))):
        statistics = statistics.merge(part)
    assert statistics.count == 500
    assert statistics.mean == pytest.approx(values.mean(), rel=1e-12)
    assert statistics.deviation == pytest.approx(values.std(ddof=1), rel=1e-9)
    assert RunningStatistics().deviation == 0.0
    assert RunningStatistics().merge(np.array([0.1] * 7)).deviation == 0.0


def test_worked_values_of_the_normalisation():
    # 1, 3, 5: mean 3, deviation 2.
    assert shape(shaper(normalize="scale"), group([1.0, 3.0]), group([5.0])) == [[0.5, 1.5], [2.5]]
    standardized = shaper(normalize="standardize")
    assert shape(standardized, group([1.0, 3.0]), group([5.0])) == [[-1.0, 0.0], [1.0]]
    # With 7 and 9: mean 5, deviation sqrt(40 / 4).
    assert shape(standardized, group([7.0, 9.0])) == [pytest.approx([2 / math.sqrt(10), 4 / math.sqrt(10)])]


def test_rewards_that_are_all_equal_so_far_are_not_divided():
    assert shape(shaper(normalize="scale"), group([2.0, 2.0])) == [[2.0, 2.0]]
    assert shape(shaper(normalize="standardize"), group([2.0])) == [[0.0]]


def test_sources_have_statistics_of_their_own():
    both, alone = shaper(normalize="standardize"), shaper(normalize="standardize")
    first, second = group([0.0, 1.0, 5.0], source="a"), group([100.0, 300.0], source="b")
    assert shape(both, first, second)[0] == shape(alone, first)[0]
    assert shape(both, second, first)[1] == shape(alone, first)[0]
    one = shaper(normalize="standardize", source_column="nothing")
    assert shape(one, group([1.0, 3.0], source="a"), group([5.0], source=None)) == [[-1.0, 0.0], [1.0]]


def test_outliers_are_moved_once_enough_rewards_were_seen():
    # 32 zeros and 31 twos and one hundred.
    rewards = [0.0] * 32 + [2.0] * 31
    few = shaper(clip_deviations=3.0)
    assert shape(few, group([*rewards[1:], 100.0]))[0][-1] == 100.0
    enough = shaper(clip_deviations=3.0)
    [shaped] = shape(enough, group([*rewards, 100.0]))
    values = np.array([*rewards, 100.0])
    assert len(values) == CLIP_MIN_COUNT
    assert shaped[:-1] == rewards
    assert shaped[-1] == pytest.approx(values.mean() + 3 * values.std(ddof=1))
    assert shaped[-1] < 100
    assert enough.metrics() == {
        "reward/outlier_share": 1 / 64,
        "reward/shaped_mean": pytest.approx((62 + shaped[-1]) / 64),
    }


def test_worked_values_of_the_penalties():
    # DAPO's eq. 13 at 10 tokens with a buffer of 4: 0 up to 6 tokens, then a quarter more for each.
    lengths = [1, 6, 7, 8, 10]
    soft = shaper(overlong_buffer=4, overlong_penalty=2.0)
    assert shape(soft, group([1.0] * 5, lengths)) == [[1.0, 1.0, 0.5, 0.0, -1.0]]
    assert soft.metrics() == {"reward/length_penalty": 0.7, "reward/shaped_mean": pytest.approx(0.3)}
    assert shape(shaper(length_penalty=0.5), group([1.0] * 5, lengths)) == [[0.95, 0.7, 0.65, 0.6, 0.5]]
    both = shaper(length_penalty=0.5, overlong_buffer=4, overlong_penalty=2.0)
    assert shape(both, group([1.0] * 5, lengths)) == [pytest.approx([0.95, 0.7, 0.15, -0.4, -1.5])]


def test_penalties_come_after_the_normalisation():
    rewarder = shaper(normalize="standardize", overlong_buffer=4)
    assert shape(rewarder, group([1.0, 3.0, 5.0], [10, 1, 8])) == [[-2.0, 0.0, 0.5]]


def test_worked_values_of_the_dynamic_scaling():
    rewarder = shaper(spread_target=1.0)
    # Pooled variance within groups: (2 + 18) / (1 + 1) = 10.
    assert shape(rewarder, group([0.0, 2.0]), group([4.0, 10.0])) == [
        pytest.approx([0.0, 2 / math.sqrt(10)]),
        pytest.approx([4 / math.sqrt(10), 10 / math.sqrt(10)]),
    ]
    assert rewarder.metrics()["reward/scale"] == pytest.approx(1 / math.sqrt(10))
    # The call before weighs 0.9: (0.9 x 20 + 8) / (0.9 x 2 + 1).
    assert shape(rewarder, group([0.0, 4.0])) == [pytest.approx([0.0, 4 / math.sqrt(26 / 2.8)])]


def test_metrics_are_those_of_all_calls_since_they_were_last_asked_for():
    rewarder = shaper(length_penalty=1.0)
    shape(rewarder, group([1.0, 1.0], [1, 2]))
    shape(rewarder, group([2.0, None], [3, 9]))
    assert rewarder.metrics() == {
        "reward/length_penalty": pytest.approx(0.2),
        "reward/shaped_mean": pytest.approx((0.9 + 0.8 + 1.7) / 3),
    }
    assert rewarder.metrics() == {}


def test_the_factor_of_the_scaling_is_bounded_and_needs_a_spread():
    assert shape(shaper(spread_target=1.0), group([0.0, 1e-3])) == [[0.0, 1e-2]]
    assert shape(shaper(spread_target=1.0), group([0.0, 1e3])) == [[0.0, 1e2]]
    assert shape(shaper(spread_target=1.0), group([5.0, 5.0]), group([7.0])) == [[5.0, 5.0], [7.0]]


@pytest.mark.parametrize("seed", range(5))
def test_standardised_rewards_do_not_depend_on_the_unit_or_zero_of_rewards(seed):
    calls = random_calls(seed)
    plain, moved = shaper(**EVERYTHING), shaper(**EVERYTHING)

    def affine(one):
        rewards = [None if r.score.status == "failed" else 50 * r.score.reward - 7 for r in one.rollouts]
        lengths = [len(rollout.completion.token_ids) for rollout in one.rollouts]
        return group(rewards, lengths, one.prompt.columns["data_source"])

    for groups in calls:
        for first, second in zip(plain.shape(groups), moved.shape([affine(one) for one in groups]), strict=True):
            np.testing.assert_allclose(first, second, rtol=1e-9, atol=1e-9)


def test_rows_without_a_score_are_neither_observed_nor_shaped():
    with_failures, without = shaper(**EVERYTHING), shaper(**EVERYTHING)
    for rewards in ([1.0, None, 3.0], [None, None], [2.0, 7.0, None]):
        [shaped] = with_failures.shape([group(rewards)])
        kept = [reward for reward in rewards if reward is not None]
        assert [math.isnan(value) for value in shaped] == [reward is None for reward in rewards]
        np.testing.assert_array_equal(shaped[~np.isnan(shaped)], *without.shape([group(kept)]))
        assert with_failures.state() == without.state()
        assert with_failures.metrics() == without.metrics()
    assert shaper(**EVERYTHING).shape([]) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_state_that_was_stored_goes_on_as_if_undisturbed(seed):
    calls = random_calls(seed)
    undisturbed = shaper(**EVERYTHING)
    for number, groups in enumerate(calls):
        resumed = shaper(**EVERYTHING)
        resumed.load_state(json.loads(json.dumps(undisturbed.state(), allow_nan=False)))
        expected = undisturbed.shape(groups)
        for first, second in zip(resumed.shape(groups), expected, strict=True):
            np.testing.assert_array_equal(first, second)
        assert resumed.state() == undisturbed.state(), f"call {number}"
        assert resumed.metrics() == undisturbed.metrics()


def test_going_back_keeps_what_earlier_calls_add_to_the_metrics():
    one, other = [group([1.0, 3.0], [2, 4])], [group([5.0, 9.0], [8, 10])]
    disturbed = shaper(length_penalty=1.0)
    disturbed.shape(one)
    before = disturbed.state()
    disturbed.shape(other)
    disturbed.load_state(before)
    assert disturbed.metrics() == pytest.approx({"reward/length_penalty": 0.3, "reward/shaped_mean": 1.7})


def test_without_a_step_rewards_stay_as_they_are_and_nothing_is_kept():
    plain = shaper()
    assert shape(plain, group([1.0, 0.5]), group([7.0, -2.0])) == [[1.0, 0.5], [7.0, -2.0]]
    assert plain.state() == shaper().state()
    assert plain.metrics() == {}
