"""Arrow's columns as rows of JSON values: what Parquet files and saved data sets have in common."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from gyre_core.data.rows import SourceRow

_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)


def arrow_rows(file: Path, batches: Iterable[pa.RecordBatch]) -> Iterator[SourceRow]:
    """The rows of a file's batches, numbered from 1: structs and maps as objects, times and decimal numbers as text.

    Raises ValueError with file and row for binary values, and with the file for two columns of one name.
    """
    number = 0
    for batch in batches:
        names: list[str] = batch.schema.names
        if len(set(names)) < len(names):
            raise ValueError(f"{file}: two columns have one name ({', '.join(names)}); rename one")
        for values in batch.to_pylist(maps_as_pydicts="strict"):
            number += 1
            source = f"{file}:{number}"
            yield SourceRow(source, {name: _as_json(value, source, name) for name, value in values.items()})


@contextmanager
def reading(file: Path, kind: str) -> Generator[None]:
    """Turn what Arrow and the system raise in the block into a ValueError that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not {kind} that can be read ({error}); write it again") from None


def _as_json(value: Any, source: str, column: str) -> Any:
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value).items()
        return {str(key): _as_json(item, source, column) for key, item in items}
    if isinstance(value, list):
        return [_as_json(item, source, column) for item in cast(list[Any], value)]
    if isinstance(value, _AS_TEXT):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{source}: column '{column}' holds {type(value).__name__}, not text or numbers; leave it out")
