"""The commands beside `gyre train`, from the command line to what they print."""

import asyncio
import logging

import pytest

from deployments.cli import main
from deployments.launch import OWN_LOGGERS, RUN_LOGGERS, run_training
from gyre_core.config import GyreConfig, load_config
from gyre_core.training.build import open_run
from gyre_core.training.resume import NEW

REWARDS = """
def reward(completions, **columns):
    return [float(len(text)) for text in completions]
"""
CONFIG = """
experiment: {name: small, output: OUTPUT, threads: 1}
models: {tiny: {hidden_size: 16, layers: 1}, warm_start: {max_steps: 0}}
data: {evaluation_size: 5, size: 30}
rollout: {batch_size: 4, samples_per_prompt: 2, max_tokens: 4}
reward: {functions: [{path: "rewards.py:reward"}]}
monitor: {tensorboard: false}
"""


@pytest.fixture
def config_file(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    file = tmp_path / "gyre.yaml"
    file.write_text(CONFIG.replace("OUTPUT", str(tmp_path / "runs")))
    return file


@pytest.fixture
def output(config_file):
    """The output folder of a run that has published its start."""

    async def publish():
        await (await open_run(load_config(config_file), run_id="first")).close()

    asyncio.run(publish())
    return str(config_file.parent / "runs")


def test_preflight(config_file, capsys):
    assert main(["preflight", "--config", str(config_file)]) == 0
    printed = capsys.readouterr().out
    assert "preflight of small" in printed
    assert "0 failed" in printed
    arguments = ["--config", str(config_file), "--models.policy", str(config_file.parent / "absent")]
    assert main(["preflight", *arguments]) == 1
    assert "1 failed" in capsys.readouterr().out
    assert not (config_file.parent / "runs").exists()


def test_evaluate_export_and_status(output, capsys):
    assert main(["evaluate", "small", "--output", output]) == 0
    assert "version        0001-00000000" in capsys.readouterr().out
    assert main(["export", "small", "--output", output]) == 0
    assert capsys.readouterr().out == f"{output}/small/first/export\n"
    assert main(["status", "--output", output]) == 0
    assert "small/first" in capsys.readouterr().out
    assert main(["status", "small", "--output", output]) == 0
    assert f"folder  {output}/small/first" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["evaluate", "export", "status"])
def test_an_unknown_run_is_a_mistake_of_the_user(output, capsys, command):
    assert main([command, "other", "--output", output]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no run 'other'" in error
    assert "there are: small" in error


def test_a_reward_that_fails_everywhere_is_a_failure_told_without_a_traceback(output, config_file, capsys):
    (config_file.parent / "rewards.py").write_text("def reward(completions, **columns):\n    return 1 / 0\n")
    assert main(["evaluate", "small", "--output", str(output)]) == 1
    told = capsys.readouterr().err
    assert "reward function 'reward' failed on all" in told
    assert "ZeroDivisionError" in told


def test_a_run_leaves_logging_as_it_was(tmp_path, capsys):
    """A notebook, or a benchmark, runs one training after another in one process."""

    def state():
        loggers = [logging.getLogger(), *(logging.getLogger(name) for name in (*OWN_LOGGERS, *RUN_LOGGERS))]
        return [
            (logger.level, list(logger.handlers), [list(handler.filters) for handler in logger.handlers])
            for logger in loggers
        ]

    before = state()
    config = GyreConfig.model_validate({"models": {"policy": str(tmp_path / "absent")}})
    with pytest.raises(ValueError, match="absent"):
        run_training(config, origin=NEW, run_id=None, keep_server=False)
    assert state() == before
