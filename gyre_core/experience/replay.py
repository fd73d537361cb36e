"""The minibatches of steps that were trained on before, made again from their records and segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from gyre_core.experience.cleaning import clean
from gyre_core.experience.consumption import ConsumeRecord, DrawnGroup
from gyre_core.experience.contents import training_group
from gyre_core.experience.segments import read_segment, segment_names
from gyre_core.storage import Storage
from gyre_core.types import Minibatch, TrainingGroup


def request_of(group_id: str) -> str:
    """The request that made a group."""
    return group_id.rpartition("-")[0]


def segment_sizes(storage: Storage, records: Sequence[ConsumeRecord]) -> dict[str, int]:
    """The requests whose segments hold the records' groups, each with the segment's bytes."""
    requests = dict.fromkeys(request_of(group.group_id) for record in records for group in record.groups)
    names = segment_names(storage, requests)
    return {request_id: storage.size(name) for request_id, name in zip(requests, names, strict=True)}


def replayed_minibatches(
    storage: Storage, records: Sequence[ConsumeRecord], smallest_group: int
) -> Iterator[list[Minibatch]]:
    """The minibatches of each record, as the pool gave them when they were trained on.

    Raises FileNotFoundError for a segment that is gone, CorruptSegmentError for one that is damaged, and ValueError for
    one that lacks a group.
    """
    rows: dict[str, TrainingGroup] = {}
    for index, record in enumerate(records):
        missing = {request_of(group.group_id) for group in record.groups if group.group_id not in rows}
        for request_id in sorted(missing):
            for group in clean(read_segment(storage, request_id), smallest_group).groups:
                rows[group.group_id] = training_group(group, np.zeros(len(group.rollouts), np.float32))
        yield [
            Minibatch(tuple(_again(group, rows) for group in minibatch.groups), minibatch.lr, minibatch.kl_coef)
            for minibatch in record.minibatches
        ]
        wanted = {group.group_id for later in records[index + 1 :] for group in later.groups}
        rows = {group_id: group for group_id, group in rows.items() if group_id in wanted}


def _again(drawn: DrawnGroup, rows: dict[str, TrainingGroup]) -> TrainingGroup:
    if drawn.group_id not in rows:
        raise ValueError(f"the segment of request {request_of(drawn.group_id)} has no group {drawn.group_id}")
    return replace(rows[drawn.group_id], advantages=drawn.advantages, weight=drawn.weight)
