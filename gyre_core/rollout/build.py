"""The parts of whoever generates, from the configuration: engine, scorer, reference; and a whole rollout worker."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection
from pathlib import Path

import torch

from gyre_core.config import GyreConfig, load_config
from gyre_core.engines.base import Engine
from gyre_core.engines.rate_limited import RateLimitedEngine
from gyre_core.engines.transformers_engine import TransformersEngine
from gyre_core.policy.logprobs import ReferenceModel
from gyre_core.policy.models import Policy, copy_policy, load_model, load_policy
from gyre_core.policy.reward_model import load_reward_model
from gyre_core.rewards.runner import FunctionRunner
from gyre_core.rewards.scorer import Scorer
from gyre_core.rollout.serving import Worker
from gyre_core.rollout.shared import CONFIG, fetch_start_policy
from gyre_core.storage import Storage
from gyre_core.types import SamplingParameters
from gyre_core.weights.chain import VersionChain


def sampling_parameters(config: GyreConfig, samples: int | None = None) -> SamplingParameters:
    """How completions are sampled, `samples` of each prompt (default: the size of a group)."""
    rollout = config.rollout
    return SamplingParameters(
        samples=samples or rollout.samples_per_prompt,
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        seed=config.experiment.seed,
    )


def set_threads(config: GyreConfig) -> None:
    """Give torch the configured number of threads, by default the cores that this process may use."""
    torch.set_num_threads(config.experiment.threads or len(os.sched_getaffinity(0)))


def make_engine(config: GyreConfig, policy: Policy) -> Engine:
    """The configured engine, with a copy of the policy's model of its own."""
    dtype: torch.dtype = getattr(torch, config.models.dtype)
    engine = TransformersEngine(copy_policy(policy, dtype), config.rollout.sequences_in_flight)
    limit = config.rollout.tokens_per_second
    return RateLimitedEngine(engine, limit) if limit else engine


def make_reference(config: GyreConfig, start: Policy) -> ReferenceModel | None:
    """The reference of the KL penalty: `models.ref`, or the policy as the run started; None without a penalty.

    The base of adapters is never trained, and serves as it is.
    """
    if config.learning.kl_coef == 0.0:
        return None
    dtype: torch.dtype = getattr(torch, config.models.dtype)
    if config.models.ref:
        model = load_model(config.models.ref, dtype)
        torch.nn.Module.to(model, start.model.device)
    else:
        model = start.model if config.models.lora.rank else copy_policy(start, dtype).model
    return ReferenceModel(model, sampling_parameters(config), config.learning.tokens_per_micro_batch)


async def start_scorer(
    config: GyreConfig, columns: Collection[str] | None = None, runner: FunctionRunner | None = None
) -> Scorer:
    """The running scorer; raises ValueError for functions that cannot be loaded or need columns the data lacks.

    Without `columns` those of the data are not looked at. `runner` runs the functions, by default processes beside
    this one do.
    """
    if runner is None and config.reward.launcher != "process":
        raise ValueError(
            f"reward.launcher: {config.reward.launcher} is for runs on Prefect; set it to process to run the reward "
            "functions here"
        )
    scorer = Scorer(config.reward, Path.cwd(), runner)
    try:
        await scorer.start()
        if columns is not None:
            scorer.check_columns(columns)
    except BaseException:
        await asyncio.to_thread(scorer.close)
        raise
    return scorer


def add_reward_model(config: GyreConfig, scorer: Scorer) -> None:
    """Load the configured reward model, if there is one, and have the scorer score with it too."""
    if config.models.reward is not None:
        judge = load_reward_model(config.models, config.learning.tokens_per_micro_batch)
        scorer.add_judge("reward_model", config.reward.model_weight, judge)


def read_config(storage: Storage) -> GyreConfig:
    """The configuration of the run whose data lies in `storage`; raises FileNotFoundError where there is none."""
    with storage.local_file(CONFIG) as file:
        return load_config(file)


async def open_worker(
    config: GyreConfig, storage: Storage, token: str, runner: FunctionRunner | None = None
) -> tuple[Worker, dict[str, float]]:
    """The parts of a rollout worker, and the seconds that each took to come up.

    `token` is unique to this process; `runner` runs the reward functions as in `start_scorer`. The engine holds the
    newest published policy version. The caller closes the worker. Raises ValueError for models or rewards that cannot
    be loaded here.
    """
    set_threads(config)
    seconds: dict[str, float] = {}
    started = time.monotonic()
    scorer = await start_scorer(config, runner=runner)
    seconds["rewards"], started = time.monotonic() - started, time.monotonic()
    try:
        start = await asyncio.to_thread(_load_start_policy, config, storage)
        await asyncio.to_thread(add_reward_model, config, scorer)
        engine = await asyncio.to_thread(make_engine, config, start)
        reference = await asyncio.to_thread(make_reference, config, start)
        seconds["models"], started = time.monotonic() - started, time.monotonic()
        worker = Worker(token, storage, VersionChain(storage), engine, scorer, reference)
        versions = await asyncio.to_thread(worker.chain.versions)
        if versions:
            async with worker.gate.holding(versions[-1]):
                pass
        seconds["weights"] = time.monotonic() - started
    except BaseException:
        await asyncio.to_thread(scorer.close)
        raise
    return worker, seconds


def _load_start_policy(config: GyreConfig, storage: Storage) -> Policy:
    with fetch_start_policy(storage) as folder:
        models = config.models.model_copy(update={"policy": str(folder)}) if folder else config.models
        start = load_policy(models, config.experiment.seed)
    return copy_policy(start, getattr(torch, config.models.dtype)) if config.models.lora.rank else start
