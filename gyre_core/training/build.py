"""Puts a run together from its configuration, new or from its newest checkpoint."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gyre_core.checkpoint.manifest import checkpoint_order
from gyre_core.checkpoint.store import Checkpoint
from gyre_core.cluster.epochs import SupersededError, claim_epoch, require_current
from gyre_core.cluster.requests import request_step
from gyre_core.config import GyreConfig
from gyre_core.data.cursor import PromptCursor
from gyre_core.data.prompts import PromptSet, PromptSplits, arithmetic_rows, load_prompts, tokenize
from gyre_core.experience.pool import Pool
from gyre_core.learner.critic import Critic
from gyre_core.learner.local import LocalLearner
from gyre_core.monitor.metrics import MetricsWriter, read_metrics
from gyre_core.monitor.timing import process_started_at
from gyre_core.policy.lora import adapted_copy
from gyre_core.policy.models import Policy, PolicySummary, copy_policy, find_device, inspect_policy
from gyre_core.policy.reward_model import inspect_reward_model
from gyre_core.policy.tokens import render_prompt
from gyre_core.policy.value_model import inspect_critic, own_value_model, shared_value_model
from gyre_core.rewards.runner import FunctionRunner, ProcessRunner
from gyre_core.rewards.scorer import Scorer
from gyre_core.rollout.build import (
    add_reward_model,
    make_engine,
    make_reference,
    sampling_parameters,
    set_threads,
    start_scorer,
)
from gyre_core.rollout.serving import Worker
from gyre_core.rollout.shared import share
from gyre_core.storage import Storage
from gyre_core.training.checkpoints import make_saver, open_checkpoints
from gyre_core.training.credit import Credit
from gyre_core.training.evaluation import Evaluator
from gyre_core.training.lineage import note_beginning
from gyre_core.training.policies import make_start_policy
from gyre_core.training.recovery import Repeater, copy_source, find_checkpoints, recover, refuse_taken
from gyre_core.training.remote import RemoteRollout
from gyre_core.training.requests import announce_requests, plan_requests
from gyre_core.training.resume import NEW, Origin, check_fork, check_same_run, make_fingerprint
from gyre_core.training.run import TrainingRun
from gyre_core.training.run_folder import RunFolder, check_storage, run_storage
from gyre_core.training.space_guard import check_space
from gyre_core.training.verdicts import judge_prompts
from gyre_core.types import PolicyVersion, RolloutRequest
from gyre_core.weights.chain import VersionChain
from gyre_core.weights.flat import FlatWeights

logger = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds for which a run that is to be opened may be held by another process."""


@dataclass(frozen=True, slots=True)
class ModelSummaries:
    """A run's models, read without their weights."""

    policy: PolicySummary
    reference: PolicySummary | None
    """The model of the KL penalty; None without one."""
    critic_parameters: int
    """Of a critic with a trunk of its own; else 0."""
    reward_model_parameters: int
    """0 without one."""


async def open_run(
    config: GyreConfig,
    *,
    run_id: str | None = None,
    origin: Origin = NEW,
    runner: FunctionRunner | None = None,
) -> TrainingRun:
    """Open a new run, or go on from a checkpoint as `origin` says; the caller closes it.

    `runner` runs the reward functions, by default processes beside this one do.

    Whatever is cheap to check is checked before a model loads. Raises ValueError for the user's mistakes: data or
    rewards that cannot be read, columns that are missing, a run id that is taken, nothing to resume. A new run that
    cannot be opened leaves no folder behind.
    """
    set_threads(config)
    rows, scorer = await _check(config, run_id, origin, runner)
    try:
        # Before there is a new folder, which would be the newest of the name.
        source = _find_source(config, origin)
        folder = _find_folder(config, run_id) if origin.resumes else RunFolder.create(config, run_id, source)
        try:
            # Who decides about a run that crashed holds it for a moment.
            await asyncio.to_thread(folder.acquire, PATIENCE)
            run = await asyncio.to_thread(_build, config, folder, rows, scorer, origin, source)
            if run.remote is not None:
                run.remote.start()
            run.recovery.opened()
            return run
        except BaseException as error:
            folder.release()
            # A thread that was cancelled may still write there. Where there is a summary, another process trains.
            taken = isinstance(error, SupersededError) or folder.summary()
            if isinstance(error, Exception) and not origin.resumes and not taken:
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
    except BaseException:
        await asyncio.to_thread(scorer.close)
        raise


async def check_inputs(config: GyreConfig, *, run_id: str | None, origin: Origin) -> None:
    """Raise ValueError for what `open_run` would refuse before it loads a model; changes nothing.

    Reward functions are loaded beside this process, wherever they are to run.
    """
    _, scorer = await _check(config, run_id, origin, ProcessRunner(config.reward, Path.cwd()))
    await asyncio.to_thread(scorer.close)


async def _check(
    config: GyreConfig, run_id: str | None, origin: Origin, runner: FunctionRunner | None
) -> tuple[PromptSplits, Scorer]:
    """The run's rows and its running scorer, once all that is cheap to check is in order."""
    find_device(config.models.device)
    models = inspect_models(config)
    await asyncio.to_thread(check_storage, config)
    if origin.resumes:
        folder = _find_folder(config, run_id)
        await asyncio.to_thread(_find_checkpoints, config, folder, origin.step, config.experiment.steps)
    elif (source := _find_source(config, origin)) is not None:
        check_fork(source.config(), config)
        await asyncio.to_thread(_find_checkpoints, source.config(), source, origin.step, config.experiment.steps)
    if not origin.resumes:  # What a resumed run holds already is no more to be written.
        await asyncio.to_thread(check_space, config, models.policy, models.critic_parameters)
    rows = load_prompts(config.data, config.experiment.seed)
    return rows, await start_scorer(config, rows.columns, runner)


def inspect_models(config: GyreConfig) -> ModelSummaries:
    """What the run's models are like, from their configurations alone: no weight is read.

    Raises ValueError for folders that are missing or hold something else, and for a reference or critic whose token
    ids are not the policy's.
    """
    models = config.models
    policy = inspect_policy(models.policy, models.tiny, models.lora)
    reference, critic = None, 0
    if config.learning.kl_coef > 0.0:
        reference = inspect_policy(models.ref, models.tiny) if models.ref else policy
        if reference.vocabulary != policy.vocabulary:
            raise ValueError(
                f"models.ref: {models.ref} has a vocabulary of {reference.vocabulary} tokens and the policy one of "
                f"{policy.vocabulary}, so that their probabilities cannot be compared; choose a reference of the "
                "policy's family, or leave it out"
            )
    if config.experiment.algorithm == "ppo" and config.critic.trunk == "own":
        critic = inspect_critic(models.critic, policy.vocabulary) if models.critic else policy.parameters
    judge = inspect_reward_model(models.reward).parameters if models.reward else 0
    return ModelSummaries(policy, reference, critic, judge)


def make_learner(config: GyreConfig, policy: Policy) -> LocalLearner:
    """The learner: of the policy's model, which it takes over, or of adapters that share its weights."""
    dtype: torch.dtype = getattr(torch, config.models.dtype)
    model, lora = policy.model, config.models.lora
    if lora.rank:
        model = adapted_copy(model, lora, config.experiment.seed)
    critic = None
    if config.experiment.algorithm == "ppo":
        shared = config.critic.trunk == "shared"
        # A trunk of its own starts from the base, without adapters.
        values = shared_value_model(model) if shared else own_value_model(policy.model, config.models.critic)
        critic = Critic(values, config.critic, config.learning, dtype)
    return LocalLearner(model, config.learning, sampling=sampling_parameters(config), dtype=dtype, critic=critic)


@dataclass(frozen=True, slots=True)
class TokenizedPrompts:
    """A run's prompts with tokens: those it trains on and those it is evaluated on."""

    training: PromptSet
    evaluation: PromptSet


def tokenize_prompts(config: GyreConfig, rows: PromptSplits, policy: Policy) -> TokenizedPrompts:
    """Render and tokenise the run's prompts; raises ValueError for ones that cannot be rendered."""
    render = partial(render_prompt, policy.tokenizer)
    limit = config.data.max_prompt_tokens
    evaluation = rows.evaluation[: config.evaluation.prompts]
    return TokenizedPrompts(tokenize(rows.training, render, limit), tokenize(evaluation, render, limit))


def _find_folder(config: GyreConfig, run_id: str | None) -> RunFolder:
    name = config.experiment.name
    folder = RunFolder.find(f"{name}/{run_id}" if run_id else name, config.experiment.output)
    check_same_run(folder.config(), config)
    if (source := folder.begins_from()) is not None:
        raise ValueError(
            f"the run {folder.key} ended before it had begun from a checkpoint of {source}; begin another one by "
            f"--resume.from {source}"
        )
    return folder


def _find_source(config: GyreConfig, origin: Origin) -> RunFolder | None:
    """The run whose checkpoint a new one begins from; None for none."""
    return RunFolder.find(origin.source, config.experiment.output) if origin.source is not None else None


def _find_checkpoints(config: GyreConfig, folder: RunFolder, step: int | None, steps: int) -> list[str]:
    """What a run to so many `steps` may go on from; raises ValueError like `find_checkpoints`, and for a complete run.

    One that was killed between its last step and its end, while it exported its policy, say, goes on to its end.
    """
    store = open_checkpoints(config, folder)
    names = find_checkpoints(store, run_storage(config, folder), folder.key, step)
    last = names[-1] if names and folder.summary().get("status") == "completed" else None
    if last is not None and checkpoint_order(last)[1] >= steps and store.is_whole(last):
        raise ValueError(
            f"the run {folder.key} is complete: {checkpoint_order(last)[1]} of {steps} steps are done; raise "
            "experiment.steps to go on, or start a new run"
        )
    return names


def _build(
    config: GyreConfig,
    folder: RunFolder,
    rows: PromptSplits,
    scorer: Scorer,
    origin: Origin,
    source: RunFolder | None,
) -> TrainingRun:
    storage = run_storage(config, folder)
    if not origin.resumes:
        refuse_taken(config, folder, source)
    died_at = folder.last_sign()
    names: list[str] = []
    if source is not None:
        _tell_changes(f"other than in {source.key}", check_fork(source.config(), config))
        copy_source(source, config, folder, origin.step)
    if source is not None or origin.resumes:
        names = _find_checkpoints(config, folder, origin.step, config.experiment.steps)
    start = _start_policy(config, folder, rows)
    prompts = tokenize_prompts(config, rows, start)
    _tell_prompts(config, rows, prompts)
    chain = VersionChain(storage)
    add_reward_model(config, scorer)
    engine = make_engine(config, start)
    reference = make_reference(config, start)
    learner = make_learner(config, start)
    saver = make_saver(config, folder, learner, start)
    read_metrics(folder.path)  # Raises for lines that are none.
    epoch = _claim(storage, folder, names, origin)
    require_owned = partial(require_current, storage, epoch)
    if origin.resumes:
        # The owner before may have written another one until now.
        names = _find_checkpoints(config, folder, origin.step, config.experiment.steps)
        _tell_changes("changed since the run was started", check_same_run(folder.config(), config))
        folder.update_config(config, require_owned)
    metrics = MetricsWriter(folder.path, tensorboard=config.monitor.tensorboard, require_owned=require_owned)
    sampling = sampling_parameters(config, samples=config.evaluation.samples_per_prompt)
    credit = Credit(config)
    run = TrainingRun(
        config=config,
        folder=folder,
        storage=storage,
        epoch=epoch,
        policy=start,
        learner=learner,
        worker=Worker(f"train-{epoch:04d}-{os.getpid()}", storage, chain, engine, scorer, reference),
        evaluator=Evaluator(engine, scorer, chain, prompts.evaluation.prompts, sampling),
        credit=credit,
        pool=Pool(storage, config.experience, epoch, credit.smallest_group),
        cursor=PromptCursor(
            prompts.training.prompts, config.rollout.batch_size, config.experiment.seed, config.data.shuffle
        ),
        saver=saver,
        metrics=metrics,
        version=PolicyVersion(epoch, 0),
        fingerprint=make_fingerprint(start, prompts.training.prompts),
    )
    try:
        with run.recording_fatal_errors():
            if config.rollout.launcher == "pool":
                run.remote = RemoteRollout(storage, config.rollout, epoch, lambda: run.step)
                run.require_owned()
                share(storage, folder.path)
            _begin(run, names, origin, source.config() if source is not None else None, died_at)
    except BaseException:
        metrics.close()
        raise
    run.register()
    return run


def _claim(storage: Storage, folder: RunFolder, names: Sequence[str], origin: Origin) -> int:
    """Take an epoch beyond those of these checkpoints: the first write to the run's storage, when all that may be
    refused was made.

    Raises SupersededError for a new run that another process has taken over already.
    """
    newest = max((checkpoint_order(name)[0] for name in names), default=0)
    folder.require_owned()
    folder.note_begun()
    return claim_epoch(storage, f"{platform.node()}:{os.getpid()}", after=newest, new=not origin.resumes)


def _repeater(source: GyreConfig, run: TrainingRun) -> Repeater:
    """What takes the steps of the run that a fork begins from again: by the settings of that run."""
    learner = run.learner
    if _learner_settings(source) != _learner_settings(run.config):
        policy = copy_policy(run.policy, next(run.policy.model.parameters()).dtype)
        policy.model.requires_grad_(True)
        learner = make_learner(source, policy)
    return Repeater(learner, source.rollout.max_lag == 0, Credit(source).smallest_group)


def _learner_settings(config: GyreConfig) -> tuple[object, ...]:
    """What a learner is made with, beside the model."""
    return config.learning, config.critic, sampling_parameters(config)


def _tell_changes(how: str, lines: Sequence[str]) -> None:
    for line in lines:
        logger.info("%s: %s", how, line.strip())


def _begin(
    run: TrainingRun, names: Sequence[str], origin: Origin, source: GyreConfig | None, died_at: float | None
) -> None:
    """Bring the run to where it goes on, and publish the policy that it goes on with.

    `source` is how the run was configured that a fork begins from.
    """
    if names and source is None:
        started_at = process_started_at()
        run.recovery.begin(started_at if died_at is None else died_at, started_at)
    if origin.resumes and not names:
        logger.warning("%s has no checkpoint yet, and starts again at its first step", run.key)
    checkpoint = recover(run, names, None if source is None else partial(_repeater, source, run))
    note_beginning(run.storage, run.epoch, checkpoint.name if checkpoint is not None else None)
    run.metrics.truncate_after(run.step)
    parent = PolicyVersion(**checkpoint.state["version"]) if checkpoint and source is None else None
    with run.recovery.timed("publish"):
        run.chain.publish(run.version, parent, FlatWeights.of(run.learner.policy_weights()))
    if checkpoint is not None:
        run.stragglers = {request.request_id: request for request in _announce_stragglers(run, checkpoint)}
        if source is not None or origin.step is not None:
            # Whoever takes over after this must neither find what was given up to be the newest, nor have to repeat
            # steps of another run, perhaps by other settings.
            run.save_now()


def _announce_stragglers(run: TrainingRun, checkpoint: Checkpoint) -> tuple[RolloutRequest, ...]:
    """What the steps up to the checkpoint still waited for, asked for anew."""
    names = checkpoint.state["stragglers"]
    planned = [
        request for step in sorted({request_step(name) for name in names}) for request in plan_requests(run, step)
    ]
    requests = announce_requests(run, [request for request in planned if request.request_id in names])
    if run.remote is not None and requests:
        run.remote.dispatcher.follow(requests)
    return requests


def _start_policy(config: GyreConfig, folder: RunFolder, rows: PromptSplits) -> Policy:
    """The policy as the run starts: in float32 where it is trained, in the computing type beneath adapters."""
    start = make_start_policy(config, folder, rows.warm_start or arithmetic_rows(config.experiment.seed))
    return copy_policy(start, getattr(torch, config.models.dtype)) if config.models.lora.rank else start


def _tell_prompts(config: GyreConfig, rows: PromptSplits, prompts: TokenizedPrompts) -> None:
    """Log how many prompts there are, what was left out, and a data set that is smaller than a step's batch."""
    count = len(prompts.training.prompts)
    verdict = judge_prompts(count, prompts.training.too_long, rows.duplicates, rows.overlapping, config)
    held_out = f"{len(prompts.evaluation.prompts)} held out"
    if prompts.evaluation.too_long:
        held_out += f", without {prompts.evaluation.too_long} that are too long"
    told = "; ".join(filter(None, (verdict.evidence, held_out, verdict.remedy)))
    logger.log(logging.INFO if verdict.outcome == "ok" else logging.WARNING, "prompts: %s", told)
