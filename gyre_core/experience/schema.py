"""The columns of a segment, one row per completion, and the way from groups to a table and back.

`table_to_groups(groups_to_table(request_id, groups))` gives the groups exactly. Rows of a group lie together; groups
are told apart by their stored id, never by their prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from gyre_core.experience.tables import TableFormat, list_array, split_lists
from gyre_core.types import Completion, PolicyVersion, Prompt, Rollout, RolloutGroup, Score


def _required(name: str, data_type: pa.DataType) -> pa.Field:
    return pa.field(name, data_type, nullable=False)


_TOKENS = pa.list_(_required("element", pa.int32()))
_LOG_PROBABILITIES = pa.list_(_required("element", pa.float32()))
_INTEGERS = pa.list_(_required("element", pa.int32()))

SEGMENT_SCHEMA: pa.Schema = pa.schema(
    [
        _required("request_id", pa.string()),
        _required("group_id", pa.string()),
        _required("prompt_id", pa.string()),
        _required("sample_index", pa.int32()),
        _required("step", pa.int64()),
        _required("version_epoch", pa.int32()),
        _required("version_number", pa.int32()),
        _required("span_epochs", _INTEGERS),
        _required("span_numbers", _INTEGERS),
        _required("span_starts", _INTEGERS),
        _required("prompt", pa.string()),
        _required("columns", pa.string()),
        _required("prompt_text", pa.string()),
        _required("prompt_token_ids", _TOKENS),
        _required("completion_text", pa.string()),
        _required("completion_token_ids", _TOKENS),
        _required("behaviour_log_probabilities", _LOG_PROBABILITIES),
        pa.field("reference_log_probabilities", _LOG_PROBABILITIES),
        _required("reward", pa.float64()),
        _required("reward_parts", pa.map_(pa.string(), pa.float64())),
        _required("reward_status", pa.string()),
        _required("reward_error", pa.string()),
        _required("finish_reason", pa.string()),
        _required("started_at", pa.float64()),
        _required("finished_at", pa.float64()),
    ]
)
"""One row per completion. `version_*` is the policy that the request asked for; the `span_*` lists say which version
generated the tokens from which position on. `prompt` and `columns` are JSON; times are seconds since 1970."""

SEGMENT_FORMAT = TableFormat("segment/1", SEGMENT_SCHEMA)


def groups_to_table(request_id: str, groups: Sequence[RolloutGroup]) -> pa.Table:
    """The groups as a table of SEGMENT_SCHEMA, one row per completion.

    Raises ValueError when a prompt's columns hold something that JSON cannot.
    """
    for group in groups:
        assert group.rollouts, f"group {group.group_id} has no completion"
    rows = [(group, rollout) for group in groups for rollout in group.rollouts]
    completions = [rollout.completion for _, rollout in rows]
    scores = [rollout.score for _, rollout in rows]
    columns: dict[str, Any] = {
        "request_id": [request_id] * len(rows),
        "sample_index": [completion.sample_index for completion in completions],
        "span_epochs": _single_spans([item.version.epoch for item in completions]),
        "span_numbers": _single_spans([item.version.number for item in completions]),
        "span_starts": _single_spans([0] * len(completions)),
        "completion_text": [completion.text for completion in completions],
        "completion_token_ids": list_array([item.token_ids for item in completions], _TOKENS),
        "behaviour_log_probabilities": list_array([item.log_probabilities for item in completions], _LOG_PROBABILITIES),
        "reference_log_probabilities": list_array(
            [rollout.reference_log_probabilities for _, rollout in rows], _LOG_PROBABILITIES
        ),
        "reward": [score.reward for score in scores],
        "reward_parts": [list(score.parts.items()) for score in scores],
        "reward_status": [score.status for score in scores],
        "reward_error": [score.error for score in scores],
        "finish_reason": [completion.finish_reason for completion in completions],
        "started_at": [completion.started_at for completion in completions],
        "finished_at": [completion.finished_at for completion in completions],
        **_group_columns(groups),
    }
    return pa.table([_column(columns[field.name], field.type) for field in SEGMENT_SCHEMA], schema=SEGMENT_SCHEMA)


def table_to_groups(table: pa.Table) -> list[RolloutGroup]:
    """The groups of a table of SEGMENT_SCHEMA, in the table's order.

    Raises ValueError when a group's rows do not lie together, or a completion has another number of version spans
    than one.
    """
    columns = {
        name: split_lists(table[name]) if pa.types.is_list(table.schema.field(name).type) else table[name].to_pylist()
        for name in SEGMENT_SCHEMA.names
    }
    group_ids: list[str] = columns["group_id"]
    starts = [row for row, name in enumerate(group_ids) if row == 0 or name != group_ids[row - 1]]
    if len({group_ids[row] for row in starts}) != len(starts):
        raise ValueError("the rows of a group do not lie together")
    return [_group(columns, start, stop) for start, stop in pairwise([*starts, len(group_ids)])]


def _group_columns(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """The columns that are alike in all rows of a group, each repeated for every one of them."""
    repeats = [len(group.rollouts) for group in groups]
    index = pa.array(np.repeat(np.arange(len(groups)), repeats))
    prompts = [group.prompt for group in groups]
    single: dict[str, Any] = {
        "group_id": [group.group_id for group in groups],
        "prompt_id": [prompt.prompt_id for prompt in prompts],
        "step": [group.step for group in groups],
        "version_epoch": [group.version.epoch for group in groups],
        "version_number": [group.version.number for group in groups],
        "prompt": [_json(prompt, prompt.prompt) for prompt in prompts],
        "columns": [_json(prompt, dict(prompt.columns)) for prompt in prompts],
        "prompt_text": [prompt.text for prompt in prompts],
        "prompt_token_ids": list_array([prompt.token_ids for prompt in prompts], _TOKENS),
    }
    types = {field.name: field.type for field in SEGMENT_SCHEMA}
    return {name: _column(values, types[name]).take(index) for name, values in single.items()}


def _column(values: Any, data_type: pa.DataType) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, type=data_type)


def _single_spans(values: Sequence[int]) -> pa.ListArray:
    """A list of one integer for each of `values`."""
    return pa.ListArray.from_arrays(np.arange(len(values) + 1, dtype=np.int32), pa.array(values, pa.int32()), _INTEGERS)


def _json(prompt: Prompt, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"prompt {prompt.prompt_id!r} has a column that cannot be stored as JSON: {error}") from error


def _group(columns: Mapping[str, Any], start: int, stop: int) -> RolloutGroup:
    prompt = Prompt(
        prompt_id=columns["prompt_id"][start],
        prompt=json.loads(columns["prompt"][start]),
        text=columns["prompt_text"][start],
        token_ids=columns["prompt_token_ids"][start],
        columns=json.loads(columns["columns"][start]),
    )
    return RolloutGroup(
        group_id=columns["group_id"][start],
        prompt=prompt,
        step=columns["step"][start],
        version=PolicyVersion(columns["version_epoch"][start], columns["version_number"][start]),
        rollouts=tuple(_rollout(columns, row) for row in range(start, stop)),
    )


def _rollout(columns: Mapping[str, Any], row: int) -> Rollout:
    epochs, numbers = columns["span_epochs"][row], columns["span_numbers"][row]
    if not len(epochs) == len(numbers) == 1:
        raise ValueError(f"row {row} was generated by {len(epochs)} policy versions; only one is supported")
    completion = Completion(
        group_id=columns["group_id"][row],
        sample_index=columns["sample_index"][row],
        token_ids=columns["completion_token_ids"][row],
        log_probabilities=columns["behaviour_log_probabilities"][row],
        text=columns["completion_text"][row],
        finish_reason=columns["finish_reason"][row],
        version=PolicyVersion(int(epochs[0]), int(numbers[0])),
        started_at=columns["started_at"][row],
        finished_at=columns["finished_at"][row],
    )
    score = Score(
        parts=dict(columns["reward_parts"][row]),
        reward=columns["reward"][row],
        status=columns["reward_status"][row],
        error=columns["reward_error"][row],
    )
    return Rollout(completion, score, columns["reference_log_probabilities"][row])
