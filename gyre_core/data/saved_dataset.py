"""Rows of data sets that `save_to_disk` of the library `datasets` wrote: Arrow streams, and a list of them in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from gyre_core.data.arrow import arrow_rows, reading
from gyre_core.data.rows import SourceRow

_STATE = "state.json"
_SPLITS = "dataset_dict.json"


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets` saved this folder, as one data set or as several splits."""
    return (folder / _STATE).is_file() or (folder / _SPLITS).is_file()


def read_saved_dataset(folder: Path) -> Iterator[SourceRow]:
    """The rows of a saved data set, `FILE:ROW` from 1; values as `arrow_rows` gives them, class labels as numbers.

    Raises ValueError for a folder of several splits, which it names, for one that cannot be read, and like
    `arrow_rows`.
    """
    for file in _data_files(folder):
        with reading(file, "a part of a saved data set"), pa.memory_map(str(file)) as source:
            yield from arrow_rows(file, pa.ipc.open_stream(source))


def _data_files(folder: Path) -> list[Path]:
    if (folder / _SPLITS).is_file():
        splits: list[str] = json.loads((folder / _SPLITS).read_text())["splits"]
        raise ValueError(f"{folder} holds the splits {', '.join(splits)}; name one of them, as {folder / splits[0]}")
    try:
        state = json.loads((folder / _STATE).read_text())
        files = [folder / part["filename"] for part in state["_data_files"]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{folder / _STATE}: not the list of a saved data set; save the data set again") from None
    if state.get("_indices_data_files"):
        raise ValueError(f"{folder}: its rows are selected by an index; call flatten_indices() and save it again")
    return files
