import numpy as np
import pytest

from gyre_core.policy.packing import PADDING, plan_micro_batches, row_capacity


def random_sequences(seed, longest=40, groups=12):
    rng = np.random.default_rng(seed)

    def tokens(length):
        return rng.integers(1, 1000, size=length).astype(np.int32)

    return [
        (
            tokens(rng.integers(1, longest)),
            [tokens(length) for length in rng.integers(1, longest, size=rng.integers(1, 9))],
        )
        for _ in range(groups)
    ]


def seen_from(batch, source):
    """The (prompt + completion) sequence that the mask and positions show to the token predicted at `source`."""
    row, column = divmod(int(source), batch.token_ids.shape[1])
    segments = batch.segments[row]
    visible = [at for at in range(column + 1) if segments[at] in (0, segments[column])]
    return batch.token_ids[row, visible].tolist(), batch.positions[row, visible].tolist()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("budget", "hidden_size"), [(1, 8), (60, 8), (200, 64), (100_000, 64), (100_000, 100_000)])
def test_every_token_is_predicted_once_from_its_own_past(seed, budget, hidden_size):
    sequences = random_sequences(seed)
    flat = [
        (prompt.tolist() + completion[:place].tolist(), int(completion[place]))
        for prompt, completions in sequences
        for completion in completions
        for place in range(len(completion))
    ]
    places = []
    for batch in plan_micro_batches(sequences, budget, hidden_size):
        for source, place, target in zip(batch.sources, batch.places, batch.targets, strict=True):
            past, following = flat[place]
            visible, positions = seen_from(batch, source)
            assert visible == past, f"seed {seed}"
            assert positions == list(range(len(past))), f"seed {seed}"
            assert target == following, f"seed {seed}"
        places.extend(batch.places.tolist())
    assert sorted(places) == list(range(len(flat))), f"seed {seed}"


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("budget", [30, 100, 1000])
def test_micro_batches_keep_the_budget_and_little_padding(seed, budget):
    for batch in plan_micro_batches(random_sequences(seed), budget, hidden_size=32):
        slots = batch.segments.size
        assert slots <= budget or (len(batch.segments) == 1 and batch.segments.max() <= 1), f"seed {seed}"
        assert batch.padded_tokens == (batch.segments == PADDING).sum() < 0.2 * slots, f"seed {seed}"


def test_one_long_reply_does_not_pad_the_short_ones():
    """15 replies of 100 tokens and one of 4000: padded together, 91% of 64000 slots would be waste."""
    prompt = np.arange(10, dtype=np.int32)
    completions = [np.ones(length, dtype=np.int32) for length in [100] * 7 + [4000] + [100] * 8]
    batches = plan_micro_batches([(prompt, completions)], budget=2048, hidden_size=64)
    slots = sum(batch.segments.size for batch in batches)
    padding = sum(batch.padded_tokens for batch in batches)
    assert padding < 0.2 * slots
    assert [batch.segments.shape for batch in batches if batch.segments.shape[1] > 2048] == [(1, 4009)]
    assert sum(len(batch.places) for batch in batches) == 5500


@pytest.mark.parametrize(("prompt", "hidden_size"), [(7, 64), (500, 64), (2000, 4096), (30, 4096)])
def test_row_capacity_is_the_cheapest(prompt, hidden_size):
    sizes = np.arange(1, 100_000)
    lengths = prompt + sizes
    cost = lengths * (1 + lengths / (6 * hidden_size)) / sizes
    assert abs(sizes[cost.argmin()] - row_capacity(prompt, hidden_size, 10**9)) <= 1


def test_long_completions_do_not_share_a_row_and_short_ones_do():
    prompt = np.ones(20, dtype=np.int32)

    def rows(length):
        batches = plan_micro_batches([(prompt, [np.ones(length, dtype=np.int32)] * 4)], 10**6, hidden_size=64)
        return sum(len(batch.segments) for batch in batches)

    assert row_capacity(20, 64, 10**6) == pytest.approx(89.89, abs=0.01)
    assert (rows(10), rows(40), rows(60)) == (1, 2, 4)


def test_untrained_tokens_are_context_and_not_predicted():
    sequences = random_sequences(3, groups=2)
    total = sum(len(completion) for _, completions in sequences for completion in completions)
    trained = np.arange(total) % 3 == 0
    batches = plan_micro_batches(sequences, 100, 64, trained)
    assert sorted(np.concatenate([batch.places for batch in batches])) == np.flatnonzero(trained).tolist()
    assert plan_micro_batches(sequences, 100, 64, np.zeros(total, dtype=bool)) == []


@pytest.mark.parametrize("sequences", [[([], [[1]])], [([1], [[1], []])]])
def test_empty_sequences_are_refused(sequences):
    arrays = [(np.array(p, dtype=np.int32), [np.array(c, dtype=np.int32) for c in cs]) for p, cs in sequences]
    with pytest.raises(ValueError, match="without tokens"):
        plan_micro_batches(arrays, 100, 64)
