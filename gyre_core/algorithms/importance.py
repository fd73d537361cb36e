"""Correction from the policy that sampled to the one that the learner starts a step from."""

from __future__ import annotations

import torch

from gyre_core.algorithms.ratios import log_ratio


def importance_weights(learner: torch.Tensor, engine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights learner's probability / engine's, and which tokens the learner could sample, both `[tokens]`.

    Both arguments are log-probabilities under the same truncation. A token that the learner's own truncation leaves
    out (log-probability -inf) has weight 0.
    """
    supported = ~torch.isneginf(learner)
    return torch.where(supported, log_ratio(learner, engine).exp(), 0.0), supported


def within_bounds(weights: torch.Tensor, floor: float, cap: float) -> torch.Tensor:
    """Which weights are in [floor, cap], `[tokens]` bool; one that is not a number counts as in.

    Masked importance sampling leaves out the tokens outside (Ling Team, 'Every step evolves', 2025, equation 6);
    truncated importance sampling lowers the weights above `cap` to it instead (Ionides, 2008; Yao et al., 'Your
    efficient RL framework secretly brings you off-policy RL training', 2025).
    """
    # A broken weight must reach the check of the loss, not vanish among the masked tokens.
    return ~((weights < floor) | (weights > cap))
