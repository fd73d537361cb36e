"""Difference of two states of a model as one object, which says of which state it is and what must come out; pure.

Layout, little-endian: `GYRD`, format (2 bytes), tensors (4 bytes), fingerprint of the old state (16 bytes); xxh3-128 of
each tensor's new elements (16 bytes), in the order of the names; the deltas of all elements of two bytes and of all of
four (`codec.py`), those of two behind their length (8 bytes). Names, types and shapes are those of the old state.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from gyre_core.weights.codec import DeltaError, apply_delta, encode_delta
from gyre_core.weights.digests import tensor_digest
from gyre_core.weights.flat import FlatWeights

FORMAT = 2
_MAGIC = b"GYRD"
_HEADER = struct.Struct("<4sHI16sQ")
_DIGEST_BYTES = 16

Digests = Mapping[str, str]
"""xxh3-128 of each tensor's elements, in hexadecimal, by name."""


@dataclass(frozen=True, slots=True)
class WeightState:
    """A state of a model with the digests of its tensors, in the order of their names."""

    weights: FlatWeights
    digests: Digests

    @classmethod
    def of(cls, weights: FlatWeights, threads: int = 1) -> WeightState:
        """Compute the digests."""
        with ThreadPoolExecutor(threads, thread_name_prefix="digests") as pool:
            return cls(weights, _digests(weights, pool))

    @property
    def fingerprint(self) -> bytes:
        """xxh3-128 over names, types, shapes and digests of all tensors."""
        lines = [f"{name} {spec.kind} {self.digests[name]}\n" for name, spec in self.weights.layout.items()]
        return xxhash.xxh3_128_digest("".join(lines).encode())


def encode_weights(old: WeightState, new: WeightState, threads: int = 1) -> bytes:
    """What turns `old` into `new`.

    Raises ValueError that names the tensors which are there once only, or have another shape or type.
    """
    old.weights.check_same_tensors(new.weights)
    before, after = old.weights.patterns, new.weights.patterns
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        deltas = {size: encode_delta(before[size], after[size], pool.map) if size in after else b"" for size in (2, 4)}
    header = _HEADER.pack(_MAGIC, FORMAT, len(new.digests), old.fingerprint, len(deltas[2]))
    return b"".join([header, *map(bytes.fromhex, new.digests.values()), *deltas.values()])


def apply_weights(old: WeightState, delta: bytes, threads: int = 1) -> WeightState:
    """The new state; `old` stays as it is.

    Raises DeltaError for a delta of another state than `old`, for a damaged one, and one that names the tensors which
    came out with another digest than they should.
    """
    digests, deltas = _read(delta, list(old.weights.layout), old.fingerprint)
    new = old.weights.copy()
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        for size, patterns in new.patterns.items():
            apply_delta(patterns, deltas[size], pool.map)
        found = _digests(new, pool)
    wrong = [name for name, digest in digests.items() if found[name] != digest]
    if wrong:
        raise DeltaError(f"{len(wrong)} tensors have another digest than the delta says, {wrong[0]} the first")
    return WeightState(new, digests)


def _digests(weights: FlatWeights, pool: ThreadPoolExecutor) -> dict[str, str]:
    tensors = weights.tensors()
    return dict(zip(tensors, pool.map(tensor_digest, tensors.values()), strict=True))


def _read(delta: bytes, names: list[str], old: bytes) -> tuple[dict[str, str], dict[int, memoryview]]:
    if len(delta) < _HEADER.size:
        raise DeltaError("the delta ends too early")
    magic, form, count, parent, length = _HEADER.unpack_from(delta)
    if magic != _MAGIC or form != FORMAT:
        raise DeltaError("not a delta, or one of another release of Gyre")
    if parent != old or count != len(names):
        raise DeltaError("a delta of another state than this one")
    body = memoryview(delta)[_HEADER.size :]
    if len(body) < count * _DIGEST_BYTES + length:
        raise DeltaError("the delta ends too early")
    digests = {
        name: body[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES].hex() for index, name in enumerate(names)
    }
    elements = body[count * _DIGEST_BYTES :]
    return digests, {2: elements[:length], 4: elements[length:]}
