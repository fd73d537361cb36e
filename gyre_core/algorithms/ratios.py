"""How far the policy has moved from another one, by token or by sequence, and PPO's bounds on it."""

from __future__ import annotations

import torch

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this, so that their exponentials stay finite in float32."""


def log_ratio(log_probabilities: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """log(p / q), clamped to plus or minus `LARGEST_LOG_RATIO`."""
    return (log_probabilities - others).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def sequence_means(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """Each token's value replaced by the mean over its sequence, `[tokens]`; the gradient goes through the mean.

    `sequences` is `[tokens]` int64, the number of each token's sequence. Of log-ratios, the exponential of the mean
    is the sequence's ratio to the power of 1 / length (Zheng et al., 'Group sequence policy optimization', 2025,
    equation 7).
    """
    _, index, lengths = sequences.unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(lengths), dtype=values.dtype, device=values.device).index_add(0, index, values) / lengths
    # An embedding look-up gathers like indexing does, and its gradient adds up in a fixed order.
    return torch.nn.functional.embedding(index, means[:, None])[:, 0]


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """Token losses -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), `[tokens]`.

    Schulman et al., 'Proximal policy optimization', 2017, equation 7, with the separate upper bound ('clip-higher')
    of Yu et al., 'DAPO', 2025, section 3.1.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)
