"""Rows of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from gyre_core.data.arrow import arrow_rows, reading
from gyre_core.data.rows import SourceRow


def read_parquet(path: Path) -> Iterator[SourceRow]:
    """The rows of a Parquet file, `FILE:ROW` from 1; values as `arrow_rows` gives them.

    Raises ValueError for a file that cannot be read, and like `arrow_rows`.
    """
    with reading(path, "a Parquet file"), pq.ParquetFile(path) as file:
        yield from arrow_rows(path, file.iter_batches())
