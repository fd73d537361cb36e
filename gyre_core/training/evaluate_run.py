"""Evaluates a run's newest policy version on its held-out prompts, whether the run still trains or not."""

from __future__ import annotations

import asyncio

from gyre_core.data.prompts import load_prompts
from gyre_core.rewards.runner import FunctionRunner
from gyre_core.rollout.build import add_reward_model, make_engine, sampling_parameters, set_threads, start_scorer
from gyre_core.training.build import tokenize_prompts
from gyre_core.training.evaluation import Evaluation, Evaluator
from gyre_core.training.policies import load_start_policy
from gyre_core.training.run_folder import RunFolder, run_storage
from gyre_core.weights.chain import VersionChain


def evaluate_run(run: str, output: str, runner: FunctionRunner | None = None) -> str:
    """The evaluation of a run's newest policy version, as text; nothing is written to the run.

    `runner` runs the reward functions, by default processes beside this one do.
    Raises ValueError for an unknown run, one without a published version, and one without held-out prompts.
    """
    folder = RunFolder.find(run, output)
    return describe_evaluation(folder.key, asyncio.run(_evaluate(folder, runner)))


def describe_evaluation(key: str, evaluation: Evaluation) -> str:
    """An evaluation of the run with this key in a few lines; rewards with their standard errors."""
    lines = [
        f"run            {key}",
        f"version        {evaluation.version}",
        f"reward         {evaluation.reward:.4f} ± {evaluation.reward_se:.4f}  (sampled as in training)",
        f"greedy reward  {evaluation.greedy_reward:.4f} ± {evaluation.greedy_reward_se:.4f}",
        f"prompts        {evaluation.prompts} held out, evaluated in {evaluation.seconds:.1f} s",
        f"mean length    {evaluation.mean_length:.1f} tokens",
    ]
    if evaluation.unscored:
        lines.append(f"not scored     {evaluation.unscored} completions, which count in no mean")
    return "\n".join(lines)


async def _evaluate(folder: RunFolder, runner: FunctionRunner | None) -> Evaluation:
    config = folder.config()
    chain = VersionChain(run_storage(config, folder))
    if not chain.versions():
        raise ValueError(f"the run {folder.key} has published no policy version yet; there is nothing to evaluate")
    set_threads(config)
    rows = load_prompts(config.data, config.experiment.seed)
    if not rows.evaluation:
        raise ValueError(f"the run {folder.key} holds no prompts out; see data.evaluation_size and evaluation_path")
    scorer = await start_scorer(config, rows.columns, runner)
    try:
        await asyncio.to_thread(add_reward_model, config, scorer)
        policy = await asyncio.to_thread(load_start_policy, config, folder)
        engine = make_engine(config, policy)
        try:
            prompts = tokenize_prompts(config, rows, policy).evaluation.prompts
            sampling = sampling_parameters(config, samples=config.evaluation.samples_per_prompt)
            # The newest one now: a run that still trains has gone on, and drops old versions.
            version = chain.versions()[-1]
            return await Evaluator(engine, scorer, chain, prompts, sampling).evaluate(version, version.number)
        finally:
            await engine.close()
    finally:
        await asyncio.to_thread(scorer.close)
