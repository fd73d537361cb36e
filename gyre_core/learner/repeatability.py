"""Whether equal updates lead to equal weights here, bit for bit, and the digest that tells so."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import torch
import xxhash

from gyre_core.learner.local import LocalLearner
from gyre_core.types import Minibatch, PolicyVersion, TrainingGroup
from gyre_core.weights.digests import tensor_digest

_PROMPT, _COMPLETION, _SAMPLES = 12, 12, 4
"""Tokens and samples of the test's group: enough for several threads to share the work."""


def state_digest(tensors: Mapping[str, torch.Tensor], counters: Mapping[str, int]) -> str:
    """xxh3-128 over all tensors of a learner's state and its counters, in hexadecimal."""
    lines = [
        f"{name} {tensor.dtype} {list(tensor.shape)} {tensor_digest(tensor)}\n" for name, tensor in tensors.items()
    ]
    return xxhash.xxh3_128_hexdigest("".join([*sorted(lines), json.dumps(counters, sort_keys=True)]).encode())


def repeats(learner: LocalLearner, vocabulary: int, lr: float) -> bool:
    """Whether the same small step, taken twice from the same state, leaves the same weights and moments.

    The learner ends in the state that it was in; its snapshot is overwritten.
    """
    minibatch = _minibatch(vocabulary, lr)
    learner.snapshot()
    digests: set[str] = set()
    for _ in range(2):
        learner.take_step([minibatch], on_policy=False)
        digests.add(state_digest(*learner.state()))
        learner.restore()
    return len(digests) == 1


def _minibatch(vocabulary: int, lr: float) -> Minibatch:
    """One group of made-up completions, half of them with a good and half with a bad advantage."""
    rng = np.random.default_rng(0)
    completions = tuple(rng.integers(vocabulary, size=_COMPLETION, dtype=np.int32) for _ in range(_SAMPLES))
    log_probabilities = tuple(np.full(_COMPLETION, -np.log(vocabulary), np.float32) for _ in range(_SAMPLES))
    signs = np.where(np.arange(_SAMPLES) % 2, -1.0, 1.0)
    group = TrainingGroup(
        group_id="repeatability",
        prompt_ids=rng.integers(vocabulary, size=_PROMPT, dtype=np.int32),
        completions=completions,
        behaviour=log_probabilities,
        reference=log_probabilities,
        truncated=np.zeros(_SAMPLES, np.bool_),
        rewards=signs,
        advantages=signs.astype(np.float32),
        version=PolicyVersion(0, 0),
    )
    return Minibatch((group,), lr, 0.1)
