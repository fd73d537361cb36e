"""Rows of JSON Lines files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from gyre_core.data.rows import SourceRow, kind_of


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
