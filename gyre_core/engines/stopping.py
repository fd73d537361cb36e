"""Texts that end a completion."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from gyre_core.policy.tokens import decode

_CONTEXT = 8
"""Tokens decoded before a possible stop text, so that its first character is whole."""
_BYTES_PER_CHARACTER = 4
"""UTF-8 bytes of a character, hence tokens of it, at the most."""


@dataclass(frozen=True, slots=True)
class StopTexts:
    """The texts any of which ends a completion.

    A completion ends with the token that completes the first such text: its tokens are all kept, for they were
    sampled, and its text is cut before the stop text.
    """

    texts: tuple[str, ...]

    def find(self, text: str) -> int | None:
        """Where the first stop text begins in `text`; None when there is none."""
        return min((index for index in map(text.find, self.texts) if index >= 0), default=None)

    def ends(self, tokenizer: PreTrainedTokenizerBase, token_ids: NDArray[np.int32]) -> bool:
        """Whether the newest of `token_ids`, `[time]`, completes a stop text.

        Looks at the end first, so that a long completion is decoded as a whole only to confirm.
        """
        reach = _BYTES_PER_CHARACTER * max(map(len, self.texts)) + _CONTEXT
        near = self.find(decode(tokenizer, token_ids[-reach:].tolist())) is not None
        return near and self.find(decode(tokenizer, token_ids.tolist())) is not None
