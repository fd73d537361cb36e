"""The built-in reward for mathematical answers: equal in value, whatever the way of writing, by math-verify.

The answer is what the last `\\boxed{}` holds or, without a box, what stands in the last line after the last `=`, `:` or
`is`. It must be one answer: an empty one, several to choose from (a line without a box that says `or`; `3, 4, 5`), and
two boxes of different values earn 0. Text before `</think>` does not count.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import math_verify

from gyre_core.rewards.functions import Completions, final_texts

logging.getLogger("math_verify").setLevel(logging.ERROR)  # It warns that its own time limit is off, as it must be.

_BOX = re.compile(r"\\boxed\s*\{")
_CHOICE = re.compile(r"\bor\b", re.IGNORECASE)
_INTRODUCTION = re.compile(r".*(?:[:=]|\bis\b)", re.DOTALL)


def math_answer(completions: Completions, answer: Sequence[Any], finish_reasons: Sequence[str]) -> list[float | None]:
    """1 for an answer equal to the column `answer` (a number, or LaTeX with or without `$` and a box), else 0.

    A row whose answer is null is abstained from. A comparison that does not end is cut by the process's deadline.
    """
    return [
        None if gold is None else float(_is_right(text, str(gold).strip()))
        for text, gold in zip(final_texts(completions, finish_reasons), answer, strict=True)
    ]


def boxes(text: str) -> list[str]:
    """What each `\\boxed{}` of a text holds, in order; a box that is never closed holds nothing."""
    found: list[str] = []
    for start in (match.end() for match in _BOX.finditer(text)):
        depth, end = 1, start
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        found.append("" if depth else text[start : end - 1].strip())
    return found


def _is_right(text: str, gold: str) -> bool:
    text = text.rpartition("</think>")[2].strip()
    if not text:
        return False
    if text == gold:
        return True
    candidates = boxes(text) or [_last_words(text)]
    if not all(candidates):
        return False
    wanted = _parse(boxes(gold)[-1] if boxes(gold) else gold)
    parsed = [_parse(candidate) for candidate in dict.fromkeys(candidates)]
    # The comparison is not symmetric: what is right comes first.
    return all(_are_equal(first, second) for first, second in pairwise(parsed)) and _are_equal(wanted, parsed[-1])


def _last_words(text: str) -> str:
    """The answer of a text without boxes: the end of its last line; empty where that offers a choice."""
    line = text.splitlines()[-1]
    return "" if _CHOICE.search(line) else _INTRODUCTION.sub("", line).strip().rstrip(".").strip()


def _parse(expression: str) -> list[Any]:
    """A whole expression as math-verify reads it; without its time limit, which needs signals."""
    return math_verify.parse(f"\\boxed{{{expression.replace('$', '')}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _are_equal(gold: list[Any], candidate: list[Any]) -> bool:
    return math_verify.verify(gold, candidate, timeout_seconds=None)
