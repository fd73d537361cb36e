"""Tokens per second of the transformers engine against `generate` of transformers.

The same weights, prompts, sampling and threads; the two alternate, and each figure is the median of the rounds.

- equal: every completion has `--tokens` tokens.
- long-tailed: completions end by an end-of-sequence token, which the untrained model samples about once in 52
  tokens, or at `--longest`.

Both hold `--in-flight` sequences at a time. `generate` takes them batch by batch and returns no log-probabilities.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from gyre_core.config.sections import ModelsConfig, TinyModelConfig
from gyre_core.engines.transformers_engine import TransformersEngine
from gyre_core.policy.models import Policy, copy_policy, load_policy
from gyre_core.policy.tokens import render_prompt
from gyre_core.types import GroupRequest, PolicyVersion, Prompt, SamplingParameters


@dataclass(frozen=True)
class Workload:
    """What both sides generate: `longest` tokens each, or fewer where an end-of-sequence token comes."""

    policy: Policy
    requests: list[GroupRequest]
    samples: int
    longest: int
    in_flight: int


def make_requests(policy: Policy, groups: int, prompt_tokens: int) -> list[GroupRequest]:
    rng = np.random.default_rng(0)
    requests = []
    for index in range(groups):
        text, token_ids = render_prompt(policy.tokenizer, "".join(rng.choice(list("0123456789"), prompt_tokens - 1)))
        requests.append(GroupRequest(f"g{index}", Prompt(str(index), text, text, token_ids)))
    return requests


async def run_engine(engine: TransformersEngine, work: Workload, seed: int) -> int:
    sampling = SamplingParameters(work.samples, work.longest, seed=seed)
    return sum([len(completion.token_ids) async for completion in engine.generate(work.requests, sampling)])


def run_transformers(work: Workload, seed: int) -> int:
    torch.manual_seed(seed)
    eos_ids, pad_id = work.policy.tokens.eos_ids, work.policy.tokens.pad_id
    tokens = 0
    for start in range(0, len(work.requests), work.in_flight // work.samples):
        batch = work.requests[start : start + work.in_flight // work.samples]
        prompts = torch.from_numpy(np.stack([request.prompt.token_ids for request in batch])).long()
        sequences = work.policy.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=work.longest,
            num_return_sequences=work.samples,
            eos_token_id=list(eos_ids) or None,
            pad_token_id=pad_id,
        )
        ended = torch.isin(sequences[:, prompts.shape[1] :], torch.tensor(eos_ids, dtype=torch.int64)).int()
        # A completion reaches to its first end-of-sequence token, that token included.
        tokens += int((ended.cumsum(1) - ended == 0).sum())
    return tokens


def timed(run: Callable[[], int]) -> float:
    started = time.perf_counter()
    tokens = run()
    return tokens / (time.perf_counter() - started)


def compare(loop: asyncio.Runner, work: Workload, rounds: int) -> dict[str, float]:
    engine = TransformersEngine(copy_policy(work.policy, torch.float32), work.in_flight)
    loop.run(engine.load_weights(PolicyVersion(0, 0), work.policy.model.state_dict()))
    ours, theirs = [], []
    for seed in range(rounds + 1):
        ours.append(timed(lambda seed=seed: loop.run(run_engine(engine, work, seed))))
        theirs.append(timed(lambda seed=seed: run_transformers(work, seed)))
    loop.run(engine.close())
    # The first round warms up.
    engine_rate, generate_rate = statistics.median(ours[1:]), statistics.median(theirs[1:])
    return {
        "engine_tokens_per_second": round(engine_rate),
        "generate_tokens_per_second": round(generate_rate),
        "ratio": round(engine_rate / generate_rate, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tiny = TinyModelConfig(hidden_size=options.hidden, layers=options.layers)
    policy = load_policy(ModelsConfig(tiny=tiny), seed=0)
    requests = make_requests(policy, options.groups, options.prompt_tokens)
    endless = replace(policy, tokens=replace(policy.tokens, eos_ids=()))
    # `generate` would take them from here when it is given none.
    policy.model.generation_config.eos_token_id = None
    result: dict[str, object] = {"options": vars(options)}
    with asyncio.Runner() as loop:
        for name, chosen, longest in [("equal", endless, options.tokens), ("long_tailed", policy, options.longest)]:
            work = Workload(chosen, requests, options.samples, longest, options.in_flight)
            result[name] = compare(loop, work, options.rounds)
            print(name, result[name], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
