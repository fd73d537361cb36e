"""The parameters of a flow, read from its source: importing a training flow takes seconds and half a gigabyte."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from typing import Literal
from uuid import UUID

from flows.forms import FormConfig

_TYPES = {"FormConfig": FormConfig, "Literal": Literal, "UUID": UUID}
"""Names that the annotations of flows may use, beside the built-in types."""


def read_signature(entrypoint: str) -> inspect.Signature:
    """The signature of the function `package.module.name`, without its result; defaults are literals."""
    module, _, name = entrypoint.rpartition(".")
    specification = importlib.util.find_spec(module)
    assert specification is not None and specification.origin is not None, f"there is no module {module}"
    body = ast.parse(Path(specification.origin).read_text(encoding="utf-8")).body
    (function,) = [
        node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    arguments = function.args.args
    required = len(arguments) - len(function.args.defaults)
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.arg,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                annotation=_evaluate(argument.annotation),
                default=inspect.Parameter.empty
                if index < required
                else ast.literal_eval(function.args.defaults[index - required]),
            )
            for index, argument in enumerate(arguments)
        ]
    )


def _evaluate(annotation: ast.expr | None) -> object:
    assert annotation is not None, "every parameter of a flow has a type"
    return eval(compile(ast.Expression(annotation), "<annotation>", "eval"), dict(_TYPES))
