"""Tasks of the library reasoning-gym as rows: procedural puzzles, each with the scorer of its task."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from gyre_core.config.paths import TASK_PREFIX
from gyre_core.data.rows import SourceRow


def read_reasoning_gym(task: str, parameters: Mapping[str, Any], size: int, seed: int) -> list[SourceRow]:
    """The first `size` rows of a task: columns `prompt` (the question), `answer` (text, or null where the task has no
    single one) and `metadata` (with `source_dataset`, the task, and `parameters`, for the reward `reasoning_gym`).

    Raises ValueError for an unknown task or parameter, with the nearest names, for values that the task refuses, and
    when reasoning-gym is not installed.
    """
    registry = _registry()
    if task not in registry:
        raise ValueError(f"{TASK_PREFIX}{task}: reasoning-gym has no task '{task}'{_nearest(task, [*registry])}")
    dataset_type, config_type = registry[task]
    known = [field.name for field in dataclasses.fields(config_type) if field.name not in ("seed", "size")]
    for name in parameters:
        if name not in known:
            raise ValueError(
                f"data.parameters: the task '{task}' has no parameter '{name}'{_nearest(name, known)}; its own: "
                f"{', '.join(known) or 'none'} (size and seed are data.size and experiment.seed)"
            )
    try:
        dataset = dataset_type(config_type(**parameters, seed=seed, size=size))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"data.parameters: the task '{task}' refuses them: {error or type(error).__name__}") from None
    return [_row(task, parameters, index, dataset[index]) for index in range(size)]


def _row(task: str, parameters: Mapping[str, Any], index: int, entry: Mapping[str, Any]) -> SourceRow:
    metadata = {**entry["metadata"], "source_dataset": task, "parameters": dict(parameters)}
    values = {"prompt": entry["question"], "answer": entry["answer"], "metadata": _plain(metadata)}
    return SourceRow(f"{TASK_PREFIX}{task}:{index}", values)


def _plain(value: Any) -> Any:
    """A value as JSON gives it back: tuples and sets as lists, keys as text, numbers of numpy as numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def _registry() -> Mapping[str, tuple[Any, Any]]:
    """The library's tasks: name → types of its data set and of its parameters."""
    try:
        return importlib.import_module("reasoning_gym.factory").DATASETS
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "reasoning_gym":
            raise
        raise ValueError(
            f"{TASK_PREFIX}…: a task of reasoning-gym needs the library; install it by `pip install 'gyre[rewards]'`"
        ) from None


def _nearest(name: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(found)}?" if found else ""
