"""The critic's loss, and how well its values explain the returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ValueInputs:
    """What the critic's loss needs at each trained token; all `[tokens]` float32."""

    old: torch.Tensor
    """Values at the start of the step."""
    returns: torch.Tensor
    """What the values should be."""
    factors: torch.Tensor
    """The share of each token's loss in the loss of the minibatch, as in the policy's."""

    def at(self, places: torch.Tensor) -> ValueInputs:
        """The inputs of the tokens at `places`, `[places]` int64."""
        return ValueInputs(self.old[places], self.returns[places], self.factors[places])


def value_loss(values: torch.Tensor, inputs: ValueInputs, clip: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The micro-batch's share of the critic's loss, a scalar, and sums over its tokens for the metrics.

    A token's loss is half the larger one of the squared errors of V and of V held within `clip` of its old value
    (Schulman et al., 'Proximal policy optimization', 2017, as in OpenAI's baselines); `clip` 0 takes the first.
    """
    errors = (values - inputs.returns).square()
    clipped = torch.zeros_like(errors, dtype=torch.bool)
    if clip > 0.0:
        moves = values - inputs.old
        bounded = (inputs.old + moves.clamp(-clip, clip) - inputs.returns).square()
        clipped = (moves.abs() > clip) & (bounded > errors)
        errors = torch.maximum(errors, bounded)
    losses = 0.5 * errors
    sums = {"critic/value_loss": losses.detach().sum(), "critic/clip_ratio": clipped.sum()}
    return (inputs.factors * losses).sum(), sums


def explained_variance(values: NDArray[np.float64], returns: NDArray[np.float64]) -> float | None:
    """1 - Var(returns - values) / Var(returns), of `[tokens]`; None where the returns do not vary."""
    variance = returns.var()
    return None if variance == 0.0 else float(1.0 - (returns - values).var() / variance)
