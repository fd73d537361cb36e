"""The parts of a policy-gradient loss, each a pure function of flat token tensors.

Shapes: `tokens` counts the completion tokens of a minibatch that are trained on, over all its sequences.
"""

from __future__ import annotations

from typing import Literal

import torch

Aggregation = Literal["token", "sequence", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this, so that their exponentials stay finite in float32."""


def aggregation_weights(
    sequences: torch.Tensor, sequence_count: int, aggregation: Aggregation, max_tokens: int
) -> torch.Tensor:
    """The factor of each token's loss in the loss of the minibatch, `[tokens]` float32.

    `sequences` is `[tokens]`, the index of each trained token's sequence, of `sequence_count` in all. The loss is the
    sum of factor times token loss, so micro-batches add up to it however the minibatch is cut. The modes:

    - `token`: 1 / tokens, the mean over all tokens (Yu et al., 'DAPO', 2025, section 3.3);
    - `sequence`: 1 / (sequences with a trained token x the sequence's trained tokens), the mean of the sequences'
      means (Shao et al., 'DeepSeekMath', 2024, equation 3);
    - `constant`: 1 / (`sequence_count` x `max_tokens`), free of length bias (Liu et al., 'Understanding R1-Zero-like
      training', 2025, section 3.2).
    """
    if aggregation == "sequence":
        lengths = torch.bincount(sequences, minlength=sequence_count)
        return 1.0 / (lengths[sequences] * (lengths > 0).sum()).float()
    divisor = len(sequences) if aggregation == "token" else sequence_count * max_tokens
    return torch.full(sequences.shape, 1.0 / max(divisor, 1), device=sequences.device)


def log_ratio(log_probabilities: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """log(p / q), clamped to plus or minus `LARGEST_LOG_RATIO`."""
    return (log_probabilities - others).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """Token losses -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), `[tokens]`.

    Schulman et al., 'Proximal policy optimization', 2017, equation 7, with the separate upper bound ('clip-higher')
    of Yu et al., 'DAPO', 2025, section 3.1.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def kl_penalty(log_probabilities: torch.Tensor, reference: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Estimates of KL(policy, reference) at tokens sampled from the policy, `[tokens]`.

    With d = log policy - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, 'Approximating KL
    divergence', 2020). All three have the divergence, or nearly so, as their mean; their gradients differ: that of
    k1 is 0 in expectation, that of k2 is the true one, that of k3 is the gradient of KL(reference, policy).
    """
    difference = log_ratio(log_probabilities, reference)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return torch.expm1(-difference) + difference


def importance_weights(learner: torch.Tensor, engine: torch.Tensor, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights min(cap, learner's probability / engine's), and which tokens count, both `[tokens]`.

    Both arguments are log-probabilities under the same truncation. This is truncated importance sampling (Ionides,
    2008; Yao et al., 'Your efficient RL framework secretly brings you off-policy RL training', 2025). A token that
    the learner's own truncation leaves out (log-probability -inf) has weight 0 and does not count.
    """
    supported = ~torch.isneginf(learner)
    weights = log_ratio(learner, engine).exp().clamp(max=cap)
    return torch.where(supported, weights, 0.0), supported
