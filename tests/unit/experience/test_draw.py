"""Fresh share, prompt cap and even dealing, as laws over random pools."""

import math
from collections import Counter

import numpy as np
import pytest

from gyre_core.experience.draw import choose, deal


@pytest.mark.parametrize("seed", range(40))
def test_choice_keeps_the_fresh_share_and_the_cap(seed):
    rng = np.random.default_rng(seed)
    size, count, cap = int(rng.integers(0, 60)), int(rng.integers(1, 30)), int(rng.integers(1, 5))
    fresh = rng.random(size) < rng.random()
    prompts = rng.integers(0, 12, size).astype(np.uint64)
    chosen = choose(rng.random(size) + 0.1, fresh, prompts, count=count, fresh_share=0.5, prompt_cap=cap, rng=rng)
    assert len(set(chosen.tolist())) == len(chosen)
    assert max(Counter(prompts[chosen].tolist()).values(), default=0) <= cap
    # The draw is as large as the cap allows, whatever the order of drawing.
    assert len(chosen) == min(count, sum(min(cap, n) for n in Counter(prompts.tolist()).values()))
    fresh_drawable = sum(min(cap, n) for n in Counter(prompts[fresh].tolist()).values())
    assert fresh[chosen].sum() >= min(math.ceil(0.5 * count), fresh_drawable)


@pytest.mark.parametrize("seed", range(40))
def test_dealing_is_even_and_loses_nothing(seed):
    rng = np.random.default_rng(seed)
    count, minibatches = int(rng.integers(0, 50)), int(rng.integers(1, 9))
    prompts = rng.integers(0, 10, count).astype(np.uint64)
    dealt = deal(prompts, minibatches, rng)
    assert sorted(position for part in dealt for position in part.tolist()) == list(range(count))
    assert len(dealt) == min(minibatches, count)
    sizes = [len(part) for part in dealt]
    assert not sizes or max(sizes) - min(sizes) <= 1
    for prompt, total in Counter(prompts.tolist()).items():
        assert max(int((prompts[part] == prompt).sum()) for part in dealt) <= math.ceil(total / len(dealt))


def test_dealing_shuffles():
    prompts = np.arange(100, dtype=np.uint64)
    first, second = (deal(prompts, 4, np.random.default_rng(seed))[0].tolist() for seed in (1, 2))
    assert first != second
    assert first == deal(prompts, 4, np.random.default_rng(1))[0].tolist()
