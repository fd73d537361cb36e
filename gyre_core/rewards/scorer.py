"""Scores completions with the configured reward functions and judges; every row ends scored, abstained or failed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from gyre_core.config.sections import RewardConfig
from gyre_core.rewards.loader import Signature, check_columns
from gyre_core.rewards.outcomes import combine
from gyre_core.rewards.process import RewardProcess, RewardProcessError, RewardTimeoutError
from gyre_core.rewards.values import Outcome, RewardError
from gyre_core.types import Completion, PolicyVersion, Prompt, Score

MAX_TIMEOUTS_IN_A_ROW = 3
"""Rows that may hang one after another when scored again alone; then the function is taken for stuck."""

Row = tuple[Prompt, Completion]


class Judge(Protocol):
    """Scores completions in this process, such as a reward model does."""

    def score(self, pairs: Sequence[Row]) -> list[Outcome]:
        """One outcome per row; called in a thread of its own."""
        ...


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


class Scorer:
    """Runs the reward functions in processes beside this one, a request's rows shared out between them.

    Rows on which a call fails are scored again alone, up to `retries` times, so that one bad row does not sink its
    neighbours. `score` may be called concurrently; calls wait for a free process.
    """

    def __init__(self, config: RewardConfig, base_folder: Path) -> None:
        self._config = config
        self._paths = function_names(config)
        self._weights = dict(zip(self._paths, (function.weight for function in config.functions), strict=True))
        self._judges: dict[str, Judge] = {}
        self._signatures: dict[str, Signature] = {}
        verl = [name for name, entry in zip(self._paths, config.functions, strict=True) if entry.signature == "verl"]
        count = config.processes if self._paths else 0
        self._processes = [RewardProcess(self._paths, base_folder, verl) for _ in range(count)]
        self._free: SimpleQueue[RewardProcess] = SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        # As many threads as processes, so that a thread always finds a free one.
        self._threads = ThreadPoolExecutor(max(count, 1), thread_name_prefix="reward")
        self._closed = False
        self._counts = {name: OutcomeCounts() for name in self._paths}
        self._reported: dict[str, float] = {}

    @property
    def counts(self) -> Mapping[str, OutcomeCounts]:
        """Outcomes by function, and by judge."""
        return self._counts

    def metrics(self) -> dict[str, float]:
        """What the counts have grown by since the last call, by metric name; evaluations count like training."""
        shown = ("failed", "retried", "timeouts")
        totals = {
            f"rewards/{name}/{count}": float(value)
            for name, counts in self._counts.items()
            for count, value in asdict(counts).items()
            if count in shown
        }
        grown = {name: total - self._reported.get(name, 0.0) for name, total in totals.items()}
        self._reported = totals
        return grown

    async def start(self) -> None:
        """Start the processes and load the functions; raises ValueError for one that cannot be loaded."""
        starts = [asyncio.wrap_future(self._threads.submit(process.start)) for process in self._processes]
        for signatures in await asyncio.gather(*starts):
            self._signatures = signatures

    def add_judge(self, name: str, weight: float, judge: Judge) -> None:
        """Score with a judge too, whose values count `weight` times; raises ValueError for a name that is taken."""
        if name in self._weights:
            raise ValueError(f"reward.functions: a reward function is named '{name}', as the judge is; rename it")
        self._judges[name] = judge
        self._weights[name] = weight
        self._counts[name] = OutcomeCounts()

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError when the functions need a column that the data lacks; after `start`."""
        assert len(self._signatures) == len(self._paths), "the scorer was started"
        check_columns(self._signatures, columns)

    async def score(
        self, groups: Sequence[tuple[Prompt, Sequence[Completion]]], *, step: int, version: PolicyVersion
    ) -> list[list[Score]]:
        """The scores of each group's completions, in their order, by the policy `version` in training step `step`.

        Raises RewardError when a function breaks its contract, and when it fails on every row of several prompts: then
        it is the function that is broken, not the rows. The error holds the first failure's traceback.
        Raises ValueError for a column that a function requires and a prompt lacks.
        """
        rows = [(prompt, completion) for prompt, completions in groups for completion in completions]
        if not rows:
            return [[] for _ in groups]
        outcomes: dict[str, list[Outcome]] = {}
        for name, signature in self._signatures.items():
            outcomes[name] = await self._call(function_call(name, signature, rows, step, version))
            self._check_any(name, rows, outcomes[name], step, version)
        for name, judge in self._judges.items():
            outcomes[name] = await asyncio.to_thread(judge.score, rows)
            self._counts[name].add_outcomes(outcomes[name])
            self._check_any(name, rows, outcomes[name], step, version)
        scores = iter(
            [combine(self._weights, {name: outcomes[name][row] for name in outcomes}) for row in range(len(rows))]
        )
        return [[next(scores) for _ in completions] for _, completions in groups]

    def close(self) -> None:
        """Kill the processes; unfinished calls raise RewardError. Returns within about a second."""
        self._closed = True
        for process in self._processes:
            process.close()
        self._threads.shutdown()

    def _check_any(
        self, name: str, rows: Sequence[Row], outcomes: Sequence[Outcome], step: int, version: PolicyVersion
    ) -> None:
        errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if len(errors) == len(rows) and len({prompt.prompt_id for prompt, _ in rows}) > 1:
            raise RewardError(
                f"reward function '{name}' failed on all {len(rows)} completions of policy {version} "
                f"in step {step}; the first failure: {errors[0]}"
            )

    async def _call(self, call: FunctionCall) -> list[Outcome]:
        """One function's outcomes, after retries, its rows shared out between the processes."""
        if self._closed:
            raise RewardError("the processes of the reward functions are closed")
        parts = [self._threads.submit(self._run, part) for part in call.split(len(self._processes))]
        outcomes: list[Outcome] = []
        total = self._counts[call.function]
        for part_outcomes, counts in await asyncio.gather(*map(asyncio.wrap_future, parts)):
            outcomes += part_outcomes
            for field in fields(OutcomeCounts):
                setattr(total, field.name, getattr(total, field.name) + getattr(counts, field.name))
        return outcomes

    def _run(self, call: FunctionCall) -> tuple[list[Outcome], OutcomeCounts]:
        """The outcomes of a call in one of the processes, after retries, and what happened; blocks."""
        process = self._free.get()
        counts = OutcomeCounts()
        try:
            outcomes: list[Outcome]
            try:
                outcomes = process.call(call.function, call.arguments(), call.rows, self._config.timeout)
            except RewardProcessError as error:
                counts.timeouts += isinstance(error, RewardTimeoutError)
                outcomes = [str(error)] * call.rows
            self._retry(process, call, outcomes, counts)
        finally:
            self._free.put(process)
        counts.add_outcomes(outcomes)
        return outcomes, counts

    def _retry(
        self, process: RewardProcess, call: FunctionCall, outcomes: list[Outcome], counts: OutcomeCounts
    ) -> None:
        """Score failed rows again, each alone, in place."""
        timeouts_in_a_row = 0
        for _ in range(self._config.retries):
            for row in [row for row, outcome in enumerate(outcomes) if isinstance(outcome, str)]:
                if timeouts_in_a_row == MAX_TIMEOUTS_IN_A_ROW:
                    return
                counts.retried += 1
                alone = call.part(row, row + 1).arguments()
                try:
                    outcomes[row] = process.call(call.function, alone, 1, self._config.timeout)[0]
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

    Metrics, score parts and errors use the name, so that a path's slashes become dots. Raises ValueError for a path
    that is given twice.
    """
    paths = [function.path for function in config.functions]
    short = [path.rpartition(":")[2] for path in paths]
    shared = {name for name, count in Counter(short).items() if count > 1}
    whole = [path.strip("/").replace("/", ".") for path in paths]
    names = {long if name in shared else name: path for name, long, path in zip(short, whole, paths, strict=True)}
    if len(names) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise ValueError(f"reward.functions: '{twice}' is given twice; give it once, with the sum of the weights")
    return names


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
