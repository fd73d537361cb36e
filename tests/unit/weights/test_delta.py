"""Deltas of whole states: what comes back, and what is refused by name."""

import pytest
import torch

from gyre_core.weights.codec import DeltaError
from gyre_core.weights.delta import WeightState, apply_weights, encode_weights
from gyre_core.weights.digests import tensor_digest
from gyre_core.weights.flat import FlatWeights


def state(seed=0):
    """A model's tensors: matrices of both types, a frozen one, a scalar, an empty one, one that is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(50, 40, generator=generator)
    return {
        "layers.1.weight": normal.to(torch.bfloat16),
        "layers.0.weight": normal.t().to(torch.bfloat16),
        "frozen": torch.arange(10, dtype=torch.bfloat16),
        "head": 0.02 * normal[:, ::2],
        "scale": torch.tensor(float("nan")),
        "empty": torch.zeros(0, 3),
    }


def moved(tensors, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor
        if name == "frozen" or not tensor.is_floating_point()
        else tensor + (0.01 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in tensors.items()
    }


def state_of(tensors):
    return WeightState.of(FlatWeights.of(tensors), threads=2)


def digests_of(tensors):
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def test_the_new_state_comes_back_and_the_old_one_stays():
    old, new = state(), moved(state())
    before, after = state_of(old), state_of(new)
    assert after.digests == digests_of(new)
    result = apply_weights(before, encode_weights(before, after, threads=2), threads=2)
    assert result.digests == after.digests == digests_of(result.weights.tensors())
    for name, tensor in result.weights.tensors().items():
        assert tensor.shape == new[name].shape
        assert tensor.dtype == new[name].dtype
    assert digests_of(before.weights.tensors()) == digests_of(old)


def test_a_state_keeps_its_values_in_memory_of_its_own():
    tensors = state()
    flat = FlatWeights.of(tensors)
    tensors["frozen"] += 1
    assert flat.tensors()["frozen"].tolist() == list(range(10))
    assert flat.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    copy = flat.copy()
    copy.tensors()["frozen"].zero_()
    assert flat.tensors()["frozen"].tolist() == list(range(10))


def test_other_tensors_are_refused_by_name():
    old = state()
    reshaped = old | {"head": old["head"].reshape(-1), "added": torch.ones(2)}
    del reshaped["frozen"]
    with pytest.raises(ValueError, match=r"added \(absent before, float32 \[2\] now\), frozen .*head \(float32 \[50"):
        encode_weights(state_of(old), state_of(reshaped))
    with pytest.raises(ValueError, match=r"scale \(float32 \[\] before, bfloat16 \[\] now\)"):
        FlatWeights.of(old).check_same_tensors(FlatWeights.of(old | {"scale": old["scale"].bfloat16()}))


def test_elements_of_another_size_are_refused_by_name():
    with pytest.raises(ValueError, match=r"tensor counter is of torch.int64"):
        FlatWeights.of(state() | {"counter": torch.ones(2, dtype=torch.int64)})


def test_a_delta_of_another_state_is_refused():
    old, new = state_of(state()), state_of(moved(state()))
    delta = encode_weights(old, new)
    renamed = state_of({f"model.{name}": tensor for name, tensor in state().items()})
    for other in (new, renamed):
        with pytest.raises(DeltaError, match="another state"):
            apply_weights(other, delta)


def test_every_byte_counts():
    """One with a bit turned is refused, unless nobody reads that bit; one that is cut short or prolonged always is."""
    tensors = {name: tensor[:4] if tensor.dim() else tensor for name, tensor in state().items()}
    old, new = state_of(tensors), state_of(moved(tensors))
    delta = encode_weights(old, new)
    unread = 0
    for place in range(len(delta)):
        damaged = delta[:place] + bytes([delta[place] ^ (1 << place % 8)]) + delta[place + 1 :]
        try:
            result = apply_weights(old, damaged)
        except DeltaError:
            continue
        unread += 1
        assert digests_of(result.weights.tensors()) == new.digests
    assert unread < 0.05 * len(delta)
    for other in (b"", delta[:1], delta[:40], delta[:-1], delta + b"\0"):
        with pytest.raises(DeltaError):
            apply_weights(old, other)
