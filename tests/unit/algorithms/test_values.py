import numpy as np
import pytest
import torch

from gyre_core.algorithms.values import ValueInputs, explained_variance, value_loss


def one(old, returns, factor=1.0):
    return ValueInputs(torch.tensor([old]), torch.tensor([returns]), torch.tensor([factor]))


@pytest.mark.parametrize(
    ("value", "clip", "squared_error", "gradient", "clipped"),
    [
        (5.0, 0.2, 77.44, 0.0, 1),  # moved far enough towards the return: (1.2 - 10)^2
        (5.0, 0.0, 25.0, -5.0, 0),  # clipping is off
        (1.1, 0.2, 79.21, -8.9, 0),  # within the bounds
        (-3.0, 0.2, 169.0, -13.0, 0),  # moved away: the unclipped error is larger and pulls it back
    ],
)
def test_value_clipping_by_hand(value, clip, squared_error, gradient, clipped):
    values = torch.tensor([value], requires_grad=True)
    loss, sums = value_loss(values, one(old=1.0, returns=10.0), clip)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * squared_error, rel=1e-6)
    assert values.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert sums["critic/clip_ratio"].item() == clipped
    assert sums["critic/value_loss"].item() == pytest.approx(0.5 * squared_error, rel=1e-6)


def test_a_value_compared_with_itself_would_never_be_clipped():
    loss, _ = value_loss(torch.tensor([5.0]), one(old=5.0, returns=10.0), 0.2)
    assert 2 * loss.item() == pytest.approx(25.0)


def test_factors_weigh_the_tokens_and_micro_batches_add_up():
    inputs = ValueInputs(torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 0.25, 0.25, 0.0]))
    whole, _ = value_loss(torch.zeros(4), inputs, 0.0)
    assert whole.item() == pytest.approx(0.5 * (0.5 * 1 + 0.25 * 4 + 0.25 * 9))
    parts = [value_loss(torch.zeros(2), inputs.at(torch.tensor(at)), 0.0)[0].item() for at in ([3, 0], [1, 2])]
    assert sum(parts) == pytest.approx(whole.item())


def test_explained_variance_by_hand():
    returns = np.array([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(3, 5.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.ones(3)) is None
