"""Reward functions of the tiny runs: a random policy earns something, so that there is a gradient."""


def even_digits(completions, **columns):
    """Share of even digits in a completion."""
    return [sum(character in "02468" for character in text) / max(1, len(text)) for text in completions]


def constant(completions, **columns):
    """The same for all: no group has any variance."""
    return [1.0] * len(completions)


def miscounted(completions, **columns):
    """One value too many: a broken contract, at each call a line in `calls.txt` of the working folder."""
    with open("calls.txt", "a") as calls:
        calls.write("called\n")
    return [1.0] * (len(completions) + 1)
