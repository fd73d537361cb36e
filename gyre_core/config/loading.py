"""From a YAML file and a command line to a checked `GyreConfig`, and back to YAML.

Defaults give way to the file, and the file to the command line. All mistakes are found in one go and told together,
each in one sentence with its file, line and key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gyre_core.config import yaml_reader
from gyre_core.config.checks import ConflictError
from gyre_core.config.errors import ConfigError, Problem
from gyre_core.config.fields import list_fields, list_sections
from gyre_core.config.paths import absolute_paths
from gyre_core.config.schema import GyreConfig
from gyre_core.config.suggestions import suggest_key
from gyre_core.config.wording import explain

COMMAND_LINE = "command line"


def load_config(path: str | os.PathLike[str], overrides: Sequence[tuple[str, str]] = ()) -> GyreConfig:
    """Read a configuration file, let `overrides` (`section.field`, value as text) prevail, and check the whole.

    Relative paths of what is read (data, reward files, model folders) start at the configuration file's folder, and
    at the working directory where an override gives them. Raises ConfigError with every mistake.
    """
    file = Path(path)
    document = yaml_reader.read_yaml(_read_text(file))
    given, problems = _read_overrides(overrides)
    problems = [Problem(f"{file}:{problem.line}", "", problem.message) for problem in document.problems] + problems
    values = absolute_paths(_without_empty_sections(document.values), file.parent)
    _merge(values, absolute_paths(_nest(given), Path.cwd()))
    try:
        config = GyreConfig.model_validate(values)
    except ValidationError as error:
        places = _Places(file, document.lines, frozenset(given))
        problems += [problem for details in error.errors() for problem in _problems(details, places)]
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return config


def dump_config(config: GyreConfig) -> str:
    """The YAML of every value of a loaded configuration, defaults included; `load_config` reads back an equal one."""
    return yaml_reader.write_yaml(config.model_dump(mode="json"))


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        message = "there is no such file; `gyre init` writes one to start from."
    except IsADirectoryError:
        message = "this is a folder; name the YAML file in it."
    except UnicodeDecodeError as error:
        message = f"byte {error.start} is not UTF-8; save the file as UTF-8 text."
    except OSError as error:
        message = f"the file cannot be read ({error.strerror}); check its permissions."
    raise ConfigError([Problem(str(file), "", message)])


def _without_empty_sections(values: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Leave out sections whose keys are all commented out; they read as null and mean their defaults."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if value is None and f"{place}{key}" in list_sections():
            continue
        kept[key] = _without_empty_sections(value, f"{place}{key}.") if isinstance(value, dict) else value
    return kept


def _read_overrides(overrides: Sequence[tuple[str, str]]) -> tuple[dict[str, Any], list[Problem]]:
    """The values of the command line by `section.field`, and the mistakes in them.

    A value is read as YAML, but for a setting that is text it is the very text, and `null` is none.
    """
    fields = {field.name: field for field in list_fields()}
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, text in overrides:
        if name in given:
            problems.append(Problem(COMMAND_LINE, name, "this is given twice; keep one of them."))
        elif name not in fields:
            problems.append(Problem(COMMAND_LINE, name, f"there is no such setting; {suggest_key(name)}"))
        else:
            try:
                given[name] = text if fields[name].is_text and text != "null" else yaml_reader.read_scalar(text)
            except ValueError as error:
                problems.append(Problem(COMMAND_LINE, name, str(error)))
    return given, problems


def _nest(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by `section.field` as nested sections."""
    nested: dict[str, Any] = {}
    for name, value in given.items():
        *sections, key = name.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
    return nested


def _merge(values: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Let `over` prevail in `values`; a section of the file that is none is left, so that its mistake is told."""
    for key, value in over.items():
        inner = values.setdefault(key, {}) if isinstance(value, dict) else None
        if isinstance(inner, dict):
            _merge(inner, value)
        elif not isinstance(value, dict):
            values[key] = value


@dataclass(frozen=True, slots=True)
class _Places:
    """Tells where the value of a key comes from."""

    file: Path
    lines: Mapping[yaml_reader.Path, int]
    overrides: frozenset[str]

    def find(self, location: yaml_reader.Path) -> tuple[str, bool]:
        """The place of a value, or of the nearest section around it, and whether it is the value's very own."""
        if ".".join(str(part) for part in location if isinstance(part, str)) in self.overrides:
            return COMMAND_LINE, True
        for end in range(len(location), 0, -1):
            if location[:end] in self.lines:
                return f"{self.file}:{self.lines[location[:end]]}", end == len(location)
        return str(self.file), False


def _problems(details: ErrorDetails, places: _Places) -> Iterator[Problem]:
    """What to tell of one of pydantic's errors: nothing for a mere consequence, several for conflicts."""
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, ConflictError):
        for conflict in cause.conflicts:
            found = [places.find(tuple(key.split("."))) for key in (conflict.key, *conflict.others)]
            where = next((place for place, exact in found if exact), found[0][0])
            yield Problem(where, conflict.key, conflict.message)
    elif details["type"] != "default_factory_not_called":
        key, message = explain(details)
        yield Problem(places.find(details["loc"])[0], key, message)
