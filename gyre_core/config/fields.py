"""The schema as a flat list of fields: for the command line's help, the documentation and suggestions."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from gyre_core.config.schema import GyreConfig
from gyre_core.config.sections import Section


@dataclass(frozen=True, slots=True)
class Field:
    """One setting, in words.

    `name` is `section.field` (deeper for nested sections), `kind` says which values it takes, `default` is written
    as in YAML and empty where the description tells how the default follows from other settings.
    """

    name: str
    section: str
    kind: str
    default: str
    description: str
    is_text: bool


@cache
def list_fields() -> tuple[Field, ...]:
    """Every setting, in the order of the schema."""
    return tuple(_fields_of(GyreConfig, ()))


@cache
def list_sections() -> dict[str, str]:
    """Each section's name (`models.tiny` for a nested one) and its one-line description."""
    return dict(_sections_of(GyreConfig, ()))


@cache
def list_keys(section: str) -> tuple[str, ...]:
    """The full names of the keys of a section, or of an element such as `reward.functions[0]`; empty if unknown."""
    kind: type[Section] = GyreConfig
    for part in section.split(".") if section else ():
        name, indexed, _ = part.partition("[")
        if name not in kind.model_fields:
            return ()
        info = kind.model_fields[name]
        inner = get_args(_plain(info.annotation))[0] if indexed else nested_section(info)
        if not (isinstance(inner, type) and issubclass(inner, Section)):
            return ()
        kind = inner
    return tuple(f"{section}.{name}".removeprefix(".") for name in kind.model_fields)


def _fields_of(section: type[Section], path: tuple[str, ...]) -> Iterator[Field]:
    for name, info in section.model_fields.items():
        nested = nested_section(info)
        if nested is not None:
            yield from _fields_of(nested, (*path, name))
            continue
        variants = [variant for variant in _variants(info.annotation) if variant is not type(None)]
        kind = " or ".join(_kind(variant, _bounds(info.metadata)) for variant in variants)
        yield Field(
            name=".".join((*path, name)),
            section=".".join(path),
            kind=kind,
            default=_default(info),
            description=" ".join((info.description or "").split()),
            is_text=str in (_plain(variant) for variant in variants),
        )


def _sections_of(section: type[Section], path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name, info in section.model_fields.items():
        nested = nested_section(info)
        if nested is not None:
            yield ".".join((*path, name)), " ".join((nested.__doc__ or "").split())
            yield from _sections_of(nested, (*path, name))


def nested_section(info: FieldInfo) -> type[Section] | None:
    """The section that a field of a section holds, if it holds one."""
    annotation = info.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _variants(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _plain(annotation: Any) -> Any:
    """A type without its constraints."""
    return _plain(get_args(annotation)[0]) if hasattr(annotation, "__metadata__") else annotation


def _bounds(metadata: Any) -> dict[str, Any]:
    """Constraints (`ge`, `gt`, `le`, `lt`, `multiple_of`) among the metadata of a type."""
    found: dict[str, Any] = {}
    for item in metadata:
        if isinstance(item, FieldInfo):
            found |= _bounds(item.metadata)
        for name in ("ge", "gt", "le", "lt", "multiple_of"):
            value = getattr(item, name, None)
            if value is not None:
                found[name] = value
    return found


def _kind(annotation: Any, bounds: dict[str, Any]) -> str:
    """The values that a type allows, in words."""
    if hasattr(annotation, "__metadata__"):
        return _kind(get_args(annotation)[0], bounds | _bounds(annotation.__metadata__))
    if get_origin(annotation) is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) is dict:
        return "{name: value, …}"
    if get_origin(annotation) is tuple:
        elements = get_args(annotation)
        if elements[-1] is Ellipsis:
            return f"list of {_kind(elements[0], {})}"
        kinds = {_kind(element, {}) for element in elements}
        return f"list of {len(elements)}, each {' or '.join(sorted(kinds))}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "{" + ", ".join(annotation.model_fields) + "}"
    words = {bool: "true | false", int: "whole number", float: "number", str: "text"}[annotation]
    return " ".join([words, *_bound_words(bounds)])


def _bound_words(bounds: dict[str, Any]) -> Iterator[str]:
    if "multiple_of" in bounds:
        yield f"(multiple of {bounds['multiple_of']})"
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    parts = [f"{sign} {bounds[name]:g}" for name, sign in signs if name in bounds]
    if parts:
        yield ", ".join(parts)


def _default(info: FieldInfo) -> str:
    """A default as YAML on one line; empty when it is computed from other settings."""
    return "" if info.default_factory is not None else _as_yaml(info.default)


def _as_yaml(value: Any) -> str:
    if isinstance(value, Section):
        return "{" + ", ".join(f"{name}: {_as_yaml(item)}" for name, item in value) + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_as_yaml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_as_yaml(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value)
