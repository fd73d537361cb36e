"""The pool's index as a table that goes into a checkpoint, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at one instant: quickly taken, and a table for who keeps it or goes back to it."""

    group_ids: list[str]
    columns: Mapping[str, NDArray[Any]]
    segments: Mapping[int, SegmentState]
    state: PoolState

    @classmethod
    def take(cls, index: GroupIndex, segments: Mapping[int, SegmentState], state: PoolState) -> Snapshot:
        """Copy what may change; what the table says of a segment never does."""
        columns = {name: index[name].copy() for name in INDEX_COLUMNS}
        return cls(list(index.group_ids), columns, dict(segments), state)

    def to_table(self) -> pa.Table:
        """One row per group, in the index's order; the pool's state goes into the schema's metadata."""
        segments = [self.segments[number] for number in self.columns["segment"].tolist()]
        positions = self.columns["position"].tolist()
        advantages = [segment.advantages[position] for segment, position in zip(segments, positions, strict=True)]
        columns: dict[str, Any] = {name: pa.array(values) for name, values in self.columns.items()}
        columns |= {
            "group_id": pa.array(self.group_ids, type=pa.string()),
            "request_id": pa.array([segment.request_id for segment in segments], type=pa.string()),
            "segment_bytes": pa.array([segment.size for segment in segments], type=pa.int64()),
            "advantages": list_array(advantages, _ADVANTAGES),
        }
        metadata = {"gyre.format": SNAPSHOT_FORMAT, "gyre.pool": json.dumps(asdict(self.state))}
        return pa.table(columns, metadata=metadata)


def decode_snapshot(table: pa.Table) -> tuple[GroupIndex, dict[int, SegmentState], PoolState]:
    """The inverse of `Snapshot.to_table`, with the segments numbered anew and not decoded yet; raises ValueError."""
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
