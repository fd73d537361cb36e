"""The built-in reward for the form of an answer: thoughts between tags, then the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gyre_core.rewards.functions import Completions, final_texts

OPENING = "<think>"
_FORM = re.compile(r"\s*<think>(.+?)</think>(.+)", re.DOTALL)


def think_format(
    completions: Completions, prompt_texts: Sequence[str], finish_reasons: Sequence[str]
) -> list[float | None]:
    """1 for `<think>`, thoughts, `</think>` and an answer, each once and neither of them blank; else 0.

    Where the chat template has opened the tag already, at the end of the prompt, the completion must not open it again.
    """
    return [
        float(_has_form(OPENING + text if prompt.rstrip().endswith(OPENING) else text))
        for text, prompt in zip(final_texts(completions, finish_reasons), prompt_texts, strict=True)
    ]


def _has_form(text: str) -> bool:
    form = _FORM.fullmatch(text)
    if form is None:
        return False
    return all(part.strip() and not re.search("</?think>", part) for part in form.groups())
