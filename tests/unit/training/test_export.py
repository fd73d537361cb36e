"""The exported policy: an ordinary Hugging Face folder with the published weights."""

import asyncio

import pytest
import torch
from training_configs import tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from gyre_core.config import load_config
from gyre_core.config.sections import ModelsConfig, TinyModelConfig
from gyre_core.policy.models import load_policy, save_policy
from gyre_core.training.build import open_run
from gyre_core.training.export import export_run
from gyre_core.types import PolicyVersion
from gyre_core.weights.flat import FlatWeights


def published_run(folder, **sections):
    """A run that has published its start, and after it a second version with other weights; returns those."""

    async def publish():
        run = await open_run(tiny_config(folder, **sections))
        try:
            second = {name: weight + 0.5 for name, weight in run.learner.policy_weights().items()}
            run.chain.publish(PolicyVersion(run.epoch, 1), run.version, FlatWeights.of(second))
            return run.key, second
        finally:
            await run.close()

    return asyncio.run(publish())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_newest_version_is_exported_and_loads(tmp_path, dtype):
    key, weights = published_run(tmp_path, models={"dtype": dtype})
    folder = export_run("trial", str(tmp_path / "runs"))
    assert folder == tmp_path / "runs" / key / "export"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == getattr(torch, dtype)
    assert dict(model.named_parameters()).keys() == weights.keys()
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("12+34=", add_special_tokens=False)["input_ids"]) == "12+34="
    assert tokenizer.chat_template
    assert load_config(folder / "gyre.yaml").models.dtype == dtype
    readme = (folder / "README.md").read_text()
    assert f"`{key}`" in readme
    assert "version 1" in readme


def test_a_policy_from_a_folder_is_exported_too(tmp_path):
    policy = load_policy(ModelsConfig(tiny=TinyModelConfig(hidden_size=16, layers=1)), 5)
    save_policy(tmp_path / "model", policy.model, policy.tokenizer)
    _, weights = published_run(tmp_path, models={"policy": str(tmp_path / "model")})
    exported = AutoModelForCausalLM.from_pretrained(export_run("trial", str(tmp_path / "runs")))
    assert all(torch.equal(parameter, weights[name]) for name, parameter in exported.named_parameters())


def test_exporting_again_replaces_the_runs_own_export(tmp_path):
    published_run(tmp_path)
    folder = export_run("trial", str(tmp_path / "runs"))
    (folder / "left over").write_text("of an earlier export")
    export_run("trial", str(tmp_path / "runs"))
    assert not (folder / "left over").exists()
    assert (folder / "config.json").is_file()
    assert not list(folder.parent.glob(".*.unfinished"))


def test_another_folder_must_be_new_or_empty(tmp_path):
    published_run(tmp_path)
    output = str(tmp_path / "runs")
    (tmp_path / "empty").mkdir()
    for name in ("empty", "deep/new"):
        assert export_run("trial", output, str(tmp_path / name)) == tmp_path / name
        assert (tmp_path / name / "model.safetensors").is_file()
    (tmp_path / "file").write_text("taken")
    for name in ("empty", "file"):
        with pytest.raises(ValueError, match="not an empty folder"):
            export_run("trial", output, str(tmp_path / name))
    assert (tmp_path / "file").read_text() == "taken"


def test_nothing_to_export_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run 'trial'"):
        export_run("trial", str(tmp_path / "runs"))
    key, _ = published_run(tmp_path)
    for manifest in (tmp_path / "runs" / key / "policy").glob("*/manifest.json"):
        manifest.unlink()
    with pytest.raises(ValueError, match="no policy version"):
        export_run("trial", str(tmp_path / "runs"))
