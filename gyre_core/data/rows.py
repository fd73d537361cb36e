"""Rows of a data set, whatever they lie in, and the types of their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of JSON values, and `source`, the place it came from (`FILE:LINE`), for error messages."""

    source: str
    values: dict[str, Any]


def check_column_types(rows: Sequence[SourceRow], columns: Sequence[str]) -> None:
    """Raise ValueError, naming two rows, for a column whose values are not all null or of one type."""
    for column in columns:
        first: tuple[str, str] | None = None
        for row in rows:
            kind = kind_of(row.values[column])
            if kind == "null":
                continue
            if first is None:
                first = kind, row.source
            elif kind != first[0]:
                raise ValueError(
                    f"{row.source}: column '{column}' holds {kind}, but {first[0]} at {first[1]}; "
                    "write all its values as one type"
                )


def kind_of(value: object) -> str:
    """The JSON type of a value, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "an object"
