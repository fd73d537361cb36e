"""A reward function of one's own, in TRL's signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def closeness(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """How near each completion's number comes to the answer: 1 for the very number, 0 from 50 away or for none.

    A function gets `prompts`, `completions`, `completion_ids` and the columns of the data by name, one element for
    each completion, and returns as many values; None leaves a completion unscored.
    """
    return [_closeness(completion, int(right)) for completion, right in zip(completions, answer, strict=True)]


def _closeness(completion: str, right: int) -> float:
    text = completion.strip()
    return max(0.0, 1.0 - abs(int(text) - right) / 50) if text.isdecimal() else 0.0
