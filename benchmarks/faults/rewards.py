"""The reward function of the killed runs: a random policy earns something, so that there is a gradient."""

from __future__ import annotations

from typing import Any


def even_digits(completions: list[str], **columns: Any) -> list[float]:
    """Share of even digits in a completion."""
    return [sum(character in "02468" for character in text) / max(1, len(text)) for text in completions]
