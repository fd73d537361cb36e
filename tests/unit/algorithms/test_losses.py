import math

import pytest
import torch

from gyre_core.algorithms.losses import (
    aggregation_weights,
    clipped_surrogate,
    importance_weights,
    kl_penalty,
    log_ratio,
)


def aggregate(losses, sequences, count, mode, max_tokens=8):
    weights = aggregation_weights(torch.tensor(sequences), count, mode, max_tokens)
    return float((weights * torch.tensor(losses)).sum())


class TestAggregation:
    @pytest.mark.parametrize(("mode", "expected"), [("token", 1.4), ("sequence", 2.0), ("constant", 0.4375)])
    def test_modes_differ_as_worked_out(self, mode, expected):
        assert aggregate([1.0, 1, 1, 1, 3], [0, 0, 0, 0, 1], 2, mode) == pytest.approx(expected)
        assert aggregate([3.0, 1, 1, 1, 1], [0, 1, 1, 1, 1], 2, mode) == pytest.approx(expected)

    def test_token_mean_counts_the_whole_minibatch(self):
        losses, sequences = [1.0] * 10 + [4.0] * 2, [0] * 10 + [1] * 2
        assert aggregate(losses, sequences, 2, "token") == pytest.approx(1.5)
        assert aggregate(losses[:10], sequences[:10], 2, "token") == pytest.approx(1.0)

    @pytest.mark.parametrize("mode", ["token", "sequence"])
    def test_a_sequence_without_trained_tokens_does_not_count(self, mode):
        assert aggregate([1.0] * 10, [0] * 10, 2, mode) == pytest.approx(1.0)

    @pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
    def test_nothing_to_train_on_is_finite(self, mode):
        assert aggregation_weights(torch.tensor([], dtype=torch.long), 2, mode, 8).sum() == 0.0


class TestClippedSurrogate:
    @pytest.mark.parametrize(
        ("ratio", "advantage", "loss", "gradient"),
        [
            (1.0, 2.0, -2.0, -2.0),
            (1.2, 1.0, -1.2, -1.0),
            (1.5, 1.0, -1.28, 0.0),  # rewarded enough: the upper bound holds
            (0.5, 1.0, -0.5, -1.0),
            (0.5, -1.0, 0.8, 0.0),  # punished enough: the lower bound holds
            (1.5, -1.0, 1.5, 1.0),
            (1.5, 0.0, 0.0, 0.0),
        ],
    )
    def test_value_and_gradient(self, ratio, advantage, loss, gradient):
        ratios = torch.tensor([ratio], requires_grad=True)
        result = clipped_surrogate(ratios, torch.tensor([advantage]), 0.2, 0.28)
        result.sum().backward()
        assert result.item() == pytest.approx(loss)
        assert ratios.grad.item() == pytest.approx(gradient)

    def test_an_immense_ratio_leaves_a_finite_gradient(self):
        new = torch.tensor([0.0, 0.0], requires_grad=True)
        ratio = log_ratio(new, torch.tensor([-500.0, 500.0])).exp()
        clipped_surrogate(ratio, torch.tensor([1.0, -1.0]), 0.2, 0.28).sum().backward()
        assert torch.isfinite(new.grad).all()


class TestKL:
    """A policy that takes the first of two outcomes with probability 0.6, and a reference with 0.5, enumerated."""

    @pytest.mark.parametrize(("estimator", "gradient"), [("k1", 0.0), ("k2", 0.0973), ("k3", 0.1)])
    def test_gradient_as_a_loss(self, estimator, gradient):
        logit = torch.tensor(math.log(0.6 / 0.4), dtype=torch.float64, requires_grad=True)
        outcomes = torch.stack([torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)])
        reference = torch.full((2,), math.log(0.5), dtype=torch.float64)
        (outcomes.detach().exp() * kl_penalty(outcomes, reference, estimator)).sum().backward()
        assert logit.grad.item() == pytest.approx(gradient, abs=5e-5)

    @pytest.mark.parametrize("estimator", ["k1", "k3"])
    def test_unbiased_estimators_have_the_divergence_as_mean(self, estimator):
        policy = torch.tensor([0.6, 0.4], dtype=torch.float64)
        reference = torch.tensor([0.5, 0.5], dtype=torch.float64)
        mean = (policy * kl_penalty(policy.log(), reference.log(), estimator)).sum()
        assert mean.item() == pytest.approx(0.0201, abs=5e-5)

    def test_k3_is_not_reversed(self):
        value = kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.2]), "k3").item()
        assert value == pytest.approx(0.01873, abs=1e-5)
        assert kl_penalty(torch.tensor([-1.2]), torch.tensor([-1.0]), "k3").item() == pytest.approx(0.02140, abs=1e-5)

    @pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
    def test_equal_policies_have_none(self, estimator):
        same = torch.linspace(-20, -1e-3, 50)
        assert kl_penalty(same, same, estimator).abs().max() == 0.0


class TestImportanceWeights:
    def test_the_ratio_is_capped(self):
        weights, supported = importance_weights(
            torch.tensor([0.2, 0.5, 0.9]).log(), torch.tensor([0.4, 0.5, 0.1]).log(), cap=2.0
        )
        assert weights.tolist() == pytest.approx([0.5, 1.0, 2.0])
        assert supported.all()

    def test_equal_truncations_give_1_and_mixed_ones_the_surviving_mass(self):
        """Probabilities .5 .3 .2 at top_p 0.8: the first is -0.470 among the survivors and -0.693 in the whole."""
        engine = torch.tensor([0.5 / 0.8]).log()
        assert importance_weights(engine, engine, 2.0)[0].item() == 1.0
        assert importance_weights(torch.tensor([0.5]).log(), engine, 2.0)[0].item() == pytest.approx(0.8)

    def test_tokens_outside_the_support_are_masked_but_broken_ones_are_not(self):
        weights, supported = importance_weights(torch.tensor([-torch.inf, torch.nan]), torch.tensor([-1.0, -1.0]), 2.0)
        assert supported.tolist() == [False, True]
        assert weights[0] == 0.0
        assert weights[1].isnan()
