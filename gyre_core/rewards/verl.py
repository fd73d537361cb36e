"""Reward functions written for verl, called the way Gyre calls the others."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from gyre_core.rewards.functions import Completions, completion_text
from gyre_core.rewards.loader import RewardFunction, read_signature

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What verl hands to `compute_score`, by keyword."""


def adapt_compute_score(path: str, compute_score: RewardFunction) -> RewardFunction:
    """A function over completions that calls verl's `compute_score` for each, all at once where that is async.

    It needs the columns of verl's data: `data_source`, `reward_model` (an object with `ground_truth`) and, where
    there is one, `extra_info`. A row whose `reward_model` is null is abstained from. What `compute_score` returns is
    the score, or an object that holds it as `score`; the object's other entries are left out. Raises ValueError for a
    function that cannot be called so.
    """
    signature = read_signature(path, compute_score)
    unknown = [argument for argument in signature.required if argument not in ARGUMENTS]
    if unknown:
        raise ValueError(
            f"reward function '{path}': signature verl hands over {', '.join(ARGUMENTS)}, and it requires "
            f"'{unknown[0]}' besides"
        )
    offered = [argument for argument in ARGUMENTS if signature.wants(argument)]

    async def scores(
        completions: Completions,
        data_source: Sequence[Any],
        reward_model: Sequence[Mapping[str, Any] | None],
        extra_info: Sequence[Any] | None = None,
    ) -> list[Any]:
        values: list[Any] = []
        for row, completion in enumerate(completions):
            judged = reward_model[row]
            if judged is None:
                values.append(None)
                continue
            if "ground_truth" not in judged:
                raise ValueError(f"the column 'reward_model' lacks 'ground_truth' in a row; it holds {list(judged)}")
            arguments = {
                "data_source": data_source[row],
                "solution_str": completion_text(completion),
                "ground_truth": judged["ground_truth"],
                "extra_info": extra_info[row] if extra_info is not None else None,
            }
            values.append(compute_score(**{name: arguments[name] for name in offered}))
        waiting = [row for row, value in enumerate(values) if inspect.isawaitable(value)]
        for row, value in zip(waiting, await asyncio.gather(*(values[row] for row in waiting)), strict=True):
            values[row] = value
        return [value["score"] if isinstance(value, Mapping) and "score" in value else value for value in values]

    return scores
