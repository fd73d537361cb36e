"""What a step trains on, written down before anything is trained.

A step that is repeated reads the record instead of drawing again, so that it trains on the same groups with the same
weights, advantages, learning rate and KL coefficient. One Parquet object a step, one row per drawn group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gyre_core.experience.tables import CorruptObjectError, TableFormat, decode_table, encode_table, split_lists
from gyre_core.storage import Storage


@dataclass(frozen=True, slots=True)
class DrawnGroup:
    """A group in a minibatch, with the importance weight of the draw and its advantages, `[group]`."""

    group_id: str
    weight: float
    advantages: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DrawnMinibatch:
    """The groups of one optimiser update (at least one), and the coefficients that go with it."""

    groups: tuple[DrawnGroup, ...]
    lr: float
    kl_coef: float


@dataclass(frozen=True, slots=True)
class ConsumeRecord:
    """All minibatches of a step, in the order of training; none when no group was worth training on."""

    step: int
    minibatches: tuple[DrawnMinibatch, ...]

    @property
    def groups(self) -> list[DrawnGroup]:
        """The groups of all minibatches."""
        return [group for minibatch in self.minibatches for group in minibatch.groups]


_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("minibatch", pa.int32(), nullable=False),
        pa.field("lr", pa.float64(), nullable=False),
        pa.field("kl_coef", pa.float64(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("advantages", pa.list_(pa.field("element", pa.float32(), nullable=False)), nullable=False),
    ]
)
CONSUMPTION_FORMAT = TableFormat("consumption/2", _SCHEMA)


def write_consumption(storage: Storage, epoch: int, record: ConsumeRecord) -> None:
    """Publish the step's record; the very same record may be written again.

    Raises FileExistsError when the epoch has another record of this step.
    """
    data = encode_table(records_table([record]), CONSUMPTION_FORMAT, {"step": record.step})
    storage.create(_name(epoch, record.step), data)


def read_consumption(storage: Storage, epoch: int, step: int) -> ConsumeRecord | None:
    """The step's record, or None when the epoch has not drawn it yet; raises CorruptObjectError."""
    name = _name(epoch, step)
    try:
        data = storage.read(name)
    except FileNotFoundError:
        return None
    table, facts = decode_table(data, CONSUMPTION_FORMAT, name)
    if facts.get("step") != step:
        raise CorruptObjectError(name, f"it is the record of step {facts.get('step')}")
    return read_records(table, [step])[0]


def records_table(records: Sequence[ConsumeRecord]) -> pa.Table:
    """The records' groups, one row each, in the order of training; a record without groups leaves no row."""
    rows: list[dict[str, Any]] = []
    for record in records:
        for index, minibatch in enumerate(record.minibatches):
            assert minibatch.groups, f"minibatch {index} of step {record.step} is empty"
            rows.extend(
                {
                    "step": record.step,
                    "minibatch": index,
                    "lr": minibatch.lr,
                    "kl_coef": minibatch.kl_coef,
                    "group_id": group.group_id,
                    "weight": group.weight,
                    "advantages": group.advantages,
                }
                for group in minibatch.groups
            )
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def read_records(table: pa.Table, steps: Sequence[int]) -> list[ConsumeRecord]:
    """The records of these steps, the inverse of `records_table`."""
    columns = {field: table[field].to_pylist() for field in _SCHEMA.names if field != "advantages"}
    advantages = split_lists(table["advantages"])
    minibatches: dict[int, list[DrawnMinibatch]] = {step: [] for step in steps}
    places = zip(columns["step"], columns["minibatch"], strict=True)
    for (step, _), group in groupby(enumerate(places), key=lambda item: item[1]):
        minibatches[step].append(_minibatch(columns, advantages, [row for row, _ in group]))
    return [ConsumeRecord(step, tuple(minibatches[step])) for step in steps]


def _minibatch(
    columns: dict[str, list[Any]], advantages: list[NDArray[np.float32]], rows: Sequence[int]
) -> DrawnMinibatch:
    groups = tuple(DrawnGroup(columns["group_id"][row], columns["weight"][row], advantages[row]) for row in rows)
    return DrawnMinibatch(groups, columns["lr"][rows[0]], columns["kl_coef"][rows[0]])


def _name(epoch: int, step: int) -> str:
    return f"learner/{epoch:04d}/consume-{step:08d}.parquet"
