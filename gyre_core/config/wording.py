"""What pydantic finds wrong with a value, said in one plain sentence with the remedy."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic_core import ErrorDetails

from gyre_core.config.fields import Field, list_fields
from gyre_core.config.suggestions import suggest_key

_ELEMENTS = {
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "float_type": "number",
    "finite_number": "finite number",
    "greater_than_equal": "number ≥ {ge:g}",
    "less_than": "number < {lt:g}",
    "tuple_type": "list",
}
"""What an element of a list should have been, by the type of pydantic's error."""


def explain(details: ErrorDetails) -> tuple[str, str]:
    """The key (`section.field`, with `[index]` for elements of lists) and the sentence of an error."""
    location, value, kind = details["loc"], details["input"], details["type"]
    key = _name(location)
    if kind == "extra_forbidden":
        return key, f"there is no such setting; {suggest_key(key)}"
    if kind == "missing":
        parent, last = _name(location[:-1]), location[-1]
        return parent, f"`{last}` is missing in {_quote(value)}; give it."
    field = next((field for field in list_fields() if field.name == key), None)
    if kind == "too_long" and field is not None:
        return key, f"expected {field.kind}, got {len(value)} elements; leave out the rest."
    if kind in ("model_type", "dict_type"):
        return key, f"expected a section of keys, got {_quote(value)}; write its keys below it, indented."
    if kind == "string_pattern_mismatch":
        return key, f"{_quote(value)} is not a name; use letters, digits, dots, dashes and underscores only."
    expected = field.kind if field else _ELEMENTS.get(kind, details["msg"]).format(**details.get("ctx", {}))
    return key, f"expected {expected}, got {_quote(value)}; {_remedy(field, expected, value)}."


def _name(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def _quote(value: Any) -> str:
    """A value as it stands in YAML, with its type where that is in doubt."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return f"the truth value {str(value).lower()}"
        case str():
            return f"the text '{value if len(value) <= 80 else value[:77] + '...'}'"
        case int() | float():
            return f"the number {value!r}"
        case dict():
            return f"the keys {', '.join(str(key) for key in value)}" if value else "a section without keys"
        case list() | tuple():
            return f"a list of {len(value)}"
        case _:
            return f"a {type(value).__name__}"


def _remedy(field: Field | None, expected: str, value: Any) -> str:
    """What to write instead."""
    if value is None:
        return "leave the key out to have the default"
    if expected.startswith("text"):
        return "write some text" if value == "" else "put it in quotes"
    if expected.startswith("list"):
        return "write it as [first, second]"
    if "|" in expected and isinstance(value, str | bool):
        return _choose([choice.strip() for choice in expected.split("|")], str(value))
    if expected.startswith("whole number") and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, bool | float) and expected.startswith("whole number"):
        return "write a whole number"
    if isinstance(value, bool):
        return "write a number"
    if isinstance(value, str):
        plain = value.replace("_", "").lstrip("0")
        example = plain if plain.isdecimal() else (field.default if field else "") or "1"
        return f"write a plain number, such as {example}"
    return "choose a value within these bounds"


def _choose(choices: list[str], value: str) -> str:
    """The choice that was meant, or all of them."""
    synonyms = {"on": "true", "yes": "true", "off": "false", "no": "false"}
    meant = synonyms.get(value.lower(), value)
    near = [meant] if meant in choices else difflib.get_close_matches(meant.lower(), choices, n=1)
    return f"write {near[0]}" if near else f"choose one of {', '.join(choices)}"
