"""The reward of both sides, in TRL's signature: half the share of right characters, half the exact answer."""

from __future__ import annotations

from typing import Any


def score(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The share counts over the longer of the two texts, so that padding an answer does not pay."""
    return [_score(completion, right) for completion, right in zip(completions, answer, strict=True)]


def _score(completion: str, right: str) -> float:
    hits = sum(character == wanted for character, wanted in zip(completion, right, strict=False))
    return 0.5 * hits / max(len(completion), len(right)) + 0.5 * (completion == right)
