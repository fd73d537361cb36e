"""A short supervised training that gives a fresh tiny policy something to improve on by RL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gyre_core.config.sections import WarmStartConfig
from gyre_core.data.prompts import PromptRow
from gyre_core.policy.models import Policy
from gyre_core.policy.tokens import render_prompt

_MEASURE_EVERY = 10
_MEASURED_ROWS = 256
_RAMP_STEPS = 20
_BETAS = (0.9, 0.99)
_MAX_GRAD_NORM = 1.0
_ANSWER_COLUMN = "answer"


@dataclass(frozen=True, slots=True)
class WarmStartResult:
    """How a warm start ended."""

    steps: int
    accuracy: float
    """Share of answers that would be exact if sampled at temperature 1, on rows that were not trained on."""


@dataclass(frozen=True, slots=True)
class _Solved:
    """Prompts with their answers, padded at the end."""

    token_ids: NDArray[np.int64]
    """`[rows, time]`"""
    answer: NDArray[np.bool_]
    """True at the answer's tokens, end-of-sequence token included; `[rows, time]`."""

    def take(self, rows: NDArray[np.int64] | slice) -> _Solved:
        return _Solved(self.token_ids[rows], self.answer[rows])


def warm_start(policy: Policy, solved: Sequence[PromptRow], config: WarmStartConfig, seed: int) -> WarmStartResult:
    """Train the policy's model on the answers of `solved` until it samples enough of them exactly.

    Only answer tokens count in the loss. A part of the rows, 256 at the most, is kept for measuring. A function of
    weights, rows, configuration and seed. Raises ValueError for a row without an `answer` and for too few rows.
    """
    if len(solved) < 4:
        raise ValueError(f"a warm start needs at least 4 solved prompts, but there are {len(solved)}")
    rows = _encode(policy, solved)
    measured = min(_MEASURED_ROWS, len(solved) // 4)
    held, training = rows.take(slice(measured)), rows.take(slice(measured, None))
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=config.lr, betas=_BETAS, weight_decay=0.0)
    step, accuracy = 0, _sampled_accuracy(policy, held)
    while step < config.max_steps and accuracy < config.target_accuracy:
        chosen = rng.choice(len(training.token_ids), min(config.batch_size, len(training.token_ids)), replace=False)
        batch = training.take(chosen)
        optimizer.param_groups[0]["lr"] = config.lr * min(1.0, (step + 1) / _RAMP_STEPS)
        loss = -_answer_log_probabilities(policy, batch).sum() / int(batch.answer.sum())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        step += 1
        if step % _MEASURE_EVERY == 0 or step == config.max_steps:
            accuracy = _sampled_accuracy(policy, held)
    policy.model.zero_grad()
    return WarmStartResult(step, accuracy)


def _encode(policy: Policy, solved: Sequence[PromptRow]) -> _Solved:
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    for row in solved:
        if _ANSWER_COLUMN not in row.columns:
            raise ValueError(f"{row.source}: a warm start needs the column {_ANSWER_COLUMN}, which this row lacks")
        prompts.append(render_prompt(policy.tokenizer, row.prompt)[1].tolist())
        answer = policy.tokenizer(str(row.columns[_ANSWER_COLUMN]), add_special_tokens=False)["input_ids"]
        answers.append([*answer, *policy.tokens.eos_ids[:1]])
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    token_ids = np.full((len(solved), longest), policy.tokens.pad_id, dtype=np.int64)
    mask = np.zeros((len(solved), longest), dtype=np.bool_)
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        token_ids[index, :end] = prompt + answer
        mask[index, len(prompt) : end] = True
    return _Solved(token_ids, mask)


def _answer_log_probabilities(policy: Policy, rows: _Solved) -> torch.Tensor:
    """Of each answer token, and 0 elsewhere, `[rows, time - 1]`."""
    token_ids = torch.from_numpy(rows.token_ids).to(policy.model.device)
    # Padding lies behind every token that counts, so that causal attention alone keeps it out.
    logits = policy.model(input_ids=token_ids[:, :-1], use_cache=False).logits.float()
    chosen = logits.log_softmax(dim=-1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    return chosen * torch.from_numpy(rows.answer[:, 1:]).to(chosen.device)


@torch.no_grad()
def _sampled_accuracy(policy: Policy, rows: _Solved) -> float:
    """The expected share of exact answers at temperature 1: the mean probability of a whole answer."""
    return float(_answer_log_probabilities(policy, rows).sum(dim=1).exp().mean())
