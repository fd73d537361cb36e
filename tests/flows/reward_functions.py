"""Reward functions of the tiny runs: a random policy earns something, so that there is a gradient."""

import time
from pathlib import Path


def even_digits(completions, **columns):
    """Share of even digits in a completion."""
    return [sum(character in "02468" for character in text) / max(1, len(text)) for text in completions]


def constant(completions, **columns):
    """The same for all: no group has any variance."""
    return [1.0] * len(completions)


def no_nines(completions, **columns):
    """As `even_digits`, but a nine cannot be read."""
    if any("9" in text for text in completions):
        raise ValueError("there is a nine")
    return even_digits(completions)


def miscounted(completions, **columns):
    """One value too many: a broken contract, at each call a line in `calls.txt` of the working folder."""
    with Path("calls.txt").open("a") as calls:
        calls.write("called\n")
    return [1.0] * (len(completions) + 1)


def slow(completions, **columns):
    """As `even_digits`, after two seconds."""
    time.sleep(2.0)
    return even_digits(completions)
