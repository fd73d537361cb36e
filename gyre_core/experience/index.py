"""The owner's index: one row per group in memory, as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest


class GroupState(IntEnum):
    """What became of a group; only live ones are drawn."""

    LIVE = 0
    DEAD = 1
    """All its rewards are equal, and such groups are skipped."""
    USED = 2
    """Trained on as often as allowed."""
    EXPIRED = 3
    """Older than the time window."""
    EVICTED = 4
    """Made room for newer groups."""


INDEX_COLUMNS: Mapping[str, Any] = {
    "segment": np.int64,
    "position": np.int32,
    "prompt": np.uint64,
    "samples": np.int32,
    "version_epoch": np.int32,
    "version_number": np.int32,
    "admitted_at": np.float64,
    "mean_reward": np.float64,
    "spread": np.float64,
    "policy_change": np.float64,
    "uses": np.int32,
    "state": np.int8,
}
"""`segment` is the pool's number of the segment and `position` the group's place among its clean groups; `prompt` is
`prompt_key` of the prompt's id; `samples` counts clean rows; times are seconds on the pool's clock."""


def prompt_key(prompt_id: str) -> int:
    """A prompt's identity as a number, the same in every process."""
    return xxh3_64_intdigest(prompt_id.encode())


class GroupIndex:
    """Columns over all groups, `[groups]`, in the order of admission; `index["uses"]` is a writable view."""

    def __init__(self) -> None:
        self.group_ids: list[str] = []
        self._rows: dict[str, int] = {}
        self._columns: dict[str, NDArray[Any]] = {name: np.empty(0, kind) for name, kind in INDEX_COLUMNS.items()}

    def __len__(self) -> int:
        return len(self.group_ids)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._rows

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self._columns[column][: len(self)]

    def row(self, group_id: str) -> int:
        """The group's row; raises ValueError when the pool does not hold it."""
        try:
            return self._rows[group_id]
        except KeyError:
            raise ValueError(f"the pool does not hold group {group_id!r}; it was used, expired or evicted") from None

    def append(self, group_ids: Sequence[str], columns: Mapping[str, Any]) -> None:
        """Add rows; `columns` has every column of INDEX_COLUMNS, as a sequence or one value for all."""
        start, stop = len(self), len(self) + len(group_ids)
        for name, values in columns.items():
            if stop > len(self._columns[name]):
                grown = np.empty(2 * stop, INDEX_COLUMNS[name])
                grown[:start] = self[name]
                self._columns[name] = grown
            self._columns[name][start:stop] = values
        self._rows.update({group_id: start + offset for offset, group_id in enumerate(group_ids)})
        self.group_ids.extend(group_ids)
        assert len(self._rows) == len(self.group_ids), "group ids are unique in a run"

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the rows where `mask`, `[groups]`, is false."""
        self._columns = {name: self[name][mask] for name in self._columns}
        self.group_ids = [group_id for group_id, kept in zip(self.group_ids, mask.tolist(), strict=True) if kept]
        self._rows = {group_id: row for row, group_id in enumerate(self.group_ids)}

    def live(self) -> NDArray[np.int64]:
        """The rows that may still be drawn."""
        return np.flatnonzero(self["state"] == GroupState.LIVE)
