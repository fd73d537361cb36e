"""`gyre preflight`: a run put together and its first request answered, before any training; then verdicts.

The trial is the run itself under a name of its own: same data, models, engine, rewards and storage, no update. What it
leaves on storage is removed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import secrets
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata

import numpy as np
import psutil
import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gyre_core.config import GyreConfig
from gyre_core.data.prompts import load_prompts
from gyre_core.experience.contents import training_group
from gyre_core.experience.segments import write_segment
from gyre_core.policy.models import PolicySummary, find_device
from gyre_core.rewards.outcomes import RewardError
from gyre_core.rewards.runner import FunctionRunner
from gyre_core.rollout.build import set_threads
from gyre_core.rollout.serving import generate, score
from gyre_core.storage import LocalStorage, Storage, StorageError, exercise_storage, open_storage
from gyre_core.training.build import inspect_models, open_run
from gyre_core.training.forecast import VERSIONS_KEPT, StepCosts, disk_forecast, memory_forecast
from gyre_core.training.requests import plan_requests
from gyre_core.training.run import TrainingRun
from gyre_core.training.run_folder import data_storage
from gyre_core.training.step import rollout_metrics
from gyre_core.training.verdicts import (
    Verdict,
    judge_evaluation,
    judge_generation,
    judge_lengths,
    judge_parity,
    judge_prompts,
    judge_reward,
    judge_space,
    judge_threads,
    judge_tokens,
    judge_truncation,
    judge_versions,
)
from gyre_core.types import Completion, Rollout, RolloutGroup, RolloutRequest, Score

logger = logging.getLogger(__name__)

SHOWN_PACKAGES = ("torch", "transformers", "prefect", "pyarrow", "pydantic")
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_UPDATE_FORWARDS = 3
"""Forward passes that an update costs: one forward, and a backward of about two."""


def run_preflight(config: GyreConfig, runner: FunctionRunner | None = None) -> int:
    """Check the configuration by a trial and print the verdicts; returns 0 when nothing fails, else 1.

    `runner` runs the reward functions, by default processes beside this one do.
    """
    console = Console()
    console.print(f"preflight of {config.experiment.name}: one request is generated and scored, nothing is trained")
    verdicts = asyncio.run(preflight(config, runner))
    console.print(verdict_table(verdicts))
    counts = Counter(verdict.outcome for verdict in verdicts)
    console.print(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed")
    return 1 if counts["fail"] else 0


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """The verdicts as rows, each remedy below its evidence."""
    table = Table("check", "", "evidence", box=None, pad_edge=False)
    for verdict in verdicts:
        text = f"{verdict.evidence}\n→ {verdict.remedy}" if verdict.remedy else verdict.evidence
        table.add_row(verdict.name, Text(verdict.outcome, _COLOURS[verdict.outcome]), Text(text))
    return table


async def preflight(config: GyreConfig, runner: FunctionRunner | None = None) -> list[Verdict]:
    """Every verdict, in the order of the checks; a check whose ground a failure took away is left out."""
    set_threads(config)
    with _scratch_run(config) as scratch:
        return await _Preflight(scratch, runner).run()


@contextmanager
def _scratch_run(config: GyreConfig) -> Generator[GyreConfig]:
    """The configuration under a run name that nobody else has; what is stored under it goes when the block ends."""
    name = f"{config.experiment.name}.preflight-{secrets.token_hex(4)}"
    storages = _storages(config)
    roots = [storage.root for storage in storages if isinstance(storage, LocalStorage)]
    absent = [folder for root in roots for folder in (root, *root.parents) if not folder.exists()]
    try:
        yield config.model_copy(update={"experiment": config.experiment.model_copy(update={"name": name})})
    finally:
        for storage in storages:
            try:
                storage.delete_folder(name)
            except NotADirectoryError:
                pass  # A file is where the folder should be; one of the verdicts.
            except StorageError as error:
                logger.warning("what preflight may have written to %s/%s was not removed: %s", storage.url, name, error)
        for folder in absent:
            with suppress(OSError):  # Never made, or another run has taken the new folder into use.
                folder.rmdir()


def _storages(config: GyreConfig) -> list[Storage]:
    """The places that a run writes to: that of its data, and that of its folder when it is another."""
    output = config.experiment.output
    elsewhere = [data_storage(config, trial=True)] if config.storage.url not in (None, output) else []
    return [*elsewhere, open_storage(output)]


class _Preflight:
    """The checks of one configuration, whose name is the scratch run's."""

    def __init__(self, config: GyreConfig, runner: FunctionRunner | None) -> None:
        self._config = config
        self._runner = runner
        self._verdicts: list[Verdict] = []
        self._costs: StepCosts | None = None
        self._critic = 0

    async def run(self) -> list[Verdict]:
        config, add = self._config, self._verdicts.append
        add(judge_versions(*installed_versions()))
        add(judge_threads(torch.get_num_threads(), len(os.sched_getaffinity(0)), os.getloadavg()[0]))
        policy = self._inspect_models()
        free = self._check_storage()
        if any(verdict.outcome == "fail" for verdict in self._verdicts):
            add(Verdict("trial", "warn", "not run, as what failed above would fail it too", "mend that first"))
        else:
            await self._try_run()
        if policy is not None and free is not None:
            kept = VERSIONS_KEPT + config.rollout.max_lag
            reserve = {"storage.min_free": float(config.storage.min_free)} if config.storage.min_free else {}
            forecast = disk_forecast(config, policy, kept, self._costs, self._critic)
            add(judge_space("disk", {**forecast, **reserve}, free))
        return self._verdicts

    @contextmanager
    def _failing(self, name: str) -> Generator[None]:
        """Turn an error of the block into a failed verdict; whoever raised it says what to do."""
        try:
            yield
        except (ValueError, OSError, RuntimeError) as error:
            self._verdicts.append(Verdict(name, "fail", str(error) or type(error).__name__))

    def _inspect_models(self) -> PolicySummary | None:
        models = self._config.models
        with self._failing("models"):
            device, found = find_device(models.device), inspect_models(self._config)
            policy = found.policy
            described = f"{policy.architecture} of {policy.parameters:,} parameters, "
            if models.lora.rank:
                described += f"with adapters of {policy.trained:,}, "
            described += f"trained in {models.dtype}"
            self._verdicts.append(Verdict("models", "ok", described))
            self._critic = found.critic_parameters
            forecast = memory_forecast(
                self._config,
                policy,
                found.reference,
                found.reward_model_parameters,
                found.critic_parameters,
                device.type,
            )
            self._verdicts.append(judge_space("memory", forecast, psutil.virtual_memory().available))
            return policy
        return None

    def _check_storage(self) -> int | None:
        """Free bytes of the run's storage; None without a limit, and when it cannot be written."""
        storages = _storages(self._config)
        for storage in storages:
            with self._failing("storage"):
                seconds = exercise_storage(storage.child(f"{self._config.experiment.name}/probe"))
                evidence = f"{storage.url}: written, refused to a second writer, listed and deleted"
                self._verdicts.append(Verdict("storage", "ok", f"{evidence} in {1000 * seconds:.0f} ms"))
        if any(verdict.name == "storage" and verdict.outcome == "fail" for verdict in self._verdicts):
            return None
        return storages[0].free_bytes()

    async def _try_run(self) -> None:
        started = time.monotonic()
        # Whether there is space for a whole run is a verdict of its own.
        storage = self._config.storage.model_copy(update={"min_free": 0})
        config = self._config.model_copy(update={"storage": storage})
        with self._failing("start"):
            run = await open_run(config, run_id="trial", runner=self._runner)
            try:
                evidence = f"data, rewards, models and engine came up in {time.monotonic() - started:.1f} s"
                self._verdicts.append(Verdict("start", "ok", evidence))
                with self._failing("trial"):
                    self._verdicts.extend(self._judge_data(run))
                    await self._answer_request(run)
            finally:
                await run.close()

    def _judge_data(self, run: TrainingRun) -> Iterator[Verdict]:
        rows = load_prompts(run.config.data, run.config.experiment.seed)
        prompts = run.cursor.prompts
        too_long = len(rows.training) - len(prompts)
        yield judge_prompts(len(prompts), too_long, rows.duplicates, rows.overlapping, run.config)
        longest = max(len(prompt.token_ids) for prompt in (*prompts, *run.evaluator.prompts))
        yield judge_lengths(longest, run.config.rollout.max_tokens, run.worker.engine.max_positions)
        tokens = run.policy.tokens
        yield judge_tokens(tokens.bos_id, tokens.eos_ids, tokens.pad_id)
        yield judge_evaluation(len(run.evaluator.prompts))

    async def _answer_request(self, run: TrainingRun) -> None:
        """Answer the first request of the first step as a training run does, and judge what comes."""
        config, engine = run.config, run.worker.engine
        request = plan_requests(run, 1)[0]
        await engine.load_weights(run.version, run.chain.load(run.version))
        started = time.monotonic()
        try:
            async with asyncio.timeout(config.rollout.timeout):
                completions = await generate(engine, request.groups, request.sampling)
        except TimeoutError:
            raise TimeoutError(
                f"one of the step's requests was not answered within rollout.timeout ({config.rollout.timeout:g} s); "
                "raise it, or lower rollout.max_tokens"
            ) from None
        generated = time.monotonic()
        groups = await _scored(run, request, completions)
        scored = time.monotonic()
        difference = self._compare(run, groups)
        compared = time.monotonic()
        segment = await asyncio.to_thread(write_segment, run.storage, request.request_id, groups)
        share = config.rollout.batch_size / len(request.groups)
        samples = len(request.groups) * request.sampling.samples
        self._costs = StepCosts(
            generation_seconds=(generated - started) * share,
            reward_seconds=(scored - generated) * share,
            update_seconds=(compared - scored) * share * _UPDATE_FORWARDS,
            sample_bytes=segment.size / samples,
        )
        self._judge_answer(groups, samples, generated - started, self._costs)
        self._verdicts.append(judge_parity(*difference, config.models.dtype))

    def _compare(self, run: TrainingRun, groups: Sequence[RolloutGroup]) -> tuple[float, float, float]:
        """Largest and mean difference of the log-probabilities, and the share of tokens outside the learner's."""
        trained = [training_group(group, np.zeros(len(group.rollouts), np.float32)) for group in groups]
        metrics = run.learner.old_policy(trained, on_policy=False).metrics
        prefix = "sampling/sampling_logp_difference"
        largest, mean = (metrics.get(f"{prefix}/{name}", float("nan")) for name in ("max", "mean"))
        return largest, mean, metrics["sampling/masked_share"]

    def _judge_answer(self, groups: Sequence[RolloutGroup], samples: int, seconds: float, costs: StepCosts) -> None:
        config, metrics = self._config, rollout_metrics(groups)
        mean_length = metrics["completions/mean_length"]
        tokens = round(samples * mean_length)
        self._verdicts += [
            judge_generation(tokens, samples, seconds, costs, config.rollout.timeout),
            judge_truncation(metrics["completions/clipped_ratio"], mean_length, config.rollout.max_tokens),
            judge_reward(metrics, _first_error(groups), config.reward.max_failure_share, config.experiment.algorithm),
        ]


async def _scored(
    run: TrainingRun, request: RolloutRequest, completions: Mapping[str, Sequence[Completion]]
) -> list[RolloutGroup]:
    """The request's groups; when the rewards fail as a whole, with that error on every row."""
    try:
        return await score(run.worker, request, completions)
    except RewardError as error:
        failed = Score({}, float("nan"), "failed", str(error))
    return [
        RolloutGroup(
            group.group_id,
            group.prompt,
            request.step,
            request.version,
            tuple(Rollout(completion, failed, None) for completion in completions[group.group_id]),
        )
        for group in request.groups
    ]


def _first_error(groups: Sequence[RolloutGroup]) -> str:
    return next((rollout.score.error for group in groups for rollout in group.rollouts if rollout.score.error), "")


def installed_versions() -> tuple[dict[str, str], dict[str, str]]:
    """Versions of Python and the main packages, and Gyre's requirements that do not hold, with what is there."""
    python = platform.python_version()
    versions = {"python": python} | {package: metadata.version(package) for package in SHOWN_PACKAGES}
    unmet: dict[str, str] = {}
    for line in metadata.requires("gyre") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found = "nothing"
        if found == "nothing" or not requirement.specifier.contains(found, prereleases=True):
            unmet[f"{requirement.name}{requirement.specifier}"] = found
    return versions, unmet
