"""Rows to score, and their scores in one list."""

import numpy as np

from gyre_core.types import Completion, PolicyVersion, Prompt

VERSION = PolicyVersion(1, 2)


def group(number, texts, **columns):
    """A prompt and one completion for each text."""
    row = Prompt(f"p{number}", f"prompt {number}", f"prompt {number}", np.arange(3, dtype=np.int32), columns)
    ids, zeros = np.array([7, number], np.int32), np.zeros(2, np.float32)
    return row, [
        Completion(f"g{number}", index, ids, zeros, text, "stop", VERSION, 0.0, 1.0) for index, text in enumerate(texts)
    ]


async def scores(scorer, *groups):
    """The scores of the groups' rows, in their order."""
    return [score for group in await scorer.score(groups, step=5, version=VERSION) for score in group]
