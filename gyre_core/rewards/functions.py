"""The built-in reward functions that compare texts, in TRL's signature, and what all built-in ones share.

Both compare a completion with the text of the column `answer`, white space at the ends aside. A row without an
answer is abstained from. A completion that was cut off by its length, or that is empty, earns 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Completions = Sequence[str] | Sequence[list[dict[str, Any]]]
"""Texts, or for message prompts lists of messages."""


def exact_match(completions: Completions, answer: Sequence[Any], finish_reasons: Sequence[str]) -> list[float | None]:
    """1 for the answer itself, else 0."""
    return [
        None if gold is None else float(_matches(text, str(gold).strip()))
        for text, gold in zip(final_texts(completions, finish_reasons), answer, strict=True)
    ]


def partial_match(completions: Completions, answer: Sequence[Any], finish_reasons: Sequence[str]) -> list[float | None]:
    """Half for the share of positions that hold the right character, half for the answer itself.

    The share counts over the longer of the two texts, so that padding an answer does not pay.
    """
    return [
        None if gold is None else _partial(text, str(gold).strip())
        for text, gold in zip(final_texts(completions, finish_reasons), answer, strict=True)
    ]


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion; of a list of messages, the content of the last one."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def final_texts(completions: Completions, finish_reasons: Sequence[str]) -> list[str]:
    """Stripped texts; empty for a completion that did not come to its end."""
    return [
        completion_text(completion).strip() if reason == "stop" else ""
        for completion, reason in zip(completions, finish_reasons, strict=True)
    ]


def _matches(text: str, gold: str) -> bool:
    return text != "" and text == gold


def _partial(text: str, gold: str) -> float:
    hits = sum(character == right for character, right in zip(text, gold, strict=False))
    return 0.5 * hits / max(len(text), len(gold), 1) + 0.5 * _matches(text, gold)
