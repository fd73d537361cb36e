import pytest
import torch

from gyre_core.algorithms.ratios import clipped_surrogate, log_ratio, sequence_means


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


class TestSequenceMeans:
    def test_each_token_gets_its_sequences_mean_whatever_the_order(self):
        values = torch.tensor([1.0, 10.0, 2.0, 6.0, 20.0])
        sequences = torch.tensor([7, 3, 7, 7, 3])
        assert sequence_means(values, sequences).tolist() == [3.0, 15.0, 3.0, 3.0, 15.0]

    def test_gradient_goes_through_the_mean(self):
        """Weights 1, 2, 4 on the tokens of one sequence: each value gets their sum over 3."""
        values = torch.tensor([0.5, -1.0, 2.0, 3.0], requires_grad=True)
        means = sequence_means(values, torch.tensor([0, 0, 0, 1]))
        (means * torch.tensor([1.0, 2.0, 4.0, 5.0])).sum().backward()
        assert values.grad.tolist() == pytest.approx([7 / 3, 7 / 3, 7 / 3, 5.0])
