"""Rows of a data set from a file or folder: picks the reader by the kind of path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from gyre_core.data.jsonl import read_jsonl
from gyre_core.data.parquet import read_parquet
from gyre_core.data.rows import SourceRow
from gyre_core.data.saved_dataset import is_saved_dataset, read_saved_dataset

READERS: dict[str, Callable[[Path], Iterator[SourceRow]]] = {".jsonl": read_jsonl, ".parquet": read_parquet}
"""File name suffix → reader."""
_SPLIT = re.compile(r"(train|validation|valid|val|dev|test)(?![a-z])", re.IGNORECASE)
"""The beginning of a file's name that says which split it holds."""


def read_rows(path: Path, key: str) -> list[SourceRow]:
    """All rows of a file, of a saved data set, or of a folder's files in the order of their names, with one schema.

    Every row gets every column: one that a row lacks is null there. `key` is the setting that holds the path.
    Raises ValueError when there is nothing to read, for a kind of file that has no reader, and for a folder of files
    of several splits.
    """
    if path.is_dir() and is_saved_dataset(path):
        rows = list(read_saved_dataset(path))
    else:
        rows = [row for file in _files(path, key) for row in READERS[file.suffix](file)]
    if not rows:
        raise ValueError(f"{key}: {path} holds no rows")
    columns = list(dict.fromkeys(column for row in rows for column in row.values))
    return [SourceRow(row.source, {column: row.values.get(column) for column in columns}) for row in rows]


def _files(path: Path, key: str) -> list[Path]:
    kinds = ", ".join(sorted(READERS))
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in READERS)
        if not files:
            raise ValueError(f"{key}: the folder {path} holds no data file ({kinds}) and no saved data set")
        splits = sorted({match[1].lower() for file in files if (match := _SPLIT.match(file.name))})
        if len(splits) > 1:
            raise ValueError(f"{key}: the folder {path} holds files of the splits {', '.join(splits)}; name one file")
        return files
    if not path.is_file():
        raise ValueError(f"{key}: there is no file or folder {path}")
    if path.suffix not in READERS:
        raise ValueError(f"{key}: {path} is not of a kind that can be read; its name must end in {kinds}")
    return [path]
