"""Calls of reward functions: what a function is given, and what comes of a call in a process, after retries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any

from gyre_core.rewards.loader import Signature, check_columns
from gyre_core.rewards.process import RewardProcess, RewardProcessError, RewardTimeoutError
from gyre_core.rewards.values import Outcome
from gyre_core.types import Completion, PolicyVersion, Prompt

MAX_TIMEOUTS_IN_A_ROW = 3
"""Rows that may hang one after another when scored again alone; then the function is taken for stuck."""

Row = tuple[Prompt, Completion]


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of one function: `columns` holds arguments with one value per row, `constants` the others."""

    function: str
    rows: int
    columns: Mapping[str, Sequence[Any]]
    constants: Mapping[str, Any]

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments."""
        return {**self.columns, **self.constants}

    def part(self, start: int, stop: int) -> FunctionCall:
        """The call of rows `start` to `stop` alone."""
        columns = {name: values[start:stop] for name, values in self.columns.items()}
        return FunctionCall(self.function, stop - start, columns, self.constants)

    def split(self, parts: int) -> list[FunctionCall]:
        """At most so many calls of about equal size, which follow each other."""
        parts = min(parts, self.rows)
        borders = [self.rows * part // parts for part in range(parts + 1)]
        return [self.part(start, stop) for start, stop in pairwise(borders)]


@dataclass(slots=True)
class OutcomeCounts:
    """What became of one function's rows since the scorer started; `timeouts` counts calls, the others rows."""

    scored: int = 0
    abstained: int = 0
    failed: int = 0
    retried: int = 0
    timeouts: int = 0

    def add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Count how rows ended."""
        self.scored += sum(isinstance(outcome, float) for outcome in outcomes)
        self.abstained += sum(outcome is None for outcome in outcomes)
        self.failed += sum(isinstance(outcome, str) for outcome in outcomes)

    def add(self, other: OutcomeCounts) -> None:
        """Count what another one counted, too."""
        for counted in fields(OutcomeCounts):
            setattr(self, counted.name, getattr(self, counted.name) + getattr(other, counted.name))


@dataclass(slots=True)
class CallResult:
    """What came of a call: one outcome per row, and how they came about."""

    outcomes: list[Outcome]
    counts: OutcomeCounts = field(default_factory=OutcomeCounts)


def function_call(
    name: str, signature: Signature, rows: Sequence[Row], step: int, version: PolicyVersion
) -> FunctionCall:
    """The call of a function on rows, with the arguments that it asks for, as TRL gives them.

    Completions are texts for text prompts, and lists of one assistant message for prompts of messages. Raises
    ValueError for a required column that a row lacks.
    """
    names = [column for column in rows[0][0].columns if all(column in prompt.columns for prompt, _ in rows)]
    check_columns({name: signature}, names)
    columns: dict[str, list[Any]] = {
        column: [prompt.columns[column] for prompt, _ in rows] for column in names if signature.wants(column)
    }
    if signature.wants("prompts"):
        columns["prompts"] = [prompt.prompt for prompt, _ in rows]
    if signature.wants("completions"):
        columns["completions"] = [_completion_value(prompt, completion) for prompt, completion in rows]
    if signature.wants("completion_ids"):
        columns["completion_ids"] = [completion.token_ids.tolist() for _, completion in rows]
    if signature.names("finish_reasons"):
        columns["finish_reasons"] = [completion.finish_reason for _, completion in rows]
    if signature.names("prompt_texts"):
        columns["prompt_texts"] = [prompt.text for prompt, _ in rows]
    values = {"step": step, "version": version.number}
    constants = {argument: value for argument, value in values.items() if signature.names(argument)}
    return FunctionCall(name, len(rows), columns, constants)


def _completion_value(prompt: Prompt, completion: Completion) -> str | list[dict[str, str]]:
    if isinstance(prompt.prompt, str):
        return completion.text
    return [{"role": "assistant", "content": completion.text}]


def make_call(process: RewardProcess, call: FunctionCall, timeout: float, retries: int) -> CallResult:
    """What comes of a call in a process; failed rows are scored again alone, up to `retries` times. Blocks.

    A call has `timeout` seconds. Raises RewardError when the function breaks its contract.
    """
    result = CallResult([])
    try:
        result.outcomes = process.call(call.function, call.arguments(), call.rows, timeout)
    except RewardProcessError as error:
        result.counts.timeouts += isinstance(error, RewardTimeoutError)
        result.outcomes = [str(error)] * call.rows
    _retry(process, call, result, timeout, retries)
    result.counts.add_outcomes(result.outcomes)
    return result


def _retry(process: RewardProcess, call: FunctionCall, result: CallResult, timeout: float, retries: int) -> None:
    """Score failed rows again, each alone, in place."""
    outcomes, counts = result.outcomes, result.counts
    timeouts_in_a_row = 0
    for _ in range(retries):
        for row in [row for row, outcome in enumerate(outcomes) if isinstance(outcome, str)]:
            if timeouts_in_a_row == MAX_TIMEOUTS_IN_A_ROW:
                return
            counts.retried += 1
            alone = call.part(row, row + 1).arguments()
            try:
                outcomes[row] = process.call(call.function, alone, 1, timeout)[0]
                timeouts_in_a_row = 0
            except RewardTimeoutError as error:
                counts.timeouts += 1
                timeouts_in_a_row += 1
                outcomes[row] = str(error)
            except RewardProcessError as error:
                timeouts_in_a_row = 0
                outcomes[row] = str(error)


def joined(parts: Sequence[CallResult]) -> CallResult:
    """The result of a call from those of its parts, in their order."""
    whole = CallResult([])
    for part in parts:
        whole.outcomes += part.outcomes
        whole.counts.add(part.counts)
    return whole


def calls_to_json(calls: Sequence[FunctionCall]) -> str:
    """Calls as text. Raises TypeError for a column of values that are not JSON."""
    return json.dumps([[call.function, call.rows, dict(call.columns), dict(call.constants)] for call in calls])


def calls_from_json(text: str) -> list[FunctionCall]:
    """The calls that `calls_to_json` wrote."""
    return [FunctionCall(*values) for values in json.loads(text)]


def results_to_json(results: Sequence[CallResult]) -> str:
    """Results of calls as text."""
    return json.dumps([[result.outcomes, asdict(result.counts)] for result in results])


def results_from_json(text: str) -> list[CallResult]:
    """The results that `results_to_json` wrote."""
    return [CallResult(outcomes, OutcomeCounts(**counts)) for outcomes, counts in json.loads(text)]
