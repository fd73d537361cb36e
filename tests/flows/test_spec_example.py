"""examples/spec.yaml, as it stands, runs where its model folders are, by what is built so far."""

import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import take_steps
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from gyre_core.config import load_config
from gyre_core.config.runnable import refuse_unbuilt
from gyre_core.policy.tiny import tiny_tokenizer
from gyre_core.training.build import open_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "spec.yaml"
NOT_BUILT = {
    "rollout.engine": "transformers",
    "rollout.launcher": "inline",
    "elastic.enabled": "false",
}
SMALLER = {"experiment.steps": "1", "rollout.max_tokens": "8", "evaluation.prompts": "8", "data.size": "256"}


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The file with toy models in the folders that it names, beside it."""
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 2, "bos_token_id": 1}
    torch.manual_seed(0)
    models = {
        "qwen-base-7b": Qwen2ForCausalLM(Qwen2Config(**shape)),
        "reward-model-path": Qwen2ForSequenceClassification(Qwen2Config(**shape, num_labels=1, pad_token_id=0)),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return shutil.copy(EXAMPLE, tmp_path)


async def test_the_example_of_the_specification_runs(example):
    config = load_config(example, [*NOT_BUILT.items(), *SMALLER.items()])
    refuse_unbuilt(config)
    run = await open_run(config)
    try:
        await take_steps(run, attempts=1)
        metrics = run.results[1].metrics
        assert metrics["num_samples"] == 128 * 8
        assert metrics["optim/updates"] == 8.0
        # The reward model is the only judge, so its score is the reward; the reference is the policy itself.
        assert metrics["reward"] == pytest.approx(metrics["rewards/reward_model/mean"])
        assert metrics["reward_std"] > 0.0
        assert metrics["kl"] < 1e-3
        assert metrics["learning_rate"] == pytest.approx(5e-7, rel=0.2)
    finally:
        await run.close()
