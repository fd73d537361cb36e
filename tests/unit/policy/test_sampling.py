"""The distribution that engine and learner share, and the noise that picks from it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.policy.sampling import group_key, sample_tokens, truncated_log_probabilities, uniform


def reference(logits, temperature, top_p, top_k):
    """The same distribution for one row in float64 by plain loops."""
    scaled = [value / temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    order = order[:top_k] if top_k else order
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in order}
    total, mass, kept = sum(weights.values()), 0.0, []
    for token in order:
        if kept and top_p < 1.0 and mass >= top_p - 1e-6:
            break
        kept.append(token)
        mass += weights[token] / total
    kept_total = sum(weights[token] for token in kept)
    return [math.log(weights[token] / kept_total) if token in kept else -math.inf for token in range(len(logits))]


def test_temperature_scales_before_the_softmax():
    result = truncated_log_probabilities(torch.tensor([[2.0, 0.0]]), 0.5, 1.0, 0)
    assert result[0, 0].item() == pytest.approx(-0.0181, abs=5e-5)


def test_top_p_renormalises_over_what_survives():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    result = truncated_log_probabilities(logits, 1.0, 0.8, 0)
    assert result[0, 0].item() == pytest.approx(-0.470, abs=5e-4)
    assert result[0, 2].item() == -math.inf
    plain = truncated_log_probabilities(logits, 1.0, 1.0, 0)
    assert plain[0, 0].item() == pytest.approx(-0.693, abs=5e-4)
    assert math.exp(plain[0, 0] - result[0, 0]) == pytest.approx(0.8, abs=1e-6)


@settings(deadline=None, max_examples=200)
@given(
    rank=st.permutations(range(12)),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.5]),
    top_p=st.sampled_from([1e-9, 0.31, 0.5, 0.83, 0.95, 1.0]),
    top_k=st.integers(0, 14),
)
def test_equals_a_float64_reference(rank, temperature, top_p, top_k):
    logits = [0.37 * place for place in rank]
    result = truncated_log_probabilities(torch.tensor([logits]), temperature, top_p, top_k)[0]
    np.testing.assert_allclose(result.numpy(), reference(logits, temperature, top_p, top_k), atol=1e-5)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.6, 0), (1.0, 3), (0.9, 7)])
def test_masses_sum_to_one_and_rows_do_not_mix(top_p, top_k):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 3
    together = truncated_log_probabilities(logits, 0.8, top_p, top_k)
    np.testing.assert_allclose(together.exp().sum(-1).numpy(), 1.0, atol=1e-6)
    for row in range(6):
        assert torch.equal(
            together[row : row + 1], truncated_log_probabilities(logits[row : row + 1], 0.8, top_p, top_k)
        )


def test_the_likeliest_token_always_stays():
    logits = torch.zeros(1, 1000)
    logits[0, 17] = 0.01
    assert truncated_log_probabilities(logits, 1.0, 1e-9, 0)[0, 17].item() == 0.0


def test_top_k_keeps_k_of_equal_tokens():
    assert int(truncated_log_probabilities(torch.zeros(1, 9), 1.0, 1.0, 4).isfinite().sum()) == 4


def test_bfloat16_logits_are_normalised_in_float32():
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1)).bfloat16()
    result = truncated_log_probabilities(logits, 1.0, 1.0, 0)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.double().numpy(), logits.double().log_softmax(-1).numpy(), atol=1e-5)


def noise(seed, groups, samples, positions):
    keys = np.array([group_key(group) for group in groups], dtype=np.uint64)
    return uniform(seed, keys, np.asarray(samples), np.asarray(positions))


def test_noise_does_not_depend_on_what_else_is_drawn():
    groups, samples, positions = ["a", "b", "a", "c"], [0, 3, 1, 2], [5, 0, 5, 900]
    together = noise(7, groups, samples, positions)
    alone = [noise(7, [g], [s], [p])[0] for g, s, p in zip(groups, samples, positions, strict=True)]
    assert together.tolist() == alone


def test_every_argument_of_the_noise_counts():
    draws = [
        noise(seed, [group], [sample], [position])[0]
        for seed in (0, 1, 2**40)
        for group in ("a", "b")
        for sample in (0, 1)
        for position in (0, 1)
    ]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("vary", ["groups", "samples", "positions"])
def test_noise_is_uniform_along_each_argument(vary):
    """Chi-square over 64 cells of 64,000 draws: 63 degrees of freedom, below 120 but for one draw in 10^5."""
    count = 64_000
    constant, running = np.zeros(count, dtype=np.int64), np.arange(count)
    keys = np.full(count, group_key("g"), dtype=np.uint64)
    if vary == "groups":
        keys = np.array([group_key(str(index)) for index in range(count)], dtype=np.uint64)
    draws = uniform(3, keys, running if vary == "samples" else constant, running if vary == "positions" else constant)
    assert draws.min() > 0.0
    assert draws.max() < 1.0
    cells = np.histogram(draws, bins=64, range=(0.0, 1.0))[0]
    assert ((cells - 1000) ** 2 / 1000).sum() < 120
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02


def test_tokens_are_taken_by_the_inverse_of_the_cumulative_distribution():
    distribution = torch.tensor([0.25, 0.0, 0.5, 0.25]).log().expand(6, 4)
    points = torch.tensor([1e-12, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(distribution, points).tolist() == [0, 0, 2, 2, 3, 3]


def test_an_even_grid_of_points_gives_the_probabilities():
    log_probabilities = torch.randn(1, 30, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    count = 100_000
    points = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    shares = np.bincount(sample_tokens(log_probabilities.expand(count, 30), points), minlength=30) / count
    np.testing.assert_allclose(shares, log_probabilities[0].exp().numpy(), atol=2 / count + 1e-6)
