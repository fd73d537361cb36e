import numpy as np
import pytest

from gyre_core.algorithms.gae import generalised_advantages, token_rewards


def test_score_lies_on_the_last_token_and_penalties_on_their_own():
    """`t0 t1 eos` and two pads: a completion has no pads, so the score comes at index 2."""
    assert token_rewards(5.0, np.zeros(3)).tolist() == [0.0, 0.0, 5.0]
    assert token_rewards(5.0, np.array([0.5, -0.25, 1.0])).tolist() == [-0.5, 0.25, 4.0]


def test_two_tokens_by_hand():
    """The case of two own tokens before three of a tool: 0.95 and 1, where trailing steps would give 0.815, 0.857."""
    advantages = generalised_advantages(np.array([0.0, 1.0]), np.zeros(2), 0.0, gamma=1.0, decay=0.95)
    assert advantages.tolist() == pytest.approx([0.95, 1.0])
    trailing = generalised_advantages(np.array([0.0, 0, 0, 0, 1]), np.zeros(5), 0.0, gamma=1.0, decay=0.95)
    assert trailing[:2].tolist() == pytest.approx([0.8145, 0.8574], abs=1e-4)


def test_values_discount_and_last_value_by_hand():
    """delta = (1 + .5*4 - 2, 3 + .5*8 - 4) = (1, 3); A = (1 + .25*3, 3) at gamma decay = .5 * .5."""
    advantages = generalised_advantages(np.array([1.0, 3.0]), np.array([2.0, 4.0]), 8.0, gamma=0.5, decay=0.5)
    assert advantages.tolist() == pytest.approx([1.75, 3.0])


@pytest.mark.parametrize("seed", range(5))
def test_against_the_sum_of_the_paper_and_its_two_ends(seed):
    rng = np.random.default_rng(seed)
    rewards, values, last = rng.normal(size=9), rng.normal(size=9), float(rng.normal())
    following = np.append(values[1:], last)

    def expected(gamma, decay):
        deltas = rewards + gamma * following - values
        return [sum((gamma * decay) ** (k - t) * deltas[k] for k in range(t, 9)) for t in range(9)]

    for gamma, decay in ((0.9, 0.7), (1.0, 0.95), (0.99, 0.0), (0.99, 1.0)):
        result = generalised_advantages(rewards, values, last, gamma, decay)
        np.testing.assert_allclose(result, expected(gamma, decay), err_msg=f"seed {seed}")
    # decay 1: discounted return minus value; decay 0: the temporal difference.
    returns = [sum(0.9 ** (k - t) * rewards[k] for k in range(t, 9)) + 0.9 ** (9 - t) * last for t in range(9)]
    np.testing.assert_allclose(generalised_advantages(rewards, values, last, 0.9, 1.0), np.array(returns) - values)
    np.testing.assert_allclose(
        generalised_advantages(rewards, values, last, 0.9, 0.0), rewards + 0.9 * following - values
    )
