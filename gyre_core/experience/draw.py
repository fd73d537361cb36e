"""How a step's groups are chosen among the candidates, and dealt to its minibatches."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from gyre_core.experience.priority import Values, sample_without_replacement

Positions = NDArray[np.int64]
PromptKeys = NDArray[np.uint64]


def choose(
    priorities: Values,
    fresh: NDArray[np.bool_],
    prompts: PromptKeys,
    *,
    count: int,
    fresh_share: float,
    prompt_cap: int,
    rng: np.random.Generator,
) -> Positions:
    """Positions of up to `count` distinct candidates, drawn by priority; the arrays are `[candidates]`.

    `fresh_share` of them at the least were never trained on, as long as there are that many; the rest comes from all.
    No prompt is taken more than `prompt_cap` times.
    """
    taken: Counter[int] = Counter()
    quota = min(math.ceil(fresh_share * count), int(fresh.sum()))
    first = _choose_capped(np.where(fresh, priorities, 0.0), prompts, quota, prompt_cap, taken, rng)
    others = priorities.copy()
    others[first] = 0.0
    rest = _choose_capped(others, prompts, count - len(first), prompt_cap, taken, rng)
    return np.concatenate([first, rest])


def deal(prompts: PromptKeys, minibatches: int, rng: np.random.Generator) -> list[Positions]:
    """Shuffle the drawn groups and deal them out evenly: positions for each minibatch.

    Sizes differ by one at the most, and a prompt's groups are spread as evenly. Fewer groups than minibatches give
    fewer minibatches, none of them empty.
    """
    order = rng.permutation(len(prompts))
    keys, prompt = np.unique(prompts[order], return_inverse=True)
    # Groups of one prompt side by side, the prompts in random order: dealt in turn, they land apart.
    order = order[np.argsort(rng.permutation(len(keys))[prompt], kind="stable")]
    return [order[start::minibatches] for start in range(min(minibatches, len(order)))]


def _choose_capped(
    priorities: Values, prompts: PromptKeys, count: int, cap: int, taken: Counter[int], rng: np.random.Generator
) -> Positions:
    """Draw `count` positions, `taken` counting the prompts; each round leaves out what it drew and full prompts."""
    left = priorities.copy()
    chosen: list[int] = []
    while len(chosen) < count:
        drawn = sample_without_replacement(left, count - len(chosen), rng)
        if len(drawn) == 0:
            break
        for position in drawn.tolist():
            prompt = int(prompts[position])
            if taken[prompt] < cap:
                taken[prompt] += 1
                chosen.append(position)
        if len(chosen) < count:
            left[drawn] = 0.0
            full = np.array([prompt for prompt, uses in taken.items() if uses >= cap], dtype=np.uint64)
            left[np.isin(prompts, full)] = 0.0
    return np.array(chosen, dtype=np.int64)
