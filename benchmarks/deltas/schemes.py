"""Other ways to store the difference of two states, and the least that any way could take."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Patterns = npt.NDArray[Any]

_ZSTD = pa.Codec("zstd", compression_level=3)
_EXPONENT = {2: 7, 4: 23}


def zstd(array: Patterns) -> int:
    """Bytes of an array by zstd."""
    return len(_ZSTD.compress(np.ascontiguousarray(array).view(np.uint8).data, asbytes=True))


def xor_zstd(old: Patterns, new: Patterns) -> int:
    """Bytes of the exclusive or of the patterns by zstd."""
    return zstd(old ^ new)


def gap_value_zstd(old: Patterns, new: Patterns) -> int:
    """Bytes of the gaps between changed weights and of their new values, each by zstd."""
    places = np.flatnonzero(old != new)
    gaps = (np.diff(places, prepend=-1) - 1).astype(np.uint32)
    return zstd(gaps) + zstd(new[places])


def entropy_bytes(old: Patterns, new: Patterns) -> float:
    """The entropy of the new weights given the exponents of the old ones, in bytes.

    That is of whether a weight changed and of its move, with the frequencies that this very pair shows in each class.
    """
    size = old.dtype.itemsize
    classes = ((old >> _EXPONENT[size]) & 255).astype(np.uint8)
    changed = old != new
    bits = 0.0
    members = np.bincount(classes, minlength=256)
    moved = np.bincount(classes[changed], minlength=256)
    for count, changes in zip(members, moved, strict=True):
        bits += _entropy_bits(np.array([changes, count - changes]))
    moves = new[changed].astype(np.int64) - old[changed].astype(np.int64)
    for exponent in np.flatnonzero(moved):
        _, counts = np.unique(moves[classes[changed] == exponent], return_counts=True)
        bits += _entropy_bits(counts)
    return bits / 8


def _entropy_bits(counts: npt.NDArray[np.int64]) -> float:
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())
