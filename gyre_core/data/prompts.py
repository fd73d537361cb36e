"""The prompts of a run: training, held-out and warm-start rows, and their tokens."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gyre_core.config.paths import TASK_PREFIX
from gyre_core.config.sections import DataConfig
from gyre_core.data.messages import PromptValue, read_prompt, shape_prompt, without_null_keys
from gyre_core.data.readers import read_rows
from gyre_core.data.reasoning_gym import read_reasoning_gym
from gyre_core.data.rows import SourceRow, check_column_types, kind_of
from gyre_core.types import Prompt, Tokens

ARITHMETIC = "arithmetic"
"""Value of `data.path` that stands for the built-in sums."""
ARITHMETIC_PROMPTS = 10_000
"""Distinct built-in sums there are: 00+00= to 99+99=."""
ID_COLUMN = "id"
"""Column that names rows, where there is one."""

Render = Callable[[PromptValue], tuple[str, Tokens]]
"""Turns a prompt into the text that the model sees and its token ids `[prompt]`."""

_SPLIT_STREAM = 2
"""Sets the generator of the splits apart from the cursor's."""
_TASK_STREAM = 5
"""And that of the tasks' seeds apart from all others."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row before it has tokens; fields as in `Prompt`. `source` says where it came from."""

    prompt_id: str
    prompt: PromptValue
    columns: Mapping[str, Any]
    source: str


@dataclass(frozen=True, slots=True)
class PromptSplits:
    """The rows of a run; no prompt is in two splits.

    `warm_start` is empty unless the prompts are the built-in ones. `duplicates` counts training rows that repeat an
    earlier one in every column: they are kept. `overlapping` counts rows that were left out of training because their
    prompt is held out.
    """

    training: tuple[PromptRow, ...]
    evaluation: tuple[PromptRow, ...]
    warm_start: tuple[PromptRow, ...] = ()
    duplicates: int = 0
    overlapping: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns, beside the prompt, that training and held-out rows both have."""
        evaluation = self.evaluation or self.training
        return tuple(column for column in self.training[0].columns if column in evaluation[0].columns)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts with tokens, and how many rows were dropped because they are longer than allowed."""

    prompts: tuple[Prompt, ...]
    too_long: int


def load_prompts(config: DataConfig, seed: int) -> PromptSplits:
    """Read, check and split the prompts of a run; a function of the data and the seed.

    Raises ValueError for unreadable data, naming file and line, and for too few rows to split.
    """
    rows = arithmetic_rows(seed) if config.path == ARITHMETIC else _read_training(config, seed)
    if config.evaluation_path is not None:
        evaluation = _read_evaluation(config, config.evaluation_path, seed)
    elif config.path == ARITHMETIC or config.path.startswith(TASK_PREFIX):
        evaluation, rows = rows[: config.evaluation_size], rows[config.evaluation_size :]
    else:
        evaluation, rows = _hold_out(rows, config, seed)
    held_out = {_canonical(row.prompt) for row in evaluation}
    training = [row for row in rows if _canonical(row.prompt) not in held_out]
    overlapping = len(rows) - len(training)
    warm_start: list[PromptRow] = []
    if config.path == ARITHMETIC:
        training, warm_start = training[: config.size], training[config.size :]
        if len(training) < config.size:
            raise ValueError(
                f"data.size: {config.size} training prompts are wanted, but of {ARITHMETIC_PROMPTS} sums only "
                f"{len(training)} are not held out; lower data.size or data.evaluation_size"
            )
    if not training:
        raise ValueError(f"data.path: every prompt of {config.path} is held out for evaluation; none is left to train")
    duplicates = len(training) - len({(_canonical(row.prompt), _content(row.columns)) for row in training})
    training, evaluation, warm_start = (_shaped(rows, config) for rows in (training, evaluation, warm_start))
    return PromptSplits(tuple(training), tuple(evaluation), tuple(warm_start), duplicates, overlapping)


def read_prompts(config: DataConfig, rows: Sequence[SourceRow], path: str, key: str) -> list[PromptRow]:
    """The prompts of the rows of `path`, in their order; `key` is the setting that holds `path`.

    A row's id is its `id` column (text or integer), or a digest of its content, which does not change when rows
    move. Rows of equal text and different columns are different prompts. Raises ValueError naming file and line.
    """
    columns = list(rows[0].values)
    if config.prompt_column not in columns:
        raise ValueError(
            f"{key}: {path} has no column '{config.prompt_column}' (it has {_listed(columns)}); "
            "name the prompt's column in data.prompt_column"
        )
    others = [column for column in columns if column != config.prompt_column]
    check_column_types(rows, others)
    prompts: list[PromptRow] = []
    sources: dict[str, str] = {}
    repeats: Counter[str] = Counter()
    for row in rows:
        try:
            prompt = read_prompt(row.values[config.prompt_column])
        except ValueError as error:
            raise ValueError(f"{row.source}: {error}") from None
        values = {column: row.values[column] for column in others}
        prompt_id = _prompt_id(row, prompt, values, repeats)
        if prompt_id in sources:
            raise ValueError(f"{row.source}: the id '{prompt_id}' is already taken at {sources[prompt_id]}")
        sources[prompt_id] = row.source
        prompts.append(PromptRow(prompt_id, prompt, values, row.source))
    return prompts


def arithmetic_rows(seed: int) -> list[PromptRow]:
    """All sums of two two-digit numbers, shuffled by seed: prompt `07+95=`, column `answer` `102` (three digits)."""
    order = np.random.default_rng([seed, _SPLIT_STREAM]).permutation(ARITHMETIC_PROMPTS)
    pairs = [divmod(int(number), 100) for number in order]
    return [
        PromptRow(f"{a:02d}+{b:02d}", f"{a:02d}+{b:02d}=", {"answer": f"{a + b:03d}"}, ARITHMETIC) for a, b in pairs
    ]


def tokenize(rows: Sequence[PromptRow], render: Render, max_prompt_tokens: int) -> PromptSet:
    """Give the rows their text and tokens; rows of more than `max_prompt_tokens` tokens are dropped and counted.

    Raises ValueError when rendering fails, naming the row, and when every row is too long.
    """
    prompts: list[Prompt] = []
    for row in rows:
        try:
            text, token_ids = render(row.prompt)
        except ValueError as error:
            raise ValueError(f"{row.source}: {error}") from error
        if len(token_ids) <= max_prompt_tokens:
            prompts.append(Prompt(row.prompt_id, row.prompt, text, token_ids, row.columns))
    if rows and not prompts:
        raise ValueError(
            f"data.max_prompt_tokens: all {len(rows)} prompts are longer than {max_prompt_tokens} tokens; raise it"
        )
    return PromptSet(tuple(prompts), len(rows) - len(prompts))


def _read_training(config: DataConfig, seed: int) -> list[PromptRow]:
    """The rows of `data.path`; those of a task are the held-out ones first, then `data.size` others."""
    if config.path.startswith(TASK_PREFIX):
        held_out = 0 if config.evaluation_path else config.evaluation_size
        rows = _task_rows(config, config.path, held_out + config.size, [seed, _TASK_STREAM, 0])
    else:
        rows = read_rows(Path(config.path), "data.path")
    return read_prompts(config, rows, config.path, "data.path")


def _read_evaluation(config: DataConfig, path: str, seed: int) -> list[PromptRow]:
    """The rows of `data.evaluation_path`; of a task, `data.evaluation_size` of them."""
    key = "data.evaluation_path"
    if not path.startswith(TASK_PREFIX):
        return read_prompts(config, read_rows(Path(path), key), path, key)
    if not config.evaluation_size:
        raise ValueError(f"{key}: no prompt is to be made of {path}; raise data.evaluation_size")
    # Another seed, for the task may be the one that is trained on.
    rows = _task_rows(config, path, config.evaluation_size, [seed, _TASK_STREAM, 1])
    return read_prompts(config, rows, path, key)


def _task_rows(config: DataConfig, path: str, size: int, stream: list[int]) -> list[SourceRow]:
    """Rows of a reasoning-gym task, whose entry i is a function of the task's seed + i: seeds must lie far apart."""
    task_seed = int(np.random.default_rng(stream).integers(2**31))
    return read_reasoning_gym(path.removeprefix(TASK_PREFIX), config.parameters, size, task_seed)


def _shaped(rows: Sequence[PromptRow], config: DataConfig) -> list[PromptRow]:
    """The rows with their prompts as `data.system_prompt` and `data.as_chat` want them."""
    shaped: list[PromptRow] = []
    for row in rows:
        try:
            prompt = shape_prompt(row.prompt, system_prompt=config.system_prompt, as_chat=config.as_chat)
        except ValueError as error:
            raise ValueError(f"{row.source}: {error}") from None
        shaped.append(replace(row, prompt=prompt))
    return shaped


def _hold_out(rows: list[PromptRow], config: DataConfig, seed: int) -> tuple[list[PromptRow], list[PromptRow]]:
    """(held-out rows, the others), each in the order of the data."""
    size = config.evaluation_size
    if size >= len(rows):
        raise ValueError(
            f"data.evaluation_size: {size} rows are to be held out, but {config.path} has only {len(rows)}; "
            "lower it (0 holds none out), or name held-out prompts in data.evaluation_path"
        )
    chosen = set(np.random.default_rng([seed, _SPLIT_STREAM]).permutation(len(rows))[:size].tolist())
    evaluation = [row for index, row in enumerate(rows) if index in chosen]
    return evaluation, [row for index, row in enumerate(rows) if index not in chosen]


def _prompt_id(row: SourceRow, prompt: PromptValue, columns: Mapping[str, Any], repeats: Counter[str]) -> str:
    given = columns.get(ID_COLUMN)
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, (str, int)) or given == "":
            raise ValueError(f"{row.source}: the column '{ID_COLUMN}' is {kind_of(given)}, not a name or an integer")
        return str(given)
    content = f"{_canonical(prompt)}\n{_content(columns)}"
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    repeats[digest] += 1
    return digest if repeats[digest] == 1 else f"{digest}-{repeats[digest]}"


def _content(columns: Mapping[str, Any]) -> str:
    return _canonical(without_null_keys({key: value for key, value in columns.items() if key != ID_COLUMN}))


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
