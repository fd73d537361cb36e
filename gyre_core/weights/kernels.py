"""Compiled loops of the delta codec over bit patterns of weights; pure, and safe on hostile input.

A *class* is the exponent of the old weight, bits `shift` to `shift + 7` of its pattern; a *gap* is the number of
unchanged weights of the class between two changed ones. A *move* is the difference of two patterns on the line of
floating-point numbers, in units in the last place and modulo 2^bits, with its sign in the lowest bit (zigzag).
All run without Python's lock, so that threads share the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit  # pyright: ignore[reportMissingTypeStubs]

Bits = npt.NDArray[Any]
"""Bit patterns of weights, uint16 or uint32: `[weights]`."""


def _compiled(function: Callable[..., Any]) -> Any:
    """Compiled for a start that costs nothing, or for this process alone where nothing can be kept."""
    try:
        return njit(function, cache=True, nogil=True)
    except RuntimeError:  # No folder for it can be written to.
        return njit(function, nogil=True)


_NEVER = 1 << 62


@_compiled
def _move(old: int, new: int, bits: int) -> int:
    top, mask = 1 << (bits - 1), (1 << bits) - 1
    before = old ^ (mask if old & top else top)
    after = new ^ (mask if new & top else top)
    difference = (after - before) & mask
    if difference & top:
        difference -= mask + 1
    return ((difference << 1) ^ (difference >> 63)) & mask


@_compiled
def _moved(old: int, move: int, bits: int) -> int:
    top, mask = 1 << (bits - 1), (1 << bits) - 1
    place = (old ^ (mask if old & top else top)) + ((move >> 1) ^ -(move & 1))
    place &= mask
    return place ^ (top if place & top else mask)


@_compiled
def split_changes(old: Bits, new: Bits, bits: int, shift: int, classes: Bits, gaps: Bits, moves: Bits) -> int:
    """Write the class, gap and move of each change, in order; returns their number, or -1 if they do not fit."""
    run = np.zeros(256, np.uint32)
    count, room = 0, len(moves)
    for index in range(len(old)):
        pattern = np.int64(old[index])
        exponent = (pattern >> shift) & 255
        if old[index] == new[index]:
            run[exponent] += np.uint32(1)
        else:
            if count == room:
                return -1
            classes[count] = exponent
            gaps[count] = run[exponent]
            moves[count] = _move(pattern, np.int64(new[index]), bits)
            run[exponent] = 0
            count += 1
    return count


@_compiled
def apply_changes(weights: Bits, bits: int, shift: int, starts: Bits, gaps: Bits, moves: Bits) -> bool:
    """Move the weights in place; `starts[c]` to `starts[c + 1]` are the changes of class c.

    Returns False when there are changes beyond the last weight of a class.
    """
    at = starts[:256].copy()
    left = np.full(256, _NEVER, np.int64)
    for exponent in range(256):
        if starts[exponent] < starts[exponent + 1]:
            left[exponent] = gaps[starts[exponent]]
    for index in range(len(weights)):
        pattern = np.int64(weights[index])
        exponent = (pattern >> shift) & 255
        if left[exponent] > 0:
            left[exponent] -= 1
            continue
        change = at[exponent]
        weights[index] = _moved(pattern, np.int64(moves[change]), bits)
        at[exponent] = change + 1
        left[exponent] = gaps[change + 1] if change + 1 < starts[exponent + 1] else _NEVER
    return bool((at == starts[1:]).all())


@_compiled
def all_moves(old: Bits, new: Bits, bits: int, moves: Bits) -> None:
    """Write the move of every weight."""
    for index in range(len(old)):
        moves[index] = _move(np.int64(old[index]), np.int64(new[index]), bits)


@_compiled
def apply_all_moves(weights: Bits, bits: int, moves: Bits) -> None:
    """Move every weight in place."""
    for index in range(len(weights)):
        weights[index] = _moved(np.int64(weights[index]), np.int64(moves[index]), bits)


@_compiled
def write_rice(gaps: Bits, parameter: int, quotients: Bits, remainders: Bits) -> None:
    """Rice code of gaps: quotients by 2^parameter as so many zero bits and a one, remainders in `parameter` bits each.

    Both are bit streams, lowest bit first, into arrays of zeros that are long enough.
    """
    mask = (1 << parameter) - 1
    place, held, bits, at = 0, 0, 0, 0  # Fewer than eight bits are held back until their byte is full.
    for gap in gaps:
        place += np.int64(gap) >> parameter
        quotients[place >> 3] |= np.uint8(1 << (place & 7))
        place += 1
        held |= (np.int64(gap) & mask) << bits
        bits += parameter
        while bits >= 8:
            remainders[at] = np.uint8(held & 255)
            held, bits, at = held >> 8, bits - 8, at + 1
    if bits:
        remainders[at] = np.uint8(held)


@_compiled
def read_rice(quotients: Bits, remainders: Bits, parameter: int, gaps: Bits) -> bool:
    """Read as many gaps as there is room for; `remainders` is long enough. False when the quotients end too early."""
    mask = (1 << parameter) - 1
    place, end = 0, 8 * len(quotients)
    held, bits, at = 0, 0, 0
    for index in range(len(gaps)):
        quotient = 0
        while place < end and not (quotients[place >> 3] >> (place & 7)) & 1:
            quotient += 1
            place += 1
        if place >= end:
            return False
        place += 1
        while bits < parameter:
            held |= np.int64(remainders[at]) << bits
            bits, at = bits + 8, at + 1
        gaps[index] = (quotient << parameter) | (held & mask)
        held, bits = held >> parameter, bits - parameter
    return True
