"""The pool's index as a table that goes into a checkpoint, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from gyre_core.experience.contents import SegmentState
from gyre_core.experience.index import INDEX_COLUMNS, GroupIndex
from gyre_core.experience.tables import list_array, split_lists

SNAPSHOT_FORMAT = "snapshot/1"
_ADVANTAGES = pa.list_(pa.float32())


@dataclass(frozen=True, slots=True)
class PoolState:
    """What the pool knows beside its groups; see `Pool` and `AdmissionLedger`."""

    step: int
    watermark: int
    admitted: list[str]
    consumed: int
    quarantined: int


def encode_snapshot(index: GroupIndex, segments: Mapping[int, SegmentState], state: PoolState) -> pa.Table:
    """The index as a table, one row per group in its order; the pool's state goes into the schema's metadata."""
    numbers, positions = index["segment"].tolist(), index["position"].tolist()
    places = list(zip(numbers, positions, strict=True))
    columns: dict[str, Any] = {name: pa.array(index[name]) for name in INDEX_COLUMNS}
    columns |= {
        "group_id": pa.array(index.group_ids, type=pa.string()),
        "request_id": pa.array([segments[number].request_id for number in numbers], type=pa.string()),
        "segment_bytes": pa.array([segments[number].size for number in numbers], type=pa.int64()),
        "advantages": list_array([segments[number].advantages[position] for number, position in places], _ADVANTAGES),
    }
    metadata = {"gyre.format": SNAPSHOT_FORMAT, "gyre.pool": json.dumps(asdict(state))}
    return pa.table(columns, metadata=metadata)


def decode_snapshot(table: pa.Table) -> tuple[GroupIndex, dict[int, SegmentState], PoolState]:
    """The inverse of `encode_snapshot`, with the segments numbered anew and not decoded yet; raises ValueError."""
    metadata = table.schema.metadata or {}
    found = metadata.get(b"gyre.format", b"none").decode()
    if found != SNAPSHOT_FORMAT:
        raise ValueError(f"the pool's snapshot has format {found!r}, and this version reads {SNAPSHOT_FORMAT!r}")
    columns = {name: table[name].to_numpy() for name in INDEX_COLUMNS}
    requests, sizes = table["request_id"].to_pylist(), table["segment_bytes"].to_pylist()
    advantages = split_lists(table["advantages"])
    segments: dict[int, SegmentState] = {}
    numbers = np.empty(len(requests), dtype=np.int64)
    for number, (_, rows) in enumerate(groupby(range(len(requests)), key=requests.__getitem__)):
        members = list(rows)
        numbers[members] = number
        segments[number] = SegmentState(requests[members[0]], sizes[members[0]], [advantages[row] for row in members])
    index = GroupIndex()
    index.append(table["group_id"].to_pylist(), {**columns, "segment": numbers})
    return index, segments, PoolState(**json.loads(metadata[b"gyre.pool"]))
