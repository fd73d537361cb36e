import math

import pytest
import torch

from gyre_core.algorithms.aggregation import aggregation_weights
from gyre_core.algorithms.policy_loss import TokenInputs, policy_loss
from gyre_core.config.sections import LearningConfig

NO_ENTROPY = torch.tensor(0.0)


def token_inputs(old, advantages, importance=None, reference=None, factors=None, sequences=None):
    count = len(old)
    return TokenInputs(
        old=torch.tensor(old),
        importance=torch.ones(count) if importance is None else torch.tensor(importance),
        advantages=torch.tensor(advantages),
        reference=None if reference is None else torch.tensor(reference),
        factors=torch.full((count,), 1.0 / count) if factors is None else factors,
        sequences=torch.arange(count) if sequences is None else sequences,
    )


def test_loss_and_metrics_by_hand():
    """Ratios 1.5 (clipped to 1.28), 0.5 (clipped to 0.8) and 1; weights 2, 1, 0.5; KL by k2 with coefficient 0.1."""
    old = [-2.0, -1.0, -3.0]
    new = torch.tensor([-2.0 + math.log(1.5), -1.0 + math.log(0.5), -3.0])
    reference = [float(new[0]) - 1.0, float(new[1]), float(new[2]) + 2.0]
    inputs = token_inputs(old, [1.0, -1.0, 4.0], [2.0, 1.0, 0.5], reference)
    loss, sums = policy_loss(new, torch.tensor([1.0, 2.0, 4.0]), inputs, LearningConfig(kl_estimator="k2"), kl_coef=0.1)
    surrogate = [-1.28, 0.8, -4.0]
    expected = (2 * surrogate[0] + surrogate[1] + 0.5 * surrogate[2] + 0.1 * (0.5 + 0.0 + 2.0)) / 3
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(
        {
            "clip_ratio/low_mean": 1,
            "clip_ratio/high_mean": 1,
            "clip_ratio/region_mean": 2,
            "policy_kl": (1.5 - 1 - math.log(1.5)) + (0.5 - 1 - math.log(0.5)),
            "kl": 2.5,
            "entropy": 7.0,
        },
        abs=1e-6,
    )


def test_on_policy_sequence_mean_of_zero_sum_advantages_is_zero():
    lengths = [1, 5, 2, 8]
    sequences = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    advantages = torch.tensor([1.5, -0.5, -0.5, -0.5])[sequences]
    old = torch.linspace(-3, -1, 16)
    factors = aggregation_weights(sequences, 4, "sequence", 8)
    inputs = token_inputs(old.tolist(), advantages.tolist(), factors=factors)
    loss, _ = policy_loss(old, NO_ENTROPY, inputs, LearningConfig(), 0.0)
    assert loss.item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_add_up(seed):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages, reference = torch.randn(4, 40, generator=generator).unbind()
    inputs = token_inputs(old.tolist(), advantages.tolist(), reference=reference.tolist())
    config = LearningConfig()
    whole, whole_sums = policy_loss(new, NO_ENTROPY, inputs, config, 0.3)
    order = torch.randperm(40, generator=generator)
    parts = [policy_loss(new[places], NO_ENTROPY, inputs.at(places), config, 0.3) for places in order.split(7)]
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), abs=1e-5), f"seed {seed}"
    for name, value in whole_sums.items():
        assert sum(sums[name] for _, sums in parts).item() == pytest.approx(value.item(), rel=1e-5), f"seed {seed}"


def test_entropy_bonus_lowers_the_loss_by_coefficient_times_the_mean():
    old = torch.tensor([-1.0, -2.0])
    entropy = torch.tensor([0.5, 1.5], requires_grad=True)
    inputs = token_inputs(old.tolist(), [1.0, 1.0])
    without, _ = policy_loss(old, entropy, inputs, LearningConfig(), 0.0)
    assert not without.requires_grad
    bonus, _ = policy_loss(old, entropy, inputs, LearningConfig(entropy_coef=0.1), 0.0)
    assert bonus.item() - without.item() == pytest.approx(-0.1 * 1.0)
    bonus.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05])


class TestSequenceRatio:
    """Two completions, of tokens 0 2 3 and of 1 4, in the order of a packed row."""

    SEQUENCES = torch.tensor([0, 1, 0, 0, 1])
    CHANGE = torch.tensor([0.3, -0.2, 0.1, -0.1, -0.4])
    ADVANTAGES = torch.tensor([2.0, -1.0, 2.0, 2.0, -1.0])
    CONFIG = LearningConfig(policy_ratio="sequence", clip_low=0.2, clip_high=0.28)

    def inputs(self):
        factors = aggregation_weights(self.SEQUENCES, 2, "sequence", 8)
        return token_inputs([-1.0] * 5, self.ADVANTAGES.tolist(), factors=factors, sequences=self.SEQUENCES)

    def test_loss_by_hand(self):
        """Mean log-ratios 0.1 and -0.3: ratios 1.105, and 0.741 which is clipped to 0.8."""
        loss, sums = policy_loss(-1.0 + self.CHANGE, NO_ENTROPY, self.inputs(), self.CONFIG, 0.0)
        assert loss.item() == pytest.approx((-math.exp(0.1) * 2.0 + 0.8) / 2, abs=1e-6)
        assert sums["clip_ratio/low_mean"].item() == 2
        assert sums["clip_ratio/high_mean"].item() == 0

    def test_gradient_is_the_papers(self):
        """Zheng et al., 2025, equation 10: s A / length at each token of a completion that is not clipped."""
        new = (-1.0 + self.CHANGE).requires_grad_()
        policy_loss(new, NO_ENTROPY, self.inputs(), self.CONFIG, 0.0)[0].backward()
        at_each = -math.exp(0.1) * 2.0 / 3 / 2
        assert new.grad.tolist() == pytest.approx([at_each, 0.0, at_each, at_each, 0.0], abs=1e-6)

    def test_one_token_completions_are_those_of_the_token_ratio(self):
        inputs = token_inputs([-1.0] * 5, self.ADVANTAGES.tolist())
        losses = [
            policy_loss(-1.0 + self.CHANGE, NO_ENTROPY, inputs, LearningConfig(policy_ratio=ratio), 0.0)[0].item()
            for ratio in ("token", "sequence")
        ]
        assert losses[0] == pytest.approx(losses[1])
