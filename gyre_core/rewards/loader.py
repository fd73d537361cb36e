"""Reward functions by name: import paths, files and built-ins; and what a function asks for by its signature."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

RewardFunction = Callable[..., Any]

BUILT_IN: Mapping[str, str] = {
    "exact_match": "gyre_core.rewards.functions:exact_match",
    "partial_match": "gyre_core.rewards.functions:partial_match",
    "math_answer": "gyre_core.rewards.functions_math:math_answer",
    "think_format": "gyre_core.rewards.functions_format:think_format",
    "reasoning_gym": "gyre_core.rewards.functions_gym:score_entries",
}
"""Functions that a configuration may name without a module, and where they are."""
EXTRA_MODULES = ("math_verify", "reasoning_gym")
"""Modules of the extra `rewards`, which some built-in functions import."""
STANDARD_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""What every function is offered, as in TRL."""
OWN_ARGUMENTS = ("finish_reasons", "prompt_texts", "step", "version")
"""What a function gets only when it asks by name: per completion `stop` or `length`, and the prompt's text as the
model sees it; for the whole call, the training step and the number of the policy version."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a reward function: those it must get, those it may get, and whether it takes any other."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool

    def names(self, argument: str) -> bool:
        """Whether the function asks for `argument` by name."""
        return argument in self.required or argument in self.optional

    def wants(self, argument: str) -> bool:
        """Whether the function asks for `argument` by name or among all."""
        return self.takes_all or self.names(argument)


def load_function(path: str, base_folder: Path) -> RewardFunction:
    """The function that a path names: a built-in, `package.module:function`, or `FILE.py:function`.

    A relative file is taken from `base_folder`. Raises ValueError when there is no such module, file or function, and
    with the traceback when the module fails as it is imported.
    """
    module_name, _, attribute = BUILT_IN.get(path, path).rpartition(":")
    if not module_name or not attribute:
        raise ValueError(
            f"reward function '{path}': write package.module:function, FILE.py:function, or a built-in "
            f"({', '.join(BUILT_IN)})"
        )
    module = (
        _import_file(path, base_folder / module_name) if module_name.endswith(".py") else _import(path, module_name)
    )
    try:
        function = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise ValueError(f"reward function '{path}': {module_name} has no '{attribute}'") from None
    if not callable(function):
        raise ValueError(f"reward function '{path}': it is of type {type(function).__name__}, not a function")
    return function


def read_signature(path: str, function: RewardFunction) -> Signature:
    """What a function asks for. Raises ValueError when it cannot be called with keyword arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise ValueError(f"reward function '{path}': its signature cannot be read; wrap it in a function") from None
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ValueError(
                f"reward function '{path}': its argument '{parameter.name}' is positional only; reward functions are "
                "called with keyword arguments"
            )
    named = [
        p for p in parameters if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    return Signature(
        required=tuple(p.name for p in named if p.default is inspect.Parameter.empty),
        optional=tuple(p.name for p in named if p.default is not inspect.Parameter.empty),
        takes_all=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
    )


def check_columns(signatures: Mapping[str, Signature], columns: Collection[str]) -> None:
    """Raise ValueError when a function requires a column that the data lacks, or a column hides an argument."""
    present = ", ".join(f"'{column}'" for column in columns) or "none"
    asked = [name for name in OWN_ARGUMENTS if any(signature.names(name) for signature in signatures.values())]
    for reserved in (*STANDARD_ARGUMENTS, *asked):
        if reserved in columns:
            raise ValueError(
                f"the data's column '{reserved}' has the name of an argument of rewards; rename the column"
            )
    for name, signature in signatures.items():
        for argument in signature.required:
            if argument not in columns and argument not in STANDARD_ARGUMENTS + OWN_ARGUMENTS:
                raise ValueError(
                    f"reward function '{name}' needs the column '{argument}', which the data lacks; "
                    f"its columns: {present}"
                )


def _import(path: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ValueError(f"reward function '{path}': there is no module '{error.name}'") from None
        missing = (error.name or "").partition(".")[0]
        if path in BUILT_IN and missing in EXTRA_MODULES:
            raise ValueError(
                f"reward function '{path}' needs the module {missing}; install it by `pip install 'gyre[rewards]'`"
            ) from None
        raise _import_failure(path) from None
    except (Exception, SystemExit):  # noqa: BLE001 - a module may raise anything; all of it is shown.
        raise _import_failure(path) from None


def _import_file(path: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"reward function '{path}': there is no file {file}")
    name = str(file.resolve())
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification is not None, "a .py file has a specification"
    assert specification.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    sys.path.append(str(file.resolve().parent))  # As for a script: the file may import its neighbours.
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit):  # noqa: BLE001 - a module may raise anything; all of it is shown.
        del sys.modules[name]
        raise _import_failure(path) from None
    return module


def _import_failure(path: str) -> ValueError:
    return ValueError(f"reward function '{path}' cannot be imported:\n{traceback.format_exc().rstrip()}")
