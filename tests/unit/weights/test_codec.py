"""The delta codec is lossless over any bit patterns, small where few weights move, and safe on damaged input."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gyre_core.weights import codec
from gyre_core.weights.codec import DeltaError, apply_delta, encode_delta

TYPES = [np.uint16, np.uint32]
SPECIAL = {
    np.uint16: [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7FC0, 0x7FFF, 0xFFFF, 0x7F7F, 0xFF7F, 0x3F80],
    np.uint32: [
        *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001),
        *(0x7FFFFFFF, 0xFFFFFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000),
    ],
}
"""Zeros of both signs, denormals, infinities, quiet and signalling NaNs with payloads, and the largest numbers."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(codec, "CHUNK", 1000)


def patterns(dtype, size):
    """Arrays of anything, with more special values than chance would bring."""
    any_pattern = st.integers(0, np.iinfo(dtype).max)
    return hnp.arrays(dtype, size, elements=any_pattern | st.sampled_from(SPECIAL[dtype]))


def round_trip(old, new):
    before = old.copy(), new.copy()
    delta = encode_delta(old, new)
    assert np.array_equal(old, before[0])
    assert np.array_equal(new, before[1])
    result = old.copy()
    apply_delta(result, delta)
    assert np.array_equal(result, new)
    return delta


def weights(dtype, count, seed=0):
    """Patterns of normally distributed weights."""
    drawn = (0.03 * np.random.default_rng(seed).standard_normal(count)).astype(np.float32).view(np.uint32)
    return drawn if dtype == np.uint32 else (drawn >> 16).astype(np.uint16)


def step(old, share, seed=1, largest=1):
    """The weights after some of them moved by up to `largest` units."""
    rng = np.random.default_rng(seed)
    moves = rng.integers(1, largest + 1, len(old)) * rng.choice([-1, 1], len(old)) * (rng.random(len(old)) < share)
    return (old.astype(np.int64) + moves).astype(old.dtype)


@pytest.mark.parametrize("dtype", TYPES)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_patterns_come_back(dtype, data):
    size = data.draw(st.integers(0, 40) | st.sampled_from([999, 1000, 1001, 2500]))
    old = data.draw(patterns(dtype, size))
    changed = data.draw(hnp.arrays(bool, size))
    new = np.where(changed, data.draw(patterns(dtype, size)), old)
    round_trip(old, new)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_special_value_becomes_every_other(dtype):
    pairs = [(old, new) for old in SPECIAL[dtype] for new in SPECIAL[dtype]]
    padding = [(0x3F80, 0x3F80)] * 800  # So few change that they are coded one by one.
    for many in (pairs, pairs[:100] + padding):
        old, new = (np.array(side, dtype) for side in zip(*many, strict=True))
        round_trip(old, new)


def test_all_pairs_of_a_bf16_and_its_neighbours():
    every = np.arange(1 << 16, dtype=np.uint16)
    for offset in (1, -1, 2, 0x8000):
        round_trip(every, every + np.uint16(offset % (1 << 16)))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("largest", [1, 3, 1000])
def test_weights_of_any_density_of_changes_come_back(dtype, share, largest):
    old = weights(dtype, 5000)
    round_trip(old, step(old, share, largest=largest))


@pytest.mark.parametrize("dtype", TYPES)
def test_each_form_is_used_where_it_is_shorter(dtype):
    old = weights(dtype, 1000)
    noise = np.random.default_rng(2).integers(0, np.iinfo(dtype).max, 1000, dtype=dtype)
    cases = {
        codec.SAME: old,
        codec.SPARSE: step(old, 0.05),
        codec.DENSE: step(old, 0.9),
        codec.RAW: np.zeros_like(old),
    }
    assert {form: round_trip(old, new)[0] for form, new in cases.items()} == {form: form for form in cases}
    assert len(round_trip(old, noise)) < old.nbytes + 200


def test_changes_that_go_with_the_exponent_take_what_their_entropy_says(monkeypatch):
    """Weights of class c move with probability p(c): no code is shorter than the sum of their entropies."""
    monkeypatch.setattr(codec, "CHUNK", 1 << 24)
    old = weights(np.uint16, 1 << 22)
    exponent = ((old >> 7) & 255).astype(int)
    probability = np.minimum(0.3, 0.02 * 2.0 ** (118 - exponent))
    rng = np.random.default_rng(3)
    moved = rng.random(len(old)) < probability
    new = np.where(moved, old + rng.choice([1, 0xFFFF], len(old)).astype(np.uint16), old)
    bits = moved.sum()  # A direction each.
    for value in np.unique(exponent):
        share = moved[exponent == value].mean()
        if 0 < share < 1:
            bits += (exponent == value).sum() * -(share * np.log2(share) + (1 - share) * np.log2(1 - share))
    assert 0.95 <= bits / 8 / len(round_trip(old, new)) <= 1.0


@pytest.mark.parametrize("dtype", TYPES)
def test_a_pool_of_threads_writes_and_reads_the_same(dtype):
    from concurrent.futures import ThreadPoolExecutor

    old = weights(dtype, 10_500)
    new = step(old, 0.05, largest=3)
    with ThreadPoolExecutor(3) as pool:
        delta = encode_delta(old, new, pool.map)
        assert delta == encode_delta(old, new)
        apply_delta(old, delta, pool.map)
    assert np.array_equal(old, new)


@pytest.mark.parametrize("share", [0.05, 0.9])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_are_refused_or_give_other_weights_but_never_more(share, data):
    """Whatever the bytes say, nothing is read or written beyond the array; a digest tells wrong weights apart."""
    old = weights(np.uint16, 1500)
    delta = bytearray(encode_delta(old, step(old, share, largest=3)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(delta) - 1) | st.integers(0, 40))
        delta[min(place, len(delta) - 1)] = data.draw(st.integers(0, 255))
    end = data.draw(st.just(len(delta)) | st.integers(0, len(delta)))
    guarded = np.full(1500 + 64, 0xABCD, np.uint16)
    guarded[32:-32] = old
    with contextlib.suppress(DeltaError):
        apply_delta(guarded[32:-32], bytes(delta[:end]))
    assert (guarded[:32] == 0xABCD).all()
    assert (guarded[-32:] == 0xABCD).all()


def test_a_delta_of_another_length_is_refused():
    old = weights(np.uint16, 2000)
    delta = encode_delta(old, step(old, 0.05))
    for length in (0, 1000, 1999, 2001, 3000):
        with pytest.raises(DeltaError):
            apply_delta(np.zeros(length, np.uint16), delta)
    with pytest.raises(DeltaError, match="bytes too many"):
        apply_delta(old, delta + b"\0")
