"""A run that trains adapters: everything outside the learner sees whole weights, and PEFT gets the adapters."""

import peft
import pytest
import torch
from training_configs import tiny_config
from transformers import AutoModelForCausalLM

from gyre_core.config.sections import ModelsConfig, TinyModelConfig
from gyre_core.policy.models import load_policy, save_policy
from gyre_core.training import stages
from gyre_core.training.build import make_learner, make_reference, open_run
from gyre_core.training.export import export_adapter, export_run
from gyre_core.training.resume import NEW, RESUME

TOKENS = torch.arange(4, 16)[None]


def lora_config(folder, dtype="float32", **sections):
    models = {"lora": {"rank": 2}, "tiny": {"hidden_size": 16, "layers": 1}, "dtype": dtype}
    sections = {"learning": {"lr": 1e-2, "kl_coef": 0.05}, "checkpoint": {"interval": 1e-6}} | sections
    return tiny_config(folder, models=models, **sections)


async def take_step(run):
    step = run.step + 1
    await stages.take_step(run, step)
    return run.results[step].metrics


def logits(model):
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits.float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_run_begins_at_the_base_and_moves_linear_layers_only(tmp_path, dtype):
    run = await open_run(lora_config(tmp_path, dtype))
    base = {name: parameter.detach().clone() for name, parameter in run.policy.model.named_parameters()}
    first = run.chain.load(run.version)
    assert first.keys() == base.keys()
    assert all(torch.equal(first[name], base[name]) for name in base)
    metrics = [await take_step(run) for _ in range(3)]
    last = run.chain.load(run.version)
    moved = {name for name in base if not torch.equal(last[name], base[name])}
    assert moved
    assert all("proj" in name for name in moved)
    assert all(torch.equal(parameter, base[name]) for name, parameter in run.policy.model.named_parameters())
    tolerance = 1e-5 if dtype == "float32" else 0.05
    assert all(row["sampling/sampling_logp_difference/mean"] < tolerance for row in metrics)
    # The reference is the base: no divergence from it before the first update, and some after.
    assert abs(metrics[0]["kl"]) < tolerance**2
    assert metrics[2]["kl"] > 0
    await run.close()


@pytest.mark.parametrize("trunk", ["own", "shared"])
async def test_ppo_trains_adapters_and_a_critic(tmp_path, trunk):
    run = await open_run(lora_config(tmp_path, experiment={"algorithm": "ppo"}, critic={"trunk": trunk, "lr": 1e-2}))
    base = {name: parameter.detach().clone() for name, parameter in run.policy.model.named_parameters()}
    metrics = [await take_step(run) for _ in range(3)]
    last = run.chain.load(run.version)
    assert last.keys() == base.keys()
    assert {name for name in base if not torch.equal(last[name], base[name])}
    assert all(torch.equal(parameter, base[name]) for name, parameter in run.policy.model.named_parameters())
    assert all(row["critic/grad_norm"] > 0 for row in metrics)
    await run.close()


def test_learner_and_reference_share_the_base(tmp_path):
    """A change of the base shows in both: neither has a copy."""
    config = lora_config(tmp_path)
    start = load_policy(config.models, seed=0)
    start.model.requires_grad_(False)
    reference, learner = make_reference(config, start), make_learner(config, start)
    prompt, completion = TOKENS[0, :4].numpy(), TOKENS[0, 4:].numpy()
    before = reference.log_probabilities(prompt, [completion])[0]
    start.model.model.norm.weight += 0.5
    assert abs(reference.log_probabilities(prompt, [completion])[0] - before).max() > 1e-3
    assert torch.equal(learner.policy_weights()["model.norm.weight"], start.model.model.norm.weight)
    trained = {name for name in learner.state()[0] if name.startswith("weight.")}
    assert trained
    assert all(".lora_" in name for name in trained)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_resumed_run_goes_on_exactly(tmp_path, dtype):
    async def state_after(folder, *blocks):
        for index, steps in enumerate(blocks):
            run = await open_run(lora_config(folder, dtype), origin=RESUME if index > 0 else NEW)
            for _ in range(steps):
                await take_step(run)
            tensors, counters = run.learner.state()
            kept = {name: tensor.clone() for name, tensor in tensors.items()}
            await run.close()
        return kept, counters

    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole, counters = await state_after(tmp_path / "whole", 3)
    cut, cut_counters = await state_after(tmp_path / "cut", 2, 1)
    assert counters == cut_counters
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks transformers for it.
@pytest.mark.parametrize("made_on_the_spot", [True, False])
async def test_merged_export_adapter_export_and_learner_agree(tmp_path, made_on_the_spot):
    config = lora_config(tmp_path)
    if not made_on_the_spot:
        policy = load_policy(ModelsConfig(tiny=TinyModelConfig(hidden_size=16, layers=1)), 5)
        save_policy(tmp_path / "model", policy.model, policy.tokenizer)
        config = config.model_copy(
            update={"models": config.models.model_copy(update={"policy": str(tmp_path / "model")})}
        )
    run = await open_run(config)
    for _ in range(2):
        await take_step(run)
    learned = {name: weight.clone() for name, weight in run.learner.policy_weights().items()}
    key = run.key
    await run.close()

    merged = AutoModelForCausalLM.from_pretrained(export_run("trial", str(tmp_path / "runs")))
    assert all(torch.equal(parameter, learned[name]) for name, parameter in merged.named_parameters())
    folder = export_adapter("trial", str(tmp_path / "runs"))
    assert folder == tmp_path / "runs" / key / "adapter"
    base = peft.PeftConfig.from_pretrained(folder).base_model_name_or_path
    assert (base == str(tmp_path / "model")) != made_on_the_spot
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert (logits(plain) - logits(merged)).abs().max() > 1e-3
    adapted = peft.PeftModel.from_pretrained(plain, folder)
    torch.testing.assert_close(logits(adapted), logits(merged), atol=1e-5, rtol=1e-5)
    readme = (folder / "README.md").read_text()
    assert "Adapters after step 2" in readme
    assert f"base_model: {base}" in readme
    assert export_adapter("trial", str(tmp_path / "runs"), str(tmp_path / "own")) == tmp_path / "own"


async def test_no_adapters_to_export_is_told(tmp_path):
    await (await open_run(tiny_config(tmp_path))).close()
    with pytest.raises(ValueError, match="trains no adapters"):
        export_adapter("trial", str(tmp_path / "runs"))
    (tmp_path / "other").mkdir()
    await (await open_run(lora_config(tmp_path / "other"))).close()
    with pytest.raises(ValueError, match="no checkpoint yet"):
        export_adapter("trial", str(tmp_path / "other" / "runs"))
