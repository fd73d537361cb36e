"""Reward functions of the SmolLM2 examples, in TRL's signature. Prompts are chats, so completions are messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Completions = Sequence[Sequence[dict[str, Any]]]
_FULL_WORDS, _NO_WORDS = 8, 20
"""A sentence of so many words earns everything, of so many nothing."""
_FEWEST_WORDS = 3


def reversal(completions: Completions, answer: Sequence[str], finish_reasons: Sequence[str], **_: Any) -> list[float]:
    """Half for the share of positions that hold the right word, half for the whole list; 0 without an end.

    The share counts over the longer of the two lists, so that more words than asked for do not pay.
    """
    rows = zip(completions, answer, finish_reasons, strict=True)
    return [
        _reversal(completion[-1]["content"], right) if reason == "stop" else 0.0 for completion, right, reason in rows
    ]


def short_sentence(
    completions: Completions, topic: Sequence[str], finish_reasons: Sequence[str], **_: Any
) -> list[float]:
    """1 for one sentence of 3 to 8 words that names its topic, falling to 0 at 20 words; 0 for anything else."""
    rows = zip(completions, topic, finish_reasons, strict=True)
    return [
        _short_sentence(completion[-1]["content"], about) if reason == "stop" else 0.0
        for completion, about, reason in rows
    ]


def _reversal(text: str, right: str) -> float:
    given, wanted = text.strip().split(", "), right.split(", ")
    hits = sum(word == other for word, other in zip(given, wanted, strict=False))
    return 0.5 * hits / max(len(given), len(wanted)) + 0.5 * (given == wanted)


def _short_sentence(text: str, topic: str) -> float:
    text = text.strip()
    words = re.findall(r"[\w'’-]+", text.lower())
    is_one_sentence = re.fullmatch(r"[^.!?\n]+[.!?]", text) is not None
    if not is_one_sentence or len(words) < _FEWEST_WORDS or topic not in words:
        return 0.0
    return min(1.0, max(0.0, (_NO_WORDS - len(words)) / (_NO_WORDS - _FULL_WORDS)))
