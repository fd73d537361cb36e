"""Mistakes in a configuration, each told in one sentence: where it is, what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake.

    `where` is `FILE:LINE`, `command line`, or empty where neither applies; `key` is `section.field`, or empty.
    """

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class ConfigError(ValueError):
    """A configuration that cannot be used; `problems` holds all of its mistakes, and the text has one on each line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
