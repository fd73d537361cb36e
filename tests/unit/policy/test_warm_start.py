"""The supervised warm start of a tiny policy."""

import pytest
import torch

from gyre_core.config.sections import ModelsConfig, TinyModelConfig, WarmStartConfig
from gyre_core.data.prompts import PromptRow
from gyre_core.engines.transformers_engine import TransformersEngine
from gyre_core.policy.models import copy_policy, load_policy
from gyre_core.policy.tokens import render_prompt
from gyre_core.policy.warm_start import warm_start
from gyre_core.types import GroupRequest, PolicyVersion, Prompt, SamplingParameters

ROWS = [PromptRow(f"p{n}", f"{n % 10}>", {"answer": str((n * 3) % 10)}, f"row {n}") for n in range(80)]
MODELS = ModelsConfig(tiny=TinyModelConfig(hidden_size=32, layers=1))


def started(seed=0, **settings):
    policy = load_policy(MODELS, seed)
    config = WarmStartConfig(**{"max_steps": 60, "batch_size": 20, "lr": 1e-2, **settings})
    return policy, warm_start(policy, ROWS, config, seed)


async def test_the_accuracy_is_that_of_sampling():
    """Ten distinct prompts, each sampled 400 times: the share of exact answers is within four standard errors."""
    policy, result = started(target_accuracy=0.5)
    assert 0.5 <= result.accuracy < 1.0
    assert result.steps < 60
    engine = TransformersEngine(copy_policy(policy, torch.float32))
    await engine.load_weights(PolicyVersion(0, 0), policy.model.state_dict())
    requests = []
    for row in ROWS[:20]:  # The rows that were measured.
        text, token_ids = render_prompt(policy.tokenizer, row.prompt)
        requests.append(GroupRequest(row.prompt_id, Prompt(row.prompt_id, row.prompt, text, token_ids, row.columns)))
    answers = {row.prompt_id: row.columns["answer"] for row in ROWS}
    exact = [
        completion.text == answers[completion.group_id] and completion.finish_reason == "stop"
        async for completion in engine.generate(requests, SamplingParameters(200, 4, seed=1))
    ]
    await engine.close()
    assert len(exact) == 4000
    assert abs(sum(exact) / 4000 - result.accuracy) < 4 * (0.25 / 4000) ** 0.5


def test_it_is_a_function_of_its_seed():
    (first, first_result), (again, again_result), (other, _) = started(1), started(1), started(2)
    assert first_result == again_result
    weights = [policy.model.state_dict()["lm_head.weight"] for policy in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert all(parameter.grad is None for parameter in first.model.parameters())


def test_no_steps_leave_the_policy_as_it_was():
    policy, result = started(max_steps=0)
    assert result.steps == 0
    fresh = load_policy(MODELS, 0).model.state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in policy.model.state_dict().items())


def test_rows_that_cannot_teach_are_refused():
    policy = load_policy(MODELS, 0)
    with pytest.raises(ValueError, match="at least 4 solved prompts, but there are 3"):
        warm_start(policy, ROWS[:3], WarmStartConfig(), 0)
    unsolved = [*ROWS, PromptRow("p", "1>", {}, "sums.jsonl:9")]
    with pytest.raises(ValueError, match=r"sums\.jsonl:9: .* column answer"):
        warm_start(policy, unsolved, WarmStartConfig(), 0)
