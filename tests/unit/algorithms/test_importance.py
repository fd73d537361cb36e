import pytest
import torch

from gyre_core.algorithms.importance import importance_weights, within_bounds


def test_weights_are_the_ratio_of_probabilities():
    weights, supported = importance_weights(torch.tensor([0.2, 0.5, 0.9]).log(), torch.tensor([0.4, 0.5, 0.1]).log())
    assert weights.tolist() == pytest.approx([0.5, 1.0, 9.0])
    assert supported.all()


def test_equal_truncations_give_1_and_mixed_ones_the_surviving_mass():
    """Probabilities .5 .3 .2 at top_p 0.8: the first is -0.470 among the survivors and -0.693 in the whole."""
    engine = torch.tensor([0.5 / 0.8]).log()
    assert importance_weights(engine, engine)[0].item() == 1.0
    assert importance_weights(torch.tensor([0.5]).log(), engine)[0].item() == pytest.approx(0.8)


def test_tokens_outside_the_support_are_masked_but_broken_ones_are_not():
    weights, supported = importance_weights(torch.tensor([-torch.inf, torch.nan]), torch.tensor([-1.0, -1.0]))
    assert supported.tolist() == [False, True]
    assert weights[0] == 0.0
    assert weights[1].isnan()


def test_bounds_are_inclusive_and_let_broken_weights_through():
    weights = torch.tensor([0.49, 0.5, 1.0, 2.0, 2.01, torch.nan])
    assert within_bounds(weights, 0.5, 2.0).tolist() == [False, True, True, True, False, True]
