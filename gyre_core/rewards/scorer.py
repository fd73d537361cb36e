"""Scores completions with the configured reward functions and judges; every row ends scored, abstained or failed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from gyre_core.config.sections import RewardConfig
from gyre_core.rewards.calls import OutcomeCounts, Row, function_call
from gyre_core.rewards.loader import Signature, check_columns
from gyre_core.rewards.outcomes import combine
from gyre_core.rewards.runner import FunctionRunner, ProcessRunner, function_names
from gyre_core.rewards.values import Outcome, RewardError
from gyre_core.types import Completion, PolicyVersion, Prompt, Score


class Judge(Protocol):
    """Scores completions in this process, such as a reward model does."""

    def score(self, pairs: Sequence[Row]) -> list[Outcome]:
        """One outcome per row; called in a thread of its own."""
        ...


class Scorer:
    """Scores with the reward functions, wherever they run, and with judges in this process.

    Rows on which a call fails are scored again alone, up to `retries` times, so that one bad row does not sink its
    neighbours. `score` may be called concurrently.
    """

    def __init__(self, config: RewardConfig, base_folder: Path, runner: FunctionRunner | None = None) -> None:
        """The functions run on `runner`, by default in processes beside this one; it is closed with the scorer."""
        names = function_names(config)
        self._runner: FunctionRunner = runner or ProcessRunner(config, base_folder)
        self._weights = dict(zip(names, (function.weight for function in config.functions), strict=True))
        self._judges: dict[str, Judge] = {}
        self._signatures: Mapping[str, Signature] = {}
        self._functions = tuple(names)
        self._counts = {name: OutcomeCounts() for name in names}
        self._reported: dict[str, float] = {}

    @property
    def counts(self) -> Mapping[str, OutcomeCounts]:
        """Outcomes by function, and by judge."""
        return self._counts

    def totals(self) -> dict[str, float]:
        """What went wrong since the scorer was made, by metric name; evaluations count like training."""
        shown = ("failed", "retried", "timeouts")
        return {
            f"rewards/{name}/{count}": float(value)
            for name, counts in self._counts.items()
            for count, value in asdict(counts).items()
            if count in shown
        }

    def metrics(self) -> dict[str, float]:
        """What the totals have grown by since the last call."""
        totals = self.totals()
        grown = {name: total - self._reported.get(name, 0.0) for name, total in totals.items()}
        self._reported = totals
        return grown

    async def start(self) -> None:
        """Load the functions where they run; raises ValueError for one that cannot be loaded."""
        self._signatures = await self._runner.start()

    def add_judge(self, name: str, weight: float, judge: Judge) -> None:
        """Score with a judge too, whose values count `weight` times; raises ValueError for a name that is taken."""
        if name in self._weights:
            raise ValueError(f"reward.functions: a reward function is named '{name}', as the judge is; rename it")
        self._judges[name] = judge
        self._weights[name] = weight
        self._counts[name] = OutcomeCounts()

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError when the functions need a column that the data lacks; after `start`."""
        assert len(self._signatures) == len(self._functions), "the scorer was started"
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
        calls = [function_call(name, signature, rows, step, version) for name, signature in self._signatures.items()]
        for call, result in zip(calls, await self._runner.run(calls), strict=True):
            outcomes[call.function] = result.outcomes
            self._counts[call.function].add(result.counts)
            self._check_any(call.function, rows, result.outcomes, step, version)
        for name, judge in self._judges.items():
            outcomes[name] = await asyncio.to_thread(judge.score, rows)
            self._counts[name].add_outcomes(outcomes[name])
            self._check_any(name, rows, outcomes[name], step, version)
        scores = iter(
            [combine(self._weights, {name: outcomes[name][row] for name in outcomes}) for row in range(len(rows))]
        )
        return [[next(scores) for _ in completions] for _, completions in groups]

    def close(self) -> None:
        """End the functions; unfinished calls raise RewardError."""
        self._runner.close()

    def _check_any(
        self, name: str, rows: Sequence[Row], outcomes: Sequence[Outcome], step: int, version: PolicyVersion
    ) -> None:
        errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if len(errors) == len(rows) and len({prompt.prompt_id for prompt, _ in rows}) > 1:
            raise RewardError(
                f"reward function '{name}' failed on all {len(rows)} completions of policy {version} "
                f"in step {step}; the first failure: {errors[0]}"
            )
