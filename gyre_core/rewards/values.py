"""The contract of a reward function's return value: one number or None per completion, and nothing else."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence, Set
from numbers import Real
from typing import Any, cast

Outcome = float | str | None
"""What a function made of one row: a finite number, None when it abstained, or the reason why the row failed."""


class RewardError(RuntimeError):
    """A reward function that breaks its contract, or fails so widely that its rewards mean nothing."""


def read_values(name: str, returned: object, rows: int) -> list[Outcome]:
    """One outcome per row of what function `name` returned; NaN, infinities and anything else are failures.

    Booleans and the scalars of numpy and torch are numbers. Raises RewardError unless it returned one value per row.
    """
    if isinstance(returned, (str, bytes, Mapping, Set)) or not _has_length(returned):
        kind = type(returned).__name__
        raise RewardError(f"reward function '{name}' returned a value of type {kind}; wanted a list of {rows} values")
    values = cast(Sequence[object], returned)
    if len(values) != rows:
        raise RewardError(
            f"reward function '{name}' returned the wrong number of values: got {len(values)}, wanted {rows}"
        )
    return [_read_value(name, value) for value in values]


def _has_length(value: Any) -> bool:
    try:
        len(value)
    except TypeError:  # Arrays without dimensions have the method, but not a length.
        return False
    return True


def _read_value(name: str, value: Any) -> Outcome:
    if value is None:
        return None
    if not isinstance(value, Real) and hasattr(value, "item"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # More than one element: refused below.
            value = value.item()
    if not isinstance(value, Real):
        return f"reward function '{name}' returned {value!r:.80} ({type(value).__name__}), not a number or None"
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else f"reward function '{name}' returned {number}"
