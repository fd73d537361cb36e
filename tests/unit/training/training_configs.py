"""Small configurations, and reward functions for them, shared by the tests of this room."""

from pathlib import Path
from textwrap import dedent

from gyre_core.config import GyreConfig

DIGITS = """
    def reward(completions, **columns):
        return [sum(character.isdigit() for character in text) / 5 for text in completions]
"""
"""A reward with a spread on random text."""


def reward_function(folder: Path, source: str) -> str:
    """The path of the function `reward` in a new file with this source."""
    (folder / "rewards.py").write_text(dedent(source))
    return f"{folder / 'rewards.py'}:reward"


def tiny_config(folder: Path, function: str = DIGITS, **sections) -> GyreConfig:
    """A run of a random tiny policy, 4 prompts x 4 completions a step, that writes below `folder`."""
    values = {
        "experiment": {"name": "trial", "steps": 3, "output": str(folder / "runs"), "threads": 1},
        "models": {"tiny": {"hidden_size": 16, "layers": 1}, "warm_start": {"max_steps": 0}},
        "data": {"evaluation_size": 6, "size": 40},
        "rollout": {"batch_size": 4, "samples_per_prompt": 4, "max_tokens": 5},
        "reward": {"functions": [{"path": reward_function(folder, function)}]},
        "monitor": {"tensorboard": False},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return GyreConfig.model_validate(values)
