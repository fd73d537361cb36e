"""The distribution that tokens are sampled from, and the noise that picks them.

The engine samples by these functions and the learner scores by them, so that both speak of one distribution.
Everything here is a pure function of its arguments.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

_ROUNDING = 1e-6
"""A top-p set is complete when it lacks less than this mass: the rounding of a float32 softmax."""
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""The odd integer nearest to 2^64 divided by the golden ratio (Steele, Lea and Flood, 2014)."""


def truncated_log_probabilities(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Log-probabilities under temperature, then top-k, then top-p, renormalised over the tokens that remain.

    `logits` is `[..., vocabulary]` in any float type; the result has its shape, in float32, and is -inf outside
    the truncation. `top_k` 0 and `top_p` 1 are off. Top-p takes the smallest set of likeliest tokens whose mass,
    counted after top-k, reaches `top_p` (Holtzman et al., 'The Curious Case of Neural Text Degeneration', 2020);
    it always holds the likeliest token. `temperature` must be positive: greedy choice has no such distribution.
    """
    assert temperature > 0.0, "greedy decoding is not a tempered distribution"
    scaled = logits.float() / temperature
    vocabulary = scaled.shape[-1]
    candidates = min(top_k, vocabulary) if top_k > 0 else vocabulary
    if candidates < vocabulary or top_p < 1.0:
        likeliest, token_ids = scaled.topk(candidates, dim=-1)
        if top_p < 1.0:
            probabilities = likeliest.softmax(dim=-1)
            mass_before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
            outside = mass_before >= top_p - _ROUNDING
            outside[..., 0] = False
            likeliest = likeliest.masked_fill(outside, -torch.inf)
        scaled = torch.full_like(scaled, -torch.inf).scatter(-1, token_ids, likeliest)
    return scaled.log_softmax(dim=-1)


def group_key(group_id: str) -> int:
    """The 64-bit number that stands for a group's id in `uniform`."""
    return int.from_bytes(hashlib.blake2b(group_id.encode(), digest_size=8).digest(), "little")


def uniform(
    seed: int, groups: NDArray[np.uint64], samples: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """One number of the open interval (0, 1) for each (group key, sample index, token position), all `[rows]`.

    A counter-based generator: the numbers are a hash of their arguments and of nothing else, by the finaliser of
    SplitMix64 (Steele, Lea and Flood, 'Fast Splittable Pseudorandom Number Generators', 2014) once per argument.
    """
    state = np.full(groups.shape, seed % 2**64, dtype=np.uint64)
    for value in (groups, samples, positions):
        state = _mix(state ^ _mix(value.astype(np.uint64)))
    # 52 bits and a half: exact in float64, and neither 0 nor 1.
    return ((state >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def sample_tokens(log_probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token of each row, `[rows]` int64, at the given point of its cumulative distribution.

    `log_probabilities` is `[rows, vocabulary]`, `uniforms` `[rows]` float64 in (0, 1). A token of probability 0 is
    never taken.
    """
    cumulative = log_probabilities.exp().cumsum(dim=-1, dtype=torch.float64)
    points = uniforms[:, None] * cumulative[:, -1:]
    # Rows of NaN have no such point; they must not become an index out of range before their caller sees them.
    return torch.searchsorted(cumulative, points, right=True).squeeze(1).clamp(max=log_probabilities.shape[1] - 1)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + np.uint64(_GOLDEN_GAMMA)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
