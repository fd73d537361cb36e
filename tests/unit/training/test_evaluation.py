"""Evaluation: means and standard errors by hand, and the same numbers whoever asks."""

import asyncio
import json
import math

import pytest
from training_configs import tiny_config

from gyre_core.training.build import open_run
from gyre_core.training.evaluate_run import describe_evaluation, evaluate_run
from gyre_core.training.evaluation import Evaluation
from gyre_core.types import PolicyVersion

BY_PROMPT = """
    def reward(completions, value):
        return [float("nan") if one == -1 else None if one == -2 else one for one in value]
"""


def evaluation_config(folder, values, samples=2, **sections):
    """A run whose held-out prompts earn the given values; -1 fails, -2 is abstained from."""
    rows = [{"prompt": f"{number}=", "value": value} for number, value in enumerate(values)]
    (folder / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "training.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}+", "value": 1.0}) for i in range(9)))
    return tiny_config(
        folder,
        BY_PROMPT,
        data={"path": str(folder / "training.jsonl"), "evaluation_path": str(folder / "held_out.jsonl")},
        evaluation={"samples_per_prompt": samples},
        **sections,
    )


async def evaluated(config):
    """The evaluation of the policy as the run starts, and the run's key."""
    run = await open_run(config)
    try:
        await run.evaluate(0)
        return run.evaluations[0], run.key
    finally:
        await run.close()


async def test_mean_and_standard_error_by_hand(tmp_path):
    """1, 2, 3 and 6: mean 3, variance 14/3, standard error sqrt(14/3)/2. A prompt that fails and one that is abstained
    from count in no mean; each is without a score in two samples and one greedy completion."""
    evaluation, _ = await evaluated(evaluation_config(tmp_path, [1.0, 2.0, -1, 3.0, -2, 6.0]))
    error = math.sqrt(14 / 3) / 2
    assert evaluation.reward == evaluation.greedy_reward == 3.0
    assert evaluation.reward_se == pytest.approx(error, rel=1e-12)
    assert evaluation.greedy_reward_se == pytest.approx(error, rel=1e-12)
    assert (evaluation.prompts, evaluation.unscored) == (4, 6)
    assert evaluation.version == PolicyVersion(1, 0)
    metrics = evaluation.metrics()
    assert metrics["eval/heldout/reward"] == 3.0
    assert metrics["eval/heldout/reward_se"] == evaluation.reward_se
    assert metrics["eval/heldout/unscored"] == 6.0


async def test_one_prompt_has_no_standard_error(tmp_path):
    evaluation, _ = await evaluated(evaluation_config(tmp_path, [2.0]))
    assert evaluation.reward == 2.0
    assert math.isnan(evaluation.reward_se)
    assert "eval/heldout/reward_se" not in evaluation.metrics()


async def test_samples_differ_greedy_completions_do_not(tmp_path):
    """The reward is the completion's length in characters plus a fraction; greedy is the same at any temperature."""
    source = "def reward(completions, **columns): return [float(sum(map(ord, text))) for text in completions]"
    runs = []
    for seed_of_noise, temperature in ((1, 1.0), (1, 2.0)):
        folder = tmp_path / str(temperature)
        folder.mkdir()
        config = tiny_config(folder, source, rollout={"temperature": temperature}, experiment={"seed": seed_of_noise})
        runs.append((await evaluated(config))[0])
    assert runs[0].greedy_reward == runs[1].greedy_reward
    assert runs[0].reward != runs[1].reward
    assert runs[0].reward != runs[0].greedy_reward


def test_the_command_evaluates_as_the_run_did(tmp_path):
    config = tiny_config(tmp_path)
    evaluation, key = asyncio.run(evaluated(config))
    text = evaluate_run("trial", str(tmp_path / "runs"))
    assert f"run            {key}" in text
    assert f"version        {evaluation.version}" in text
    assert f"reward         {evaluation.reward:.4f} ± {evaluation.reward_se:.4f}" in text
    assert f"greedy reward  {evaluation.greedy_reward:.4f} ± {evaluation.greedy_reward_se:.4f}" in text
    assert "6 held out" in text


def test_the_command_leaves_the_run_as_it_is(tmp_path):
    _, key = asyncio.run(evaluated(tiny_config(tmp_path)))
    folder = tmp_path / "runs" / key

    def content():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = content()
    evaluate_run(key, str(tmp_path / "runs"))
    assert content() == before


def test_what_cannot_be_evaluated_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run 'trial'"):
        evaluate_run("trial", str(tmp_path / "runs"))
    _, key = asyncio.run(evaluated(tiny_config(tmp_path)))
    (manifest,) = (tmp_path / "runs" / key / "policy").glob("*/manifest.json")
    manifest.unlink()
    with pytest.raises(ValueError, match="no policy version"):
        evaluate_run(key, str(tmp_path / "runs"))


async def opened_and_closed(config):
    await (await open_run(config)).close()


def test_a_run_without_held_out_prompts_is_refused(tmp_path):
    asyncio.run(opened_and_closed(tiny_config(tmp_path, data={"evaluation_size": 0})))
    with pytest.raises(ValueError, match="holds no prompts out"):
        evaluate_run("trial", str(tmp_path / "runs"))


def test_completions_without_a_score_are_told():
    evaluation = Evaluation(PolicyVersion(1, 3), 3, 0.5, 0.01, 0.6, 0.02, 10, 2, 4.0, 1.5)
    assert "not scored     2 completions" in describe_evaluation("trial/1", evaluation)
