"""The one protocol of inference engines; everything that generates speaks it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gyre_core.types import Completion, GroupRequest, PolicyVersion, SamplingParameters


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine did since it started, and what it does now."""

    generated_tokens: int
    """Completion tokens of finished sequences."""
    finished_sequences: int
    busy_seconds: float
    """Seconds in which at least one sequence was in flight."""
    in_flight: int
    """Sequences being generated."""
    queued: int
    """Sequences that wait for a place."""


class Engine(Protocol):
    """Generates completions with one loaded policy version.

    `generate` may be called again while earlier calls are still running; an engine batches their sequences
    together. The computation never blocks the event loop.
    """

    @property
    def version(self) -> PolicyVersion | None:
        """The loaded policy version; None before the first load."""
        ...

    @property
    def max_positions(self) -> int:
        """Tokens of prompt and completion together, at the most."""
        ...

    def generate(self, requests: Sequence[GroupRequest], sampling: SamplingParameters) -> AsyncIterator[Completion]:
        """Complete each group's prompt `sampling.samples` times; yields sequences as they finish.

        Sampling noise is a function of `sampling.seed`, the group's id, the sample's index and the token's position
        alone, so that what else is in the batch does not change a sequence beyond float rounding. Raises ValueError
        for a prompt that leaves no room for a token.
        """
        ...

    async def abort(self, group_ids: Sequence[str]) -> None:
        """Give up the unfinished sequences of these groups; their `generate` ends without them."""
        ...

    async def pause(self) -> None:
        """Stop generating after the current token; sequences stay where they are."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def load_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        """Hold this version from now on; `weights` is the model's state dict, in any float type.

        Raises RuntimeError while sequences are in flight, and ValueError for a missing, unknown or misshapen tensor.
        """
        ...

    async def reset_cache(self) -> None:
        """Forget every cached prefix."""
        ...

    def stats(self) -> EngineStats:
        """Counters since the start, and the present load."""
        ...

    async def close(self) -> None:
        """End the engine and free its memory; unfinished `generate` calls raise RuntimeError."""
        ...
