"""Estimates of the policy's divergence from a reference model."""

from __future__ import annotations

from typing import Literal

import torch

from gyre_core.algorithms.ratios import log_ratio

KLEstimator = Literal["k1", "k2", "k3"]


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
