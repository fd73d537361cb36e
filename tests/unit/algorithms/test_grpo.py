import math

import pytest
import torch

from gyre_core.algorithms.grpo import TokenInputs, grpo_loss
from gyre_core.algorithms.losses import aggregation_weights
from gyre_core.config.sections import LearningConfig


def token_inputs(old, advantages, importance=None, reference=None, factors=None):
    count = len(old)
    return TokenInputs(
        old=torch.tensor(old),
        importance=torch.ones(count) if importance is None else torch.tensor(importance),
        advantages=torch.tensor(advantages),
        reference=None if reference is None else torch.tensor(reference),
        factors=torch.full((count,), 1.0 / count) if factors is None else factors,
    )


def test_loss_and_metrics_by_hand():
    """Ratios 1.5 (clipped to 1.28), 0.5 (clipped to 0.8) and 1; weights 2, 1, 0.5; KL by k2 with coefficient 0.1."""
    old = [-2.0, -1.0, -3.0]
    new = torch.tensor([-2.0 + math.log(1.5), -1.0 + math.log(0.5), -3.0])
    reference = [float(new[0]) - 1.0, float(new[1]), float(new[2]) + 2.0]
    inputs = token_inputs(old, [1.0, -1.0, 4.0], [2.0, 1.0, 0.5], reference)
    loss, sums = grpo_loss(new, inputs, LearningConfig(kl_estimator="k2"), kl_coef=0.1)
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
    loss, _ = grpo_loss(old, inputs, LearningConfig(), 0.0)
    assert loss.item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_add_up(seed):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages, reference = torch.randn(4, 40, generator=generator).unbind()
    inputs = token_inputs(old.tolist(), advantages.tolist(), reference=reference.tolist())
    config = LearningConfig()
    whole, whole_sums = grpo_loss(new, inputs, config, 0.3)
    order = torch.randperm(40, generator=generator)
    parts = [grpo_loss(new[places], inputs.at(places), config, 0.3) for places in order.split(7)]
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), abs=1e-5), f"seed {seed}"
    for name, value in whole_sums.items():
        assert sum(sums[name] for _, sums in parts).item() == pytest.approx(value.item(), rel=1e-5), f"seed {seed}"
