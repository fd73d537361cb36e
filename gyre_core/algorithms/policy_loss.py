"""The policy's loss of a micro-batch, whatever its advantages come from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gyre_core.algorithms.divergence import kl_penalty
from gyre_core.algorithms.ratios import clipped_surrogate, log_ratio, sequence_means
from gyre_core.config.sections import LearningConfig


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What the loss needs at each trained token, besides the policy in training; all `[tokens]` float32."""

    old: torch.Tensor
    """Log-probabilities of the policy at the start of the step, untruncated."""
    importance: torch.Tensor
    """Weights between the engine's policy and the one at the start of the step."""
    advantages: torch.Tensor
    reference: torch.Tensor | None
    """Log-probabilities of the reference model; None without a KL penalty."""
    factors: torch.Tensor
    """The share of each token's loss in the loss of the minibatch: aggregation times the draw's weight."""
    sequences: torch.Tensor
    """Number of each token's completion in the minibatch, int64."""

    def at(self, places: torch.Tensor) -> TokenInputs:
        """The inputs of the tokens at `places`, `[places]` int64."""
        return TokenInputs(
            old=self.old[places],
            importance=self.importance[places],
            advantages=self.advantages[places],
            reference=None if self.reference is None else self.reference[places],
            factors=self.factors[places],
            sequences=self.sequences[places],
        )


def policy_loss(
    log_probabilities: torch.Tensor,
    entropy: torch.Tensor,
    inputs: TokenInputs,
    config: LearningConfig,
    kl_coef: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The micro-batch's share of the minibatch's loss, a scalar, and sums over its tokens for the metrics.

    `log_probabilities` and `entropy` are `[tokens]`, of the policy in training, untruncated. A micro-batch holds
    completions whole. A token's loss is importance x surrogate + kl_coef x KL estimate - entropy_coef x entropy (Shao
    et al., 'DeepSeekMath', 2024, equation 3, with the decoupled correction of Hilton et al., 'Batch size-invariance
    for policy optimization', 2022). With `policy_ratio` `sequence` its surrogate is that of its completion's mean
    log-ratio (Zheng et al., 'Group sequence policy optimization', 2025, equation 5).
    """
    change = log_ratio(log_probabilities, inputs.old)
    compared = sequence_means(change, inputs.sequences) if config.policy_ratio == "sequence" else change
    ratio = compared.exp()
    losses = inputs.importance * clipped_surrogate(ratio, inputs.advantages, config.clip_low, config.clip_high)
    with torch.no_grad():
        low = (ratio < 1.0 - config.clip_low) & (inputs.advantages < 0)
        high = (ratio > 1.0 + config.clip_high) & (inputs.advantages > 0)
        sums = {
            "clip_ratio/low_mean": low.sum(),
            "clip_ratio/high_mean": high.sum(),
            "clip_ratio/region_mean": (low | high).sum(),
            "policy_kl": (torch.expm1(change) - change).sum(),
            "entropy": entropy.sum(),
        }
    if inputs.reference is not None:
        divergence = kl_penalty(log_probabilities, inputs.reference, config.kl_estimator)
        losses = losses + kl_coef * divergence
        sums["kl"] = divergence.detach().sum()
    if config.entropy_coef > 0.0:
        losses = losses - config.entropy_coef * entropy
    return (inputs.factors * losses).sum(), sums
