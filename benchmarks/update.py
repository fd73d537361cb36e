"""Tokens per second of the packed update against a padded one: same model, loss, optimiser and threads.

The padded update is the usual one: a row per completion with its own copy of the prompt, right-padded to the longest
row of the minibatch, logits for every completion position. The two alternate, so that a busy machine hits both.
The last line is one JSON object: completion tokens trained per second, best of the rounds, and their quotient.

    python benchmarks/update.py --threads 1
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from gyre_core.algorithms.policy_loss import TokenInputs, policy_loss
from gyre_core.config.sections import LearningConfig, TinyModelConfig
from gyre_core.learner.local import LocalLearner
from gyre_core.policy.logprobs import CausalLM
from gyre_core.policy.tiny import tiny_model
from gyre_core.types import Minibatch, PolicyVersion, SamplingParameters, TrainingGroup

CONFIG = LearningConfig()


@dataclass(frozen=True)
class Case:
    """Groups of one minibatch: `mean` completion tokens each, all alike or geometrically spread."""

    name: str
    groups: int
    samples: int
    prompt: int
    mean: int
    spread: bool


CASES = (
    Case("short_equal", groups=16, samples=8, prompt=7, mean=4, spread=False),
    Case("long_prompt", groups=8, samples=8, prompt=128, mean=32, spread=False),
    Case("long_tailed", groups=8, samples=8, prompt=32, mean=64, spread=True),
)


def make_groups(case: Case, seed: int) -> tuple[TrainingGroup, ...]:
    rng = np.random.default_rng(seed)

    def tokens(length: int) -> np.ndarray:
        return rng.integers(4, 50, size=length).astype(np.int32)

    def group(index: int) -> TrainingGroup:
        lengths = rng.geometric(1 / case.mean, case.samples).clip(max=10 * case.mean) if case.spread else None
        lengths = np.full(case.samples, case.mean) if lengths is None else lengths
        return TrainingGroup(
            group_id=str(index),
            prompt_ids=tokens(case.prompt),
            completions=tuple(tokens(length) for length in lengths),
            behaviour=tuple(np.full(length, -4.0, dtype=np.float32) for length in lengths),
            reference=None,
            truncated=np.zeros(case.samples, dtype=bool),
            rewards=np.zeros(case.samples),
            advantages=rng.normal(size=case.samples).astype(np.float32),
            version=PolicyVersion(0, 0),
        )

    return tuple(group(index) for index in range(case.groups))


class PaddedUpdate:
    """One optimiser update from a right-padded batch."""

    def __init__(self, model: CausalLM, groups: tuple[TrainingGroup, ...]) -> None:
        self.model = model.eval()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=CONFIG.betas, weight_decay=0, fused=True)
        self.groups = groups

    def __call__(self) -> None:
        rows = [
            (group.prompt_ids, completion, advantage)
            for group in self.groups
            for completion, advantage in zip(group.completions, group.advantages, strict=True)
        ]
        width = max(len(prompt) + len(completion) for prompt, completion, _ in rows)
        token_ids = np.zeros((len(rows), width), dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=np.int64)
        trained = np.zeros((len(rows), width), dtype=bool)
        for index, (prompt, completion, _) in enumerate(rows):
            end = len(prompt) + len(completion)
            token_ids[index, :end] = np.concatenate([prompt, completion])
            mask[index, :end] = 1
            trained[index, len(prompt) : end] = True
        first = min(len(prompt) for prompt, _, _ in rows)
        logits = self.model(
            input_ids=torch.from_numpy(token_ids),
            attention_mask=torch.from_numpy(mask),
            logits_to_keep=width - first + 1,
            use_cache=False,
        ).logits[:, :-1]
        targets = torch.from_numpy(token_ids[:, first:])
        scores = logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
        kept = torch.from_numpy(trained[:, first:])
        advantages = torch.tensor([advantage for _, _, advantage in rows])[:, None].expand_as(kept)[kept]
        ones = torch.ones_like(advantages)
        sequences = torch.arange(len(rows))[:, None].expand_as(kept)[kept]
        inputs = TokenInputs(-4.0 * ones, ones, advantages, None, ones / len(ones), sequences)
        self.optimizer.zero_grad()
        loss, _ = policy_loss(scores[kept], ones, inputs, CONFIG, 0.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CONFIG.max_grad_norm)
        self.optimizer.step()


def packed_update(model: CausalLM, groups: tuple[TrainingGroup, ...]) -> Callable[[], object]:
    learner = LocalLearner(model, CONFIG, sampling=SamplingParameters(8, 1024), dtype=torch.float32)
    old = learner.begin_step(groups, on_policy=True)
    return lambda: learner.apply(Minibatch(groups, 1e-6, 0.0), old)


def seconds(update: Callable[[], object]) -> float:
    start = time.perf_counter()
    update()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result: dict[str, object] = vars(arguments)
    for case in CASES:
        groups = make_groups(case, seed=0)
        model = tiny_model(TinyModelConfig(hidden_size=arguments.hidden_size, layers=arguments.layers), seed=0)
        packed, padded = packed_update(copy.deepcopy(model), groups), PaddedUpdate(model, groups)
        rounds = [(seconds(packed), seconds(padded)) for _ in range(arguments.rounds)]
        tokens = sum(len(completion) for group in groups for completion in group.completions)
        fastest = [min(column) for column in zip(*rounds, strict=True)]
        result[case.name] = {
            "packed_tokens_per_second": round(tokens / fastest[0]),
            "padded_tokens_per_second": round(tokens / fastest[1]),
            "speedup": round(fastest[1] / fastest[0], 2),
        }
        print(case.name, result[case.name], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
