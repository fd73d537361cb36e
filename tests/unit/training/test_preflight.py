"""Preflight: a healthy run passes, each fault fails or warns by name, and nothing stays behind."""

import json

import pytest
import torch
from training_configs import tiny_config

from gyre_core.config.sections import ModelsConfig, TinyModelConfig
from gyre_core.engines.transformers_engine import TransformersEngine
from gyre_core.policy.models import copy_policy, load_policy, save_policy
from gyre_core.training import build
from gyre_core.training.preflight import installed_versions, preflight, run_preflight


async def verdicts_of(config):
    return {verdict.name: verdict for verdict in await preflight(config)}


async def test_a_healthy_run_passes_and_leaves_nothing(tmp_path):
    config = tiny_config(tmp_path)
    verdicts = await preflight(config)
    assert [verdict.name for verdict in verdicts] == [
        "versions", "threads", "models", "memory", "storage", "start", "prompts", "lengths", "tokens", "evaluation",
        "generation", "truncation", "reward", "parity", "disk",
    ]  # fmt: skip
    assert {verdict.outcome for verdict in verdicts if verdict.name not in ("threads", "truncation")} == {"ok"}
    assert all(bool(verdict.remedy) == (verdict.outcome != "ok") for verdict in verdicts)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["rewards.py"]


async def test_what_was_there_before_stays(tmp_path):
    config = tiny_config(tmp_path, storage={"url": str(tmp_path / "data")})
    kept = [tmp_path / "runs" / "trial" / "config.yaml", tmp_path / "data" / "trial" / "object"]
    for file in kept:
        file.parent.mkdir(parents=True)
        file.write_text("kept")
    assert "fail" not in {verdict.outcome for verdict in await preflight(config)}
    found = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.name != "rewards.py")
    assert found == sorted(kept)


def test_the_exit_code_says_whether_anything_failed(tmp_path, capsys):
    assert run_preflight(tiny_config(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "parity" in printed
    assert "0 failed" in printed
    broken = tiny_config(tmp_path, "def reward(completions, **columns):\n    raise KeyError('no such key')")
    assert run_preflight(broken) == 1
    printed = capsys.readouterr().out
    assert "no such key" in printed
    assert "1 failed" in printed


@pytest.mark.parametrize("place", ["output", "url"])
async def test_a_file_where_a_folder_should_be_fails(tmp_path, place):
    (tmp_path / "taken").write_text("a file")
    changed = {"experiment": {"output": str(tmp_path / "taken")}}
    if place == "url":
        changed = {"storage": {"url": str(tmp_path / "taken")}}
    verdicts = await preflight(tiny_config(tmp_path, **changed))
    (failed,) = [verdict for verdict in verdicts if verdict.outcome == "fail"]
    assert failed.name == "storage"
    assert str(tmp_path / "taken") in failed.evidence
    assert (verdicts[-1].name, verdicts[-1].outcome) == ("trial", "warn")
    assert (tmp_path / "taken").read_text() == "a file"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("size", [16, 200])
async def test_a_volume_that_is_too_small_fails(tmp_path, small_volume, size):
    """3,192 parameters: 4 versions take 50 KiB, 3 checkpoints 112 KiB; 200 KiB hold the trial, but not the run."""
    folder = small_volume(size)
    output = {"output": str(folder / "runs")}
    verdicts = await verdicts_of(tiny_config(tmp_path, experiment=output, storage={"min_free": 0}))
    assert verdicts["disk"].outcome == "fail"
    assert "of 16 KiB free" in verdicts["disk"].evidence or "of 200 KiB free" in verdicts["disk"].evidence
    if size == 16:
        assert verdicts["start"].outcome == "fail"
        assert f"no space left in {folder}" in verdicts["start"].evidence
    assert list(folder.iterdir()) == []


async def test_what_is_to_stay_free_counts_as_taken(tmp_path, small_volume):
    folder = small_volume(2048)
    output, storage = {"output": str(folder / "runs")}, {"min_free": 2_000_000}
    disk = (await verdicts_of(tiny_config(tmp_path, experiment=output, storage=storage)))["disk"]
    assert disk.outcome == "fail"
    assert "storage.min_free 1.91 MiB" in disk.evidence
    assert list(folder.iterdir()) == []


async def test_a_reward_that_raises_fails_with_its_error_and_hides_nothing_else(tmp_path):
    source = "def reward(completions, **columns):\n    raise ZeroDivisionError('the judge is away')"
    verdicts = await verdicts_of(tiny_config(tmp_path, source))
    assert verdicts["reward"].outcome == "fail"
    assert "ZeroDivisionError: the judge is away" in verdicts["reward"].evidence
    assert verdicts["parity"].outcome == verdicts["generation"].outcome == verdicts["disk"].outcome == "ok"


async def test_a_reward_that_fails_on_some_rows_warns_with_the_error(tmp_path):
    source = """
        def reward(prompts, completions, **columns):
            texts = zip(prompts, completions)
            return [float("nan") if prompt == prompts[0] else 0.1 * len(text) for prompt, text in texts]
    """
    verdict = (await verdicts_of(tiny_config(tmp_path, source, reward={"retries": 0})))["reward"]
    assert verdict.outcome == "warn"
    assert "25% of the completions could not be scored" in verdict.evidence
    assert "nan" in verdict.evidence


async def test_a_constant_reward_warns(tmp_path):
    verdicts = await verdicts_of(
        tiny_config(tmp_path, "def reward(completions, **columns): return [2.0] * len(completions)")
    )
    assert verdicts["reward"].outcome == "warn"
    assert "mean 2, spread within a group 0; 100% of the groups have none" in verdicts["reward"].evidence


async def test_a_reward_that_needs_a_missing_column_fails(tmp_path):
    verdicts = await verdicts_of(
        tiny_config(tmp_path, "def reward(completions, solution): return [0.0] * len(completions)")
    )
    assert verdicts["start"].outcome == "fail"
    assert "solution" in verdicts["start"].evidence


async def test_a_model_that_is_not_there_fails(tmp_path):
    verdicts = await verdicts_of(tiny_config(tmp_path, models={"policy": str(tmp_path / "absent")}))
    assert verdicts["models"].outcome == "fail"
    assert str(tmp_path / "absent") in verdicts["models"].evidence
    assert "memory" not in verdicts
    assert "start" not in verdicts


async def test_prompts_beyond_the_model_fail(tmp_path):
    """A sum has 7 tokens, with 5 to generate; the model has 11 positions."""
    policy = load_policy(ModelsConfig(tiny=TinyModelConfig(hidden_size=16, layers=1)), 0)
    policy.model.config.max_position_embeddings = 11
    save_policy(tmp_path / "model", policy.model, policy.tokenizer)
    verdicts = await verdicts_of(tiny_config(tmp_path, models={"policy": str(tmp_path / "model")}))
    assert verdicts["lengths"].outcome == "fail"
    assert "data.max_prompt_tokens to 6" in verdicts["lengths"].remedy


class OtherWeightsEngine(TransformersEngine):
    async def load_weights(self, version, weights):
        await super().load_weights(version, {name: 1.1 * weight for name, weight in weights.items()})


async def test_an_engine_with_other_weights_fails_parity(tmp_path, monkeypatch):
    monkeypatch.setattr(
        build, "make_engine", lambda config, policy: OtherWeightsEngine(copy_policy(policy, torch.float32))
    )
    verdicts = await verdicts_of(tiny_config(tmp_path))
    assert verdicts["parity"].outcome == "fail"
    assert verdicts["generation"].outcome == "ok"


async def test_bfloat16_is_judged_by_its_own_rounding(tmp_path):
    verdicts = await verdicts_of(tiny_config(tmp_path, models={"dtype": "bfloat16"}))
    assert verdicts["parity"].outcome == "ok"


async def test_a_need_of_memory_beyond_the_machine_fails_before_anything_is_loaded(tmp_path):
    verdicts = await verdicts_of(tiny_config(tmp_path, learning={"tokens_per_micro_batch": 10**12}))
    assert verdicts["memory"].outcome == "fail"
    assert "start" not in verdicts


async def test_the_forecast_of_memory_is_for_the_device_that_is_there(tmp_path, monkeypatch):
    """Of 3,192 parameters, differences hold twice 12 bytes each."""
    config = tiny_config(tmp_path, checkpoint={"incremental": True})
    assert "increments" not in (await verdicts_of(config))["memory"].evidence
    monkeypatch.setattr("gyre_core.training.preflight.find_device", lambda name: torch.device("cuda"))
    assert "increments 74.8 KiB" in (await verdicts_of(config))["memory"].evidence


async def test_a_request_that_takes_too_long_fails(tmp_path):
    verdicts = await verdicts_of(tiny_config(tmp_path, rollout={"timeout": 1e-6}))
    assert verdicts["trial"].outcome == "fail"
    assert "rollout.timeout" in verdicts["trial"].evidence


async def test_data_is_counted(tmp_path):
    rows = [{"prompt": f"{number}="} for number in (1, 2, 3, 3, 1000000000)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": str(tmp_path / "prompts.jsonl"), "max_prompt_tokens": 6, "evaluation_size": 0}
    verdicts = await verdicts_of(tiny_config(tmp_path, data=data))
    assert verdicts["prompts"].outcome == verdicts["evaluation"].outcome == "warn"
    assert verdicts["prompts"].evidence == (
        "4 prompts to train on; 1 dropped as longer than 6 tokens; 1 that repeat another"
    )


def test_the_installed_packages_meet_the_requirements():
    versions, unmet = installed_versions()
    assert unmet == {}
    assert versions["torch"] == torch.__version__
