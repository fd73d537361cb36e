"""Lays groups out as rows of tokens, and rows as micro-batches within a token budget.

A row is one prompt followed by some of its completions. Each completion attends to the prompt and to itself, and its
positions go on from the prompt's end, so the row gives what each completion would give behind its own copy of the
prompt. A completion's last token is predicted but predicts nothing, and is left out. Rows of similar length are padded
together into micro-batches.

Tokens are counted `flat` throughout: the completion tokens of all groups, one after the other in the order given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_core.types import Tokens

PromptCompletions = tuple[Tokens, Sequence[Tokens]]
"""A prompt's tokens `[prompt]` and those of each of its completions `[time]`."""

PADDING = -1
"""Segment of padding; 0 is the prompt, 1 and up are the row's completions."""
_LARGEST_PADDING_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass: `[rows, time]` inputs, and where its predictions are, `[tokens]`."""

    token_ids: NDArray[np.int64]
    """`[rows, time]`, 0 where padded."""
    positions: NDArray[np.int64]
    """`[rows, time]`; padding counts on."""
    segments: NDArray[np.int32]
    """`[rows, time]`: 0 for the prompt, the completion's number in the row from 1, `PADDING` after the end."""
    sources: NDArray[np.int64]
    """`[tokens]`: index into the flattened `[rows x time]` states that predict each token."""
    places: NDArray[np.int64]
    """`[tokens]`: flat index of each predicted token."""
    targets: NDArray[np.int64]
    """`[tokens]`: ids of the predicted tokens."""

    @property
    def shared(self) -> bool:
        """Whether a prompt is shared by completions of one row, so that plain causal attention does not do."""
        return bool(self.segments.max() > 1)

    @property
    def padded_tokens(self) -> int:
        """Slots that hold padding."""
        return int((self.segments == PADDING).sum())


@dataclass(frozen=True, slots=True)
class _Row:
    prompt: Tokens
    completions: tuple[tuple[Tokens, int], ...]
    """Each completion with the flat index of its first token."""
    length: int


def row_capacity(prompt_tokens: int, hidden_size: int, budget: int) -> float:
    """Completion tokens that are best put behind one copy of a prompt.

    Cost model: a row of T tokens costs T + T^2 / w, the work of its linear layers and that of attention, in units of
    one token's linear work. With a layer's parameters taken as 12 hidden_size^2, both are equal at w = 6 hidden_size.
    The cost per completion token of a row with prompt P and x completion tokens, (P + x)(1 + (P + x) / w) / x, is
    least at x = sqrt(P (P + w)). `budget` bounds the row.
    """
    best = math.sqrt(prompt_tokens * (prompt_tokens + 6 * hidden_size))
    return min(best, budget - prompt_tokens)


def plan_micro_batches(
    groups: Sequence[PromptCompletions], budget: int, hidden_size: int, trained: NDArray[np.bool_] | None = None
) -> list[MicroBatch]:
    """Every completion token of `groups` in exactly one micro-batch of at most `budget` tokens, padding included.

    A prompt with one completion that exceeds the budget is a micro-batch of its own. Padding takes less than 20% of
    each micro-batch. `trained`, flat, leaves tokens out of the predictions, not out of what others attend to; a
    micro-batch that predicts nothing is left out. Raises ValueError for an empty prompt or completion.
    """
    rows = _plan_rows(groups, budget, hidden_size)
    # Longest first: the first row of a micro-batch sets its width. The sort is stable, so the plan is a function of
    # the groups alone.
    rows.sort(key=lambda row: -row.length)
    batches: list[list[_Row]] = []
    filled = 0
    for row in rows:
        slots = (len(batches[-1]) + 1) * batches[-1][0].length if batches else 0
        if batches and slots <= budget and filled + row.length > (1.0 - _LARGEST_PADDING_SHARE) * slots:
            batches[-1].append(row)
            filled += row.length
        else:
            batches.append([row])
            filled = row.length
    built = [_build(batch, trained) for batch in batches]
    return [batch for batch in built if len(batch.places)]


def _plan_rows(groups: Sequence[PromptCompletions], budget: int, hidden_size: int) -> list[_Row]:
    """First fit, longest first, of each group's completions into rows of the best capacity."""
    rows: list[_Row] = []
    start = 0
    for prompt, completions in groups:
        if not len(prompt) or not all(len(completion) for completion in completions):
            raise ValueError("a prompt or completion without tokens cannot be scored; drop it when it is admitted")
        items: list[tuple[Tokens, int]] = []
        for completion in completions:
            items.append((completion, start))
            start += len(completion)
        capacity = row_capacity(len(prompt), hidden_size, budget)
        bins: list[tuple[int, list[tuple[Tokens, int]]]] = []
        for item in sorted(items, key=lambda item: -len(item[0])):
            size = len(item[0]) - 1
            fitting = next((index for index, (filled, _) in enumerate(bins) if filled + size <= capacity), None)
            if fitting is None:
                bins.append((size, [item]))
            else:
                filled, content = bins[fitting]
                content.append(item)
                bins[fitting] = (filled + size, content)
        rows.extend(_Row(prompt, tuple(content), len(prompt) + filled) for filled, content in bins)
    return rows


def _build(rows: Sequence[_Row], trained: NDArray[np.bool_] | None) -> MicroBatch:
    width = rows[0].length
    token_ids = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.tile(np.arange(width), (len(rows), 1))
    segments = np.full((len(rows), width), PADDING, dtype=np.int32)
    places: list[tuple[int, ...]] = []
    for index, row in enumerate(rows):
        end = len(row.prompt)
        token_ids[index, :end] = row.prompt
        segments[index, :end] = 0
        for number, (completion, place) in enumerate(row.completions, start=1):
            places.append((index * width, len(row.prompt), end, number, place))
            end += len(completion) - 1
    completions = [completion for row in rows for completion, _ in row.completions]
    lengths = np.array([len(completion) for completion in completions])
    targets = np.concatenate(completions).astype(np.int64)
    # Of each completion token: its index in its completion, and that completion's numbers.
    index = np.arange(len(targets)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    offsets, prompt_lengths, starts, numbers, firsts = np.repeat(np.array(places), lengths, axis=0).T
    # The last token is predicted and predicts nothing, so it has no slot.
    fed = index < np.repeat(lengths, lengths) - 1
    slots = (offsets + starts + index)[fed]
    token_ids.flat[slots] = targets[fed]
    segments.flat[slots] = numbers[fed]
    positions.flat[slots] = (prompt_lengths + index)[fed]
    # The first token is predicted at the prompt's end.
    sources = offsets + np.where(index == 0, prompt_lengths, starts + index) - 1
    flat = firsts + index
    kept = slice(None) if trained is None else trained[flat]
    return MicroBatch(token_ids, positions, segments, sources[kept], flat[kept], targets[kept])
