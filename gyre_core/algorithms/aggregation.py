"""How the losses of tokens become the loss of a minibatch."""

from __future__ import annotations

from typing import Literal

import torch

Aggregation = Literal["token", "sequence", "constant"]


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
