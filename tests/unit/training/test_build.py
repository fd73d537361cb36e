"""Opening a run: what is refused, and that a refused one leaves nothing behind."""

import json
import shutil

import psutil
import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from gyre_core.config import GyreConfig, load_config
from gyre_core.config.sections import LoRAConfig
from gyre_core.training.build import check_inputs, open_run
from gyre_core.training.resume import NEW, RESUME

CONFIG = """
experiment: {name: small, output: OUTPUT, threads: 1}
models: {policy: POLICY, tiny: {hidden_size: 16, layers: 1}, warm_start: {max_steps: 0}}
data: {evaluation_size: 5, size: 30}
rollout: {batch_size: 4, samples_per_prompt: 2, max_tokens: 4}
monitor: {tensorboard: false}
"""


def config_of(folder, policy="tiny-qwen3", more=""):
    file = folder / "gyre.yaml"
    file.write_text(CONFIG.replace("OUTPUT", str(folder / "runs")).replace("POLICY", policy) + more)
    return load_config(file)


async def test_a_model_folder_that_is_not_there_is_told_before_anything_is_made(tmp_path):
    config = config_of(tmp_path, "nowhere")
    for attempt in (check_inputs(config, run_id=None, origin=NEW), open_run(config)):
        with pytest.raises(ValueError, match=r"model folder .*nowhere does not exist"):
            await attempt
    assert not (tmp_path / "runs").exists()


async def test_a_folder_without_a_reward_model_is_told_before_anything_is_made(tmp_path):
    config = config_of(tmp_path)
    config = config.model_copy(update={"models": config.models.model_copy(update={"reward": "nowhere"})})
    for attempt in (check_inputs(config, run_id=None, origin=NEW), open_run(config)):
        with pytest.raises(ValueError, match=r"models.reward: nowhere does not exist"):
            await attempt
    assert not (tmp_path / "runs").exists()


async def test_the_storage_of_another_run_is_neither_taken_nor_touched(tmp_path):
    store = tmp_path / "store"
    config = config_of(tmp_path, more=f"storage: {{url: {store}}}")
    await (await open_run(config, run_id="first")).close()
    before = sorted(path for path in store.rglob("*") if path.is_file())
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(ValueError, match="holds a run small/first already"):
        await open_run(config, run_id="first")
    assert sorted(path for path in store.rglob("*") if path.is_file()) == before
    assert [path for path in (tmp_path / "runs").rglob("*") if path.is_file()] == []


async def test_nothing_to_resume_is_told_by_both(tmp_path):
    config = config_of(tmp_path)
    for attempt in (check_inputs(config, run_id=None, origin=RESUME), open_run(config, origin=RESUME)):
        with pytest.raises(ValueError, match="no run 'small'"):
            await attempt


@pytest.mark.parametrize("more", ["", "storage: {url: STORE}"])
async def test_a_run_that_cannot_be_opened_leaves_nothing_behind(tmp_path, monkeypatch, more):
    def fail(*arguments, **keywords):
        raise OSError("the epoch cannot be claimed")

    monkeypatch.setattr("gyre_core.training.build.claim_epoch", fail)
    config = config_of(tmp_path, more=more.replace("STORE", str(tmp_path / "store")))
    with pytest.raises(OSError, match="the epoch cannot be claimed"):
        await open_run(config)
    assert [path for path in (tmp_path / "runs").rglob("*") if path.is_file()] == []
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


async def test_prompts_that_are_dropped_repeated_or_too_few_are_told_in_the_log(tmp_path, caplog):
    held_out = ["held=", "9" * 60]
    training = ["1+1=", "1+1=", "2+2=", "1+2+3+4+5+6=", "held=", "0" * 50, "held="]
    for name, texts in (("train", training), ("test", held_out)):
        lines = [json.dumps({"prompt": text, "answer": "2"}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    config = config_of(tmp_path)
    paths = {"path": str(tmp_path / "train.jsonl"), "evaluation_path": str(tmp_path / "test.jsonl")}
    data = config.data.model_copy(update=paths | {"max_prompt_tokens": 20})
    config = config.model_copy(update={"data": data, "rollout": config.rollout.model_copy(update={"batch_size": 5})})
    with caplog.at_level("INFO", "gyre_core.training.build"):
        run = await open_run(config)
    assert len(run.cursor.prompts) == 4
    await run.close()
    (message,) = (record.getMessage() for record in caplog.records if record.message.startswith("prompts:"))
    for part in (
        "4 prompts to train on",
        "1 dropped as longer than 20 tokens",
        "1 that repeat another",
        "2 left out, as their prompt is held out",
        "fewer than the 5 of a step",
        "1 held out, without 1 that are too long",
    ):
        assert part in message


async def test_adapters_that_the_policy_cannot_have_are_told_before_anything_is_made(tmp_path):
    config = config_of(tmp_path)
    lora = LoRAConfig(rank=2, targets=("q_proj", "nose"))
    config = config.model_copy(update={"models": config.models.model_copy(update={"lora": lora})})
    for attempt in (check_inputs(config, run_id=None, origin=NEW), open_run(config)):
        with pytest.raises(ValueError, match=r"models\.lora\.targets: .* no linear layers named nose"):
            await attempt
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("role", "more"),
    [("critic", {"experiment": {"algorithm": "ppo"}}), ("ref", {"learning": {"kl_coef": 0.1}})],
)
async def test_a_model_of_another_vocabulary_is_told_before_anything_is_made(tmp_path, role, more):
    folder = tmp_path / role
    Qwen3ForCausalLM(Qwen3Config(vocab_size=31, hidden_size=16, num_hidden_layers=1)).save_pretrained(folder)
    values = config_of(tmp_path).model_dump()
    for section, changes in {"models": {role: str(folder)}, **more}.items():
        values[section] |= changes
    config = GyreConfig.model_validate(values)
    with pytest.raises(ValueError, match=rf"models\.{role}: .* vocabulary of 31 tokens and the policy one of"):
        await check_inputs(config, run_id=None, origin=NEW)


async def test_when_one_of_several_reward_processes_does_not_start_none_is_left(tmp_path):
    (tmp_path / "once.py").write_text(
        "import pathlib\n"
        "pathlib.Path(__file__).with_name('taken').touch(exist_ok=False)\n"
        "def score(completions): return [0.0] * len(completions)\n"
    )
    more = f"reward: {{processes: 2, functions: [{{path: '{tmp_path}/once.py:score'}}]}}"
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ValueError, match="cannot be imported"):
        await check_inputs(config_of(tmp_path, more=more), run_id=None, origin=NEW)
    assert psutil.Process().children(recursive=True) == before
