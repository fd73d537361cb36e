"""The recipes of docs/algorithms.md are configurations that load."""

import re
from pathlib import Path

import pytest

from gyre_core.config.loading import load_config

DOCUMENT = Path(__file__).parents[3] / "docs" / "algorithms.md"
RECIPES = dict(re.findall(r"\*\*([A-Z][\w. ]+)\*\*[^`]*(?:`[^`]+`[^`]*)*```yaml\n(.*?)```", DOCUMENT.read_text(), re.S))


def test_every_algorithm_has_its_recipe():
    assert RECIPES.keys() == {"GRPO", "Dr. GRPO", "DAPO", "GSPO", "RLOO", "PPO"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_loads(name, tmp_path):
    recipe = RECIPES[name]
    if "functions:" not in recipe:
        recipe += "reward: {functions: [{path: exact_match}]}\n"
    file = tmp_path / "run.yaml"
    file.write_text("experiment: {algorithm: grpo}\n" + recipe if "experiment:" not in recipe else recipe)
    load_config(file)
