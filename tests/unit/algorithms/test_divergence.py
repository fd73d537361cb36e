import math

import pytest
import torch

from gyre_core.algorithms.divergence import kl_penalty


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
