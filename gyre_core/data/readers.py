"""Rows of a data set as they lie in files; one reader per kind of file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row, and `source`, the place it came from (`FILE:LINE`), for error messages."""

    source: str
    values: dict[str, Any]


def read_jsonl(path: Path) -> Iterator[SourceRow]:
    """The objects of a JSON Lines file (UTF-8, one a line; blank lines are skipped).

    Raises ValueError with file and line for a line that is not a JSON object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            source = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig").strip()
                if not text:
                    continue
                values = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{source}: not a line of JSON ({error}); write one JSON object per line") from None
            if not isinstance(values, dict):
                raise ValueError(f"{source}: holds {kind_of(values)}; write one JSON object per line")
            yield SourceRow(source, cast(dict[str, Any], values))


READERS: dict[str, Callable[[Path], Iterator[SourceRow]]] = {".jsonl": read_jsonl}
"""File name suffix → reader."""


def read_rows(path: Path, key: str) -> list[SourceRow]:
    """All rows of a file, or of a folder's files in the order of their names, with one schema.

    Every row gets every column: one that a row lacks is null there. `key` is the setting that holds the path.
    Raises ValueError when there is nothing to read, for a kind of file that has no reader, and for a column
    that changes its type.
    """
    rows = [row for file in _files(path, key) for row in READERS[file.suffix](file)]
    if not rows:
        raise ValueError(f"{key}: {path} holds no rows")
    columns = list(dict.fromkeys(column for row in rows for column in row.values))
    return [SourceRow(row.source, {column: row.values.get(column) for column in columns}) for row in rows]


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


def _files(path: Path, key: str) -> list[Path]:
    kinds = ", ".join(sorted(READERS))
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in READERS)
        if not files:
            raise ValueError(f"{key}: the folder {path} holds no data file ({kinds})")
        return files
    if not path.is_file():
        raise ValueError(f"{key}: there is no file or folder {path}")
    if path.suffix not in READERS:
        raise ValueError(f"{key}: {path} is not of a kind that can be read; its name must end in {kinds}")
    return [path]
