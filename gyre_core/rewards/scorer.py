"""Scores completions with the configured reward functions; every row ends scored, abstained or failed."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_core.config.sections import RewardConfig
from gyre_core.rewards.loader import Signature, check_columns
from gyre_core.rewards.outcomes import combine
from gyre_core.rewards.process import RewardProcess, RewardProcessError, RewardTimeoutError
from gyre_core.rewards.values import Outcome, RewardError
from gyre_core.types import Completion, PolicyVersion, Prompt, Score

MAX_TIMEOUTS_IN_A_ROW = 3
"""Rows that may hang one after another when scored again alone; then the function is taken for stuck."""


@dataclass(slots=True)
class OutcomeCounts:
    """What became of one function's rows since the scorer started; `timeouts` counts calls, the others rows."""

    scored: int = 0
    abstained: int = 0
    failed: int = 0
    retried: int = 0
    timeouts: int = 0


class Scorer:
    """Runs the reward functions in one process beside this one, a request's rows at once.

    Rows on which a call fails are scored again alone, up to `retries` times, so that one bad row does not sink its
    neighbours. `score` may be called concurrently; calls take turns.
    """

    def __init__(self, config: RewardConfig, base_folder: Path) -> None:
        self._config = config
        self._paths = function_names(config)
        self._weights = dict(zip(self._paths, (function.weight for function in config.functions), strict=True))
        self._process = RewardProcess(self._paths, base_folder)
        self._signatures: dict[str, Signature] = {}
        self._turn = threading.Lock()
        self._counts = {name: OutcomeCounts() for name in self._paths}

    @property
    def counts(self) -> Mapping[str, OutcomeCounts]:
        """Outcomes by function."""
        return self._counts

    async def start(self) -> None:
        """Start the process and load the functions; raises ValueError for one that cannot be loaded."""
        self._signatures = await asyncio.to_thread(self._process.start)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError when the functions need a column that the data lacks; after `start`."""
        assert self._signatures, "the scorer was started"
        check_columns(self._signatures, columns)

    async def score(
        self, groups: Sequence[tuple[Prompt, Sequence[Completion]]], *, step: int, version: PolicyVersion
    ) -> list[list[Score]]:
        """The scores of each group's completions, in their order; `step` and `version` serve error messages.

        Raises RewardError when a function breaks its contract, and when it fails on every row of several prompts: then
        it is the function that is broken, not the rows. The error holds the first failure's traceback.
        Raises ValueError for a column that a function requires and a prompt lacks.
        """
        rows = [(prompt, completion) for prompt, completions in groups for completion in completions]
        if not rows:
            return [[] for _ in groups]
        outcomes: dict[str, list[Outcome]] = {}
        for name, signature in self._signatures.items():
            arguments = call_arguments(name, signature, rows)
            outcomes[name] = await asyncio.to_thread(self._run, name, arguments, len(rows))
            errors = [outcome for outcome in outcomes[name] if isinstance(outcome, str)]
            if len(errors) == len(rows) and len({prompt.prompt_id for prompt, _ in rows}) > 1:
                raise RewardError(
                    f"reward function '{name}' failed on all {len(rows)} completions of policy {version} "
                    f"in step {step}; the first failure: {errors[0]}"
                )
        scores = iter(
            [combine(self._weights, {name: outcomes[name][row] for name in outcomes}) for row in range(len(rows))]
        )
        return [[next(scores) for _ in completions] for _, completions in groups]

    def close(self) -> None:
        """Kill the process; unfinished calls raise RewardError. Returns within about a second."""
        self._process.close()

    def _run(self, name: str, arguments: Mapping[str, list[Any]], rows: int) -> list[Outcome]:
        """One function's outcomes, after retries; blocks."""
        counts = self._counts[name]
        with self._turn:
            outcomes: list[Outcome]
            try:
                outcomes = self._process.call(name, arguments, rows, self._config.timeout)
            except RewardProcessError as error:
                counts.timeouts += isinstance(error, RewardTimeoutError)
                outcomes = [str(error)] * rows
            self._retry(name, arguments, outcomes)
        for outcome in outcomes:
            counts.scored += isinstance(outcome, float)
            counts.abstained += outcome is None
            counts.failed += isinstance(outcome, str)
        return outcomes

    def _retry(self, name: str, arguments: Mapping[str, list[Any]], outcomes: list[Outcome]) -> None:
        """Score failed rows again, each alone, in place."""
        counts = self._counts[name]
        timeouts_in_a_row = 0
        for _ in range(self._config.retries):
            for row in [row for row, outcome in enumerate(outcomes) if isinstance(outcome, str)]:
                if timeouts_in_a_row == MAX_TIMEOUTS_IN_A_ROW:
                    return
                counts.retried += 1
                alone = {argument: [values[row]] for argument, values in arguments.items()}
                try:
                    outcomes[row] = self._process.call(name, alone, 1, self._config.timeout)[0]
                    timeouts_in_a_row = 0
                except RewardTimeoutError as error:
                    counts.timeouts += 1
                    timeouts_in_a_row += 1
                    outcomes[row] = str(error)
                except RewardProcessError as error:
                    timeouts_in_a_row = 0
                    outcomes[row] = str(error)


def function_names(config: RewardConfig) -> dict[str, str]:
    """Each function's name → its path, in order: what follows the colon, or the whole path where two share that.

    Metrics, score parts and errors use the name. Raises ValueError for a path that is given twice.
    """
    paths = [function.path for function in config.functions]
    short = [path.rpartition(":")[2] for path in paths]
    shared = {name for name, count in Counter(short).items() if count > 1}
    names = {path if name in shared else name: path for name, path in zip(short, paths, strict=True)}
    if len(names) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise ValueError(f"reward.functions: '{twice}' is given twice; give it once, with the sum of the weights")
    return names


def call_arguments(name: str, signature: Signature, rows: Sequence[tuple[Prompt, Completion]]) -> dict[str, list[Any]]:
    """The keyword arguments of one call, each a list with one value per row, as TRL gives them.

    Completions are texts for text prompts, and lists of one assistant message for prompts of messages. Raises
    ValueError for a required column that a row lacks.
    """
    columns = [column for column in rows[0][0].columns if all(column in prompt.columns for prompt, _ in rows)]
    check_columns({name: signature}, columns)
    readers = {
        "prompts": lambda prompt, completion: prompt.prompt,
        "completions": _completion_value,
        "completion_ids": lambda prompt, completion: completion.token_ids.tolist(),
        "finish_reasons": lambda prompt, completion: completion.finish_reason,
    }
    arguments = {key: [read(*row) for row in rows] for key, read in readers.items() if signature.wants(key)}
    for column in columns:
        if signature.wants(column):
            arguments[column] = [prompt.columns[column] for prompt, _ in rows]
    return arguments


def _completion_value(prompt: Prompt, completion: Completion) -> str | list[dict[str, str]]:
    if isinstance(prompt.prompt, str):
        return completion.text
    return [{"role": "assistant", "content": completion.text}]
