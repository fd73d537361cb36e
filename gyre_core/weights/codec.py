"""Lossless difference of two arrays of weights of the same shape, as bytes; pure.

Between two adjacent policy versions few bf16 weights change, most of them by one unit in the last place, and which ones
is told best by the exponent of the old weight: small weights move, large ones do not. So changes are grouped by that
exponent. Each group's gaps, counted in weights of the group, are Rice coded with a parameter of its own; that is within
a few percent of the entropy, as the gaps of independent changes are distributed geometrically. Directions take a bit a
change, and by how much more than one unit others move is listed. Integer arithmetic on bit patterns throughout: NaN,
infinities, zeros of both signs and denormals are patterns like others.

Weights are coded in chunks, independent of each other, and each in the form that suits it:

- `SAME`: nothing changed; no payload.
- `SPARSE`: as above, where at most one weight in six changed. Payload: number of classes (1 byte); for each class the
  class, the Rice parameter (1 byte each), the changes and the bytes of its quotients (4 bytes each); all quotients; all
  remainders, each class to a whole byte; the moves, as directions and exceptions or as byte planes, whichever is
  shorter.
- `DENSE`: the moves of all weights, as byte planes.
- `RAW`: the new patterns, as byte planes, where that is shorter.

A byte plane holds the i-th bytes of all numbers, compressed by zstd. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gyre_core.weights import kernels

CHUNK = 1 << 24
"""Weights of a chunk."""
SAME, SPARSE, DENSE, RAW = range(4)

RunAll = Callable[..., Iterable[Any]]
"""Applies a function to the items of sequences, as `map` does."""

_Bytes = npt.NDArray[np.uint8]
_SHIFTS = {16: 7, 32: 23}
"""Lowest bit of the exponent: of bf16, and of fp32."""
_HEADER = struct.Struct("<BII")  # form, weights, payload bytes
_CLASS = struct.Struct("<BBII")  # class, Rice parameter, changes, bytes of its quotients
_LENGTH = struct.Struct("<I")
_DOWN, _UP = 1, 2
"""Moves by one unit, in zigzag."""
_MOST_SPARSE = 6
"""A chunk in which more than a weight in so many changed is coded whole."""
_ZSTD = pa.Codec("zstd", compression_level=3)


class DeltaError(ValueError):
    """Bytes that are not the difference of such an array."""


def encode_delta(old: kernels.Bits, new: kernels.Bits, run: RunAll = map) -> bytes:
    """What turns the bit patterns `old` into `new`: `[weights]` both, uint16 (of bf16) or uint32 (of fp32).

    `run` is `map`, or that of a pool of threads, which then share the chunks.
    """
    assert old.dtype == new.dtype and old.shape == new.shape and old.ndim == 1, "two arrays of the same patterns"
    return b"".join(run(_encode_chunk, _chunks(old), _chunks(new)))


def apply_delta(weights: kernels.Bits, delta: bytes | memoryview, run: RunAll = map) -> None:
    """Turn the old patterns into the new ones, in place; `run` is as in `encode_delta`.

    Raises DeltaError for a delta of another array or a damaged one; the weights are then in no defined state.
    """
    reader = _Reader(memoryview(delta))
    chunks = _chunks(weights)
    payloads: list[tuple[int, memoryview]] = []
    for chunk in chunks:
        form, count, length = reader.unpack(_HEADER)
        if count != len(chunk):
            raise DeltaError(f"a chunk of {count} weights where there are {len(chunk)}")
        payloads.append((form, reader.take(length)))
    reader.end()
    for _ in run(_apply_chunk, chunks, payloads):
        pass


def _chunks(weights: kernels.Bits) -> list[kernels.Bits]:
    return [weights[start : start + CHUNK] for start in range(0, len(weights), CHUNK)]


def _encode_chunk(old: kernels.Bits, new: kernels.Bits) -> bytes:
    form, payload = _choose_form(old, new)
    return _HEADER.pack(form, len(old), len(payload)) + payload


def _apply_chunk(weights: kernels.Bits, coded: tuple[int, memoryview]) -> None:
    form, payload = coded[0], _Reader(coded[1])
    if form == SPARSE:
        _apply_sparse(weights, payload)
    elif form == DENSE:
        kernels.apply_all_moves(weights, _width(weights), _read_planes(payload, len(weights), weights.dtype))
    elif form == RAW:
        weights[:] = _read_planes(payload, len(weights), weights.dtype)
    elif form != SAME:
        raise DeltaError(f"unknown form {form}")
    payload.end()


def _choose_form(old: kernels.Bits, new: kernels.Bits) -> tuple[int, bytes]:
    room, bits = len(old) // _MOST_SPARSE + 1, _width(old)
    classes, gaps = np.empty(room, np.uint8), np.empty(room, np.uint32)
    moves = np.empty(room, old.dtype)
    count = int(kernels.split_changes(old, new, bits, _SHIFTS[bits], classes, gaps, moves))
    if count == 0:
        return SAME, b""
    if count > 0:
        return SPARSE, _encode_sparse(classes[:count], gaps[:count], moves[:count])
    moves = np.empty_like(old)
    kernels.all_moves(old, new, bits, moves)
    dense, raw = _write_planes(moves), _write_planes(new)
    return (DENSE, dense) if len(dense) <= len(raw) else (RAW, raw)


def _encode_sparse(classes: _Bytes, gaps: npt.NDArray[np.uint32], moves: kernels.Bits) -> bytes:
    order = np.argsort(classes, kind="stable")
    counts = np.bincount(classes, minlength=256)
    gaps, moves = gaps[order], moves[order]
    headers: list[bytes] = []
    quotients: list[bytes] = []
    remainders: list[bytes] = []
    start = 0
    for exponent in np.flatnonzero(counts).tolist():
        mine = gaps[start : start + counts[exponent]]
        start += len(mine)
        parameter = _rice_parameter(mine)
        bits = int((mine >> parameter).sum(dtype=np.int64)) + len(mine)
        written = np.zeros(_whole_bytes(bits), np.uint8), np.zeros(_whole_bytes(parameter * len(mine)), np.uint8)
        kernels.write_rice(mine, parameter, *written)
        headers.append(_CLASS.pack(exponent, parameter, len(mine), len(written[0])))
        quotients.append(written[0].tobytes())
        remainders.append(written[1].tobytes())
    return b"".join([bytes([len(headers) - 1]), *headers, *quotients, *remainders, _write_moves(moves)])


def _apply_sparse(weights: kernels.Bits, payload: _Reader) -> None:
    (last,) = payload.take(1)
    headers = [payload.unpack(_CLASS) for _ in range(last + 1)]
    counts = np.zeros(256, np.int64)
    for exponent, parameter, count, _ in headers:
        if counts[exponent] or not count or parameter > 31:
            raise DeltaError("a class that is there twice, is empty, or has an impossible parameter")
        counts[exponent] = count
    total = int(counts.sum())
    if total > len(weights) or [header[0] for header in headers] != sorted(header[0] for header in headers):
        raise DeltaError(f"{total} changes of {len(weights)} weights, or classes out of order")
    quotients = [np.frombuffer(payload.take(length), np.uint8) for *_, length in headers]
    gaps, start = np.empty(total, np.int64), 0
    for (_, parameter, count, _), mine in zip(headers, quotients, strict=True):
        remainders = np.frombuffer(payload.take(_whole_bytes(parameter * count)), np.uint8)
        if not kernels.read_rice(mine, remainders, parameter, gaps[start : start + count]):
            raise DeltaError("gaps end too early")
        start += count
    (planes,) = payload.take(1)
    read_moves = _read_planes if planes else _read_directions
    moves = read_moves(payload, total, weights.dtype)
    starts = np.concatenate([[0], np.cumsum(counts)])
    if not kernels.apply_changes(weights, _width(weights), _SHIFTS[_width(weights)], starts, gaps, moves):
        raise DeltaError("changes beyond the last weight")


def _rice_parameter(gaps: npt.NDArray[np.uint32]) -> int:
    """The parameter that takes the fewest bits, near that for a geometric distribution of this mean (ln 2 of it)."""
    near = round(float(np.log2(max(0.69 * float(gaps.mean(dtype=np.float64)), 1.0))))
    candidates = range(max(0, near - 1), near + 2)
    return min(candidates, key=lambda parameter: parameter * len(gaps) + int((gaps >> parameter).sum(dtype=np.int64)))


def _write_moves(moves: kernels.Bits) -> bytes:
    """As directions and exceptions, or where these are many, as byte planes if that is shorter."""
    directions = b"\0" + _write_directions(moves)
    if np.count_nonzero(moves > _UP) * 4 < len(moves):
        return directions
    return min(directions, b"\1" + _write_planes(moves), key=len)


def _write_directions(moves: kernels.Bits) -> bytes:
    """A bit for each move, one for up (even in zigzag); of those by more than one unit places, and how many more."""
    others = np.flatnonzero(moves > _UP)
    gaps = np.diff(others, prepend=-1).astype(np.uint32)
    directions = np.packbits(moves & 1 == 0, bitorder="little").tobytes()
    more = (moves[others] - _UP - 1) >> 1
    return b"".join([directions, _LENGTH.pack(len(others)), _write_planes(gaps), _write_planes(more)])


def _read_directions(payload: _Reader, count: int, dtype: np.dtype[Any]) -> kernels.Bits:
    directions = np.frombuffer(payload.take(_whole_bytes(count)), np.uint8)
    moves = (_DOWN + np.unpackbits(directions, count=count, bitorder="little")).astype(dtype)
    (others,) = payload.unpack(_LENGTH)
    if others > count:
        raise DeltaError(f"{others} exceptions of {count} changes")
    places = np.cumsum(_read_planes(payload, others, np.dtype(np.uint32)).astype(np.int64)) - 1
    if others and (places[-1] >= count or places[0] < 0):
        raise DeltaError("an exception beyond the last change")
    moves[places] += 2 * (1 + _read_planes(payload, others, dtype))
    return moves


def _write_planes(numbers: npt.NDArray[Any]) -> bytes:
    columns = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, numbers.itemsize)
    planes = [_ZSTD.compress(np.ascontiguousarray(column).data, asbytes=True) for column in columns.T]
    return b"".join([_LENGTH.pack(len(plane)) + plane for plane in planes]) if len(numbers) else b""


def _read_planes(payload: _Reader, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    numbers = np.empty((count, dtype.itemsize), np.uint8)
    for plane in range(dtype.itemsize if count else 0):
        (length,) = payload.unpack(_LENGTH)
        try:
            data = _ZSTD.decompress(payload.take(length), decompressed_size=count, asbytes=True)
        except (OSError, pa.ArrowInvalid) as error:
            raise DeltaError(f"a byte plane cannot be read: {error}") from error
        if len(data) != count:
            raise DeltaError(f"a byte plane of {len(data)} numbers instead of {count}")
        numbers[:, plane] = np.frombuffer(data, np.uint8)
    return numbers.view(dtype).reshape(-1)


def _width(patterns: kernels.Bits) -> int:
    return 8 * patterns.dtype.itemsize


def _whole_bytes(bits: int) -> int:
    return (bits + 7) // 8


class _Reader:
    """Takes bytes one after the other, and never beyond their end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, length: int) -> memoryview:
        if length > len(self._data) - self._at:
            raise DeltaError("it ends too early")
        self._at += length
        return self._data[self._at - length : self._at]

    def unpack(self, layout: struct.Struct) -> Sequence[Any]:
        return layout.unpack(self.take(layout.size))

    def end(self) -> None:
        if self._at != len(self._data):
            raise DeltaError(f"{len(self._data) - self._at} bytes too many")
