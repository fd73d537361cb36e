"""Relative paths in a configuration: what is read starts at the folder of the file that names it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BUILT_IN = {"data.path": "arithmetic", "models.policy": "tiny-qwen3"}
"""Names that stand for something made on the spot, and not for a path."""
TASK_PREFIX = "reasoning_gym:"
"""What begins a data path that names a task and no file."""
_READ = ("data.path", "data.evaluation_path", "models.policy", "models.reward", "models.critic", "models.ref")


def absolute_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of a configuration's raw values in which the paths of data, models and reward files are absolute.

    Built-in names, URLs and import paths of installed modules stay as they are, and so does anything of a wrong type.
    """
    resolved = {name: dict(section) if isinstance(section, Mapping) else section for name, section in values.items()}
    for name in _READ:
        section, _, key = name.partition(".")
        part = resolved.get(section)
        if isinstance(part, dict) and key in part and part[key] != BUILT_IN.get(name):
            part[key] = _absolute(part[key], folder)
    reward = resolved.get("reward")
    if isinstance(reward, dict) and isinstance(reward.get("functions"), (list, tuple)):
        reward["functions"] = [_absolute_function(function, folder) for function in reward["functions"]]
    return resolved


def _absolute(path: object, folder: Path) -> object:
    if not isinstance(path, str) or not path or "://" in path or path.startswith(TASK_PREFIX):
        return path
    return os.path.abspath(folder / Path(path).expanduser())  # noqa: PTH100 (resolve would follow links)


def _absolute_function(function: object, folder: Path) -> object:
    """`FILE.py:function` with an absolute file; any other form as it is."""
    if not isinstance(function, Mapping) or not isinstance(function.get("path"), str):
        return function
    file, colon, name = function["path"].rpartition(":")
    if not colon or not file.endswith(".py"):
        return function
    return {**function, "path": f"{_absolute(file, folder)}:{name}"}
