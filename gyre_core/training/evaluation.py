"""How good a policy version is on held-out prompts: one greedy completion each, and sampled ones.

Evaluation uses the engine and the scorer of training, with noise of its own, and touches neither the pool nor the
learner.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gyre_core.engines.base import Engine
from gyre_core.rewards.scorer import Scorer
from gyre_core.rollout.serving import generate
from gyre_core.types import GroupRequest, PolicyVersion, Prompt, SamplingParameters, Score
from gyre_core.weights.chain import VersionChain

_GREEDY = "greedy"
_SAMPLED = "sampled"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rewards of one policy version on held-out prompts.

    `reward` is the mean over sampled completions and `reward_se` its standard error, prompts taken as independent;
    `greedy_reward` and `greedy_reward_se` are the same for greedy decoding. `prompts` counts the prompts with at
    least one scored completion, `unscored` the completions without a score, `mean_length` is in tokens.
    """

    version: PolicyVersion
    step: int
    reward: float
    reward_se: float
    greedy_reward: float
    greedy_reward_se: float
    prompts: int
    unscored: int
    mean_length: float
    seconds: float

    def metrics(self) -> dict[str, float]:
        """The evaluation under its names in `metrics.jsonl`; what is not known of so few scores is left out."""
        metrics = {
            "eval/heldout/reward": self.reward,
            "eval/heldout/reward_se": self.reward_se,
            "eval/heldout/greedy_reward": self.greedy_reward,
            "eval/heldout/greedy_reward_se": self.greedy_reward_se,
            "eval/heldout/mean_length": self.mean_length,
            "eval/heldout/unscored": float(self.unscored),
            "time/evaluation": self.seconds,
        }
        return {name: value for name, value in metrics.items() if math.isfinite(value)}


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates policy versions on a fixed list of prompts."""

    engine: Engine
    scorer: Scorer
    chain: VersionChain
    prompts: Sequence[Prompt]
    sampling: SamplingParameters
    """Sampling of the sampled completions; `samples` of them for each prompt."""

    async def evaluate(self, version: PolicyVersion, step: int) -> Evaluation:
        """Generate, score and average; the same version gives the same numbers whenever it is asked."""
        started = time.monotonic()
        if self.engine.version != version:
            await self.engine.load_weights(version, await asyncio.to_thread(self.chain.load, version))
        greedy = replace(self.sampling, samples=1, temperature=0.0, top_p=1.0, top_k=0)
        greedy_rewards, greedy_unscored, _ = await self._rewards(_GREEDY, greedy, version, step)
        rewards, unscored, mean_length = await self._rewards(_SAMPLED, self.sampling, version, step)
        return Evaluation(
            version=version,
            step=step,
            reward=_mean(rewards),
            reward_se=_standard_error(rewards),
            greedy_reward=_mean(greedy_rewards),
            greedy_reward_se=_standard_error(greedy_rewards),
            prompts=len(rewards),
            unscored=unscored + greedy_unscored,
            mean_length=mean_length,
            seconds=time.monotonic() - started,
        )

    async def _rewards(
        self, kind: str, sampling: SamplingParameters, version: PolicyVersion, step: int
    ) -> tuple[list[float], int, float]:
        """Mean reward of each prompt that has one, number of completions without a score, mean length."""
        requests = [GroupRequest(f"{kind}-{index:06d}", prompt) for index, prompt in enumerate(self.prompts)]
        completions = await generate(self.engine, requests, sampling)
        pairs = [(request.prompt, completions[request.group_id]) for request in requests]
        scores: list[list[Score]] = await self.scorer.score(pairs, step=step, version=version)
        by_prompt = [[score.reward for score in group if score.status == "scored"] for group in scores]
        lengths = [len(completion.token_ids) for group in completions.values() for completion in group]
        scored = sum(len(rewards) for rewards in by_prompt)
        return (
            [float(np.mean(rewards)) for rewards in by_prompt if rewards],
            sum(len(group) for group in scores) - scored,
            float(np.mean(lengths)),
        )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN for fewer than two values."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
