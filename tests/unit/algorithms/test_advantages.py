import numpy as np
import pytest

from gyre_core.algorithms.advantages import (
    are_equal,
    for_each_group,
    group_advantages,
    leave_one_out_advantages,
    spreads,
)

NAN = np.nan


def advantages(*rewards, scale=True):
    return group_advantages(np.array(rewards, dtype=np.float64), scale).tolist()


def test_values_worked_out_by_hand():
    assert advantages(1, 0, 0, 0) == [1.5, -0.5, -0.5, -0.5]
    assert advantages(1, 0, 0, 0, scale=False) == [0.75, -0.25, -0.25, -0.25]


def test_a_row_without_score_stays_out_of_the_baseline():
    root = 3**-0.5
    assert advantages(1, NAN, 0, 1) == pytest.approx([root, 0, -2 * root, root], abs=1e-7)
    assert advantages(1, NAN, 0, 1)[1] == 0.0


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize(
    "rewards", [(1, 1, 1, 1), (0.3, 0.3, 0.3), (0.1 + 0.2, 0.3, 0.3), (0, 0), (NAN, NAN), (NAN, 5), (-7, NAN, -7)]
)
def test_no_variance_is_exactly_zero(rewards, scale):
    assert advantages(*rewards, scale=scale) == [0.0] * len(rewards)


def test_groups_do_not_mix():
    """One prompt twice, all wrong and all right: merged they would give -0.935 and 0.935."""
    assert advantages(0, 0, 0, 0) == [0.0] * 4
    assert advantages(1, 1, 1, 1) == [0.0] * 4
    assert advantages(0, 0, 0, 0, 1, 1, 1, 1)[0] == pytest.approx(-0.935, abs=1e-3)


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match=r"rollout\.samples_per_prompt"):
        advantages(1)


@pytest.mark.parametrize("seed", range(20))
def test_scaled_advantages_have_mean_0_and_deviation_1_and_ignore_shift_and_scale(seed):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=rng.integers(2, 40))
    result = group_advantages(rewards, scale=True)
    assert result.dtype == np.float32
    assert result.mean() == pytest.approx(0, abs=1e-6), f"seed {seed}"
    assert result.std(ddof=1) == pytest.approx(1, abs=1e-5), f"seed {seed}"
    np.testing.assert_allclose(group_advantages(3 * rewards + 100, scale=True), result, atol=1e-5)
    order = rng.permutation(len(rewards))
    np.testing.assert_allclose(group_advantages(rewards[order], scale=True), result[order], atol=1e-6)


class TestLeaveOneOut:
    def test_the_others_are_the_baseline(self):
        """Rewards 1 0 0 2: the others' means are 2/3, 1, 1, 1/3."""
        result = leave_one_out_advantages(np.array([1.0, 0, 0, 2])).tolist()
        assert result == pytest.approx([1 / 3, -1, -1, 5 / 3], abs=1e-7)

    def test_a_row_without_score_is_no_ones_baseline(self):
        assert leave_one_out_advantages(np.array([3.0, NAN, 1.0])).tolist() == [2.0, 0.0, -2.0]
        assert leave_one_out_advantages(np.array([3.0, NAN])).tolist() == [0.0, 0.0]

    def test_equal_rewards_are_exactly_zero(self):
        assert leave_one_out_advantages(np.array([0.3, 0.1 + 0.2, 0.3])).tolist() == [0.0] * 3

    @pytest.mark.parametrize("seed", range(5))
    def test_it_is_the_centred_reward_times_n_over_n_minus_1(self, seed):
        rng = np.random.default_rng(seed)
        rewards = rng.normal(size=rng.integers(2, 20))
        count = len(rewards)
        centred = group_advantages(rewards, scale=False)
        np.testing.assert_allclose(
            leave_one_out_advantages(rewards), count / (count - 1) * centred, rtol=1e-5, err_msg=f"seed {seed}"
        )
        others = [np.delete(rewards, index).mean() for index in range(count)]
        np.testing.assert_allclose(leave_one_out_advantages(rewards), rewards - others, atol=1e-6)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("function", [group_advantages, leave_one_out_advantages, are_equal, spreads])
def test_groups_together_are_what_each_is_alone_bit_for_bit(function, seed):
    """Sizes beyond 8 and 128, from where on numpy sums in another order; rows without a score, and equal rewards."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    sizes = rng.choice([2, 3, 8, 9, 33, 130], 40)
    groups = [rng.normal(size=size) if rng.random() < 0.8 else np.full(size, 0.3) for size in sizes]
    if function in (group_advantages, leave_one_out_advantages):
        groups = [np.where(rng.random(len(group)) < 0.1, NAN, group) for group in groups]
    settings = {"scale": bool(seed % 2)} if function is group_advantages else {}
    together = for_each_group(lambda rewards: function(rewards, **settings), groups)
    alone = [function(group, **settings) for group in groups]
    assert [np.asarray(one).tobytes() for one in together] == [np.asarray(one).tobytes() for one in alone]


def test_a_spread_is_the_standard_deviation_and_0_for_equal_rewards():
    assert spreads(np.array([[1.0, 0, 0, 0], [0.3, 0.1 + 0.2, 0.3, 0.3]])).tolist() == [0.5, 0.0]
