"""The built-in reward `reasoning_gym`: rows of reasoning-gym's tasks, each judged by its task's own scorer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from reasoning_gym.factory import DATASETS

from gyre_core.rewards.functions import Completions, final_texts

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TASKS_WITH_TUPLES = ("arc_agi", "rearc")
"""Their scorers compare with tuples, which data files hold as lists."""


def score_entries(
    completions: Completions,
    prompt_texts: Sequence[str],
    answer: Sequence[Any],
    metadata: Sequence[Mapping[str, Any] | None],
    finish_reasons: Sequence[str],
) -> list[float | None]:
    """The score that the task `metadata["source_dataset"]` gives, with the parameters `metadata["parameters"]` if any.

    The answer is the completion or, where the prompt speaks of `<answer>`, what stands between the last two such tags.
    A row whose metadata is null is abstained from. An empty answer earns 0, and so does one on which a scorer breaks
    down that can judge the task's own answer.
    """
    texts = final_texts(completions, finish_reasons)
    return [
        None if entry is None else _score(_answer(text, prompt), {"answer": right, "metadata": entry})
        for text, prompt, right, entry in zip(texts, prompt_texts, answer, metadata, strict=True)
    ]


def _answer(text: str, prompt: str) -> str:
    if "<answer>" not in prompt:
        return text
    tagged = _ANSWER.findall(text)
    return tagged[-1].strip() if tagged else ""


def _score(text: str, entry: dict[str, Any]) -> float:
    if not text:
        return 0.0
    metadata = entry["metadata"]
    task = metadata.get("source_dataset")
    if task not in DATASETS:
        raise ValueError(f"metadata.source_dataset is {task!r}, which is no task of reasoning-gym")
    if task in _TASKS_WITH_TUPLES:
        entry = {**entry, "metadata": _with_tuples(metadata)}
    scorer = _scorer(task, json.dumps(metadata.get("parameters") or {}))
    try:
        return float(scorer.score_answer(text, entry))
    except Exception:  # noqa: BLE001 - scorers meet any text, and not all of them are ready for it.
        scorer.score_answer(entry["answer"], entry)
        return 0.0


@cache
def _scorer(task: str, parameters: str) -> Any:
    dataset_type, config_type = DATASETS[task]
    return dataset_type(config_type(**json.loads(parameters)))


def _with_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list) else value
