"""YAML with positions: what stands in the file, where it stands, and nothing that merely looks like something else.

Scalars follow the core schema of YAML 1.2: `true`, `false`, `null`, decimal numbers, and text for all the rest. The
surprises of YAML 1.1 are gone: `on` is text and not true, `012` text and not ten, `1:30` text and not ninety,
`2025_01` text and not 202501, `2025-01-01` text and not a date; while `1e-5` is a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""Keys and list indices from the top of a document down to a value."""

MERGE_TAG = "tag:yaml.org,2002:merge"
_PREFIX = "tag:yaml.org,2002:"
_RESOLVERS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
)


def _follow_core_schema(kind: Any) -> Any:
    """Give a PyYAML loader or dumper the scalars that this module's text promises."""
    kind.yaml_implicit_resolvers = {}
    for name, pattern, first in _RESOLVERS:
        kind.add_implicit_resolver(_PREFIX + name, re.compile(rf"(?:{pattern})\Z"), list(first))
    return kind


@_follow_core_schema
class _Loader(yaml.SafeLoader):
    """Composes nodes; values are built by `_Builder`."""


_USUAL = yaml.resolver.Resolver()
"""What readers of YAML 1.1 make of a plain scalar."""


@_follow_core_schema
class _Dumper(yaml.SafeDumper):
    """Writes plain what `_Loader` reads back as the same, and quotes the rest."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write repeated values out in full."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Escape the line breaks of Unicode, which PyYAML would write raw and read back as spaces.

        What another reader would take for something else than text, such as `off`, is quoted.
        """
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None
        if _USUAL.resolve(yaml.ScalarNode, text, (True, False)) != _PREFIX + "str":
            style = style or "'"
        return self.represent_scalar(_PREFIX + "str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


@dataclass(frozen=True, slots=True)
class YamlProblem:
    """A mistake in a document: the line (from 1) and one sentence."""

    line: int
    message: str


@dataclass(slots=True)
class Document:
    """A YAML document: its values, the line (from 1) of each value and key by path, and the mistakes found."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    lines: dict[Path, int] = field(default_factory=dict[Path, int])
    problems: list[YamlProblem] = field(default_factory=list[YamlProblem])


def read_yaml(text: str) -> Document:
    """Read one YAML document whose top is a mapping (an empty document is an empty one).

    Raises nothing for mistakes in the text: they are in `problems`, and what they spoil is left out of `values`.
    """
    document = Document()
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = 1 if mark is None else mark.line + 1
        document.problems.append(YamlProblem(line, f"this is not valid YAML: {reason}; correct the syntax here."))
        return document
    if node is None:
        return document
    builder = _Builder(document)
    if isinstance(node, yaml.MappingNode):
        document.values = builder.build(node, ())
    elif node.tag != _PREFIX + "null":
        builder.refuse(node, "a configuration consists of sections; write `section:` and its keys below it.")
    return document


def read_scalar(text: str) -> Any:
    """The value that a piece of YAML spells, as a command line gives it; raises ValueError with one sentence."""
    document = read_yaml("value: " + text)
    if document.problems:
        raise ValueError(document.problems[0].message)
    if document.values.keys() != {"value"}:
        raise ValueError("this is more than one value; quote it.")
    return document.values["value"]


def write_yaml(values: Mapping[str, Any]) -> str:
    """The YAML that `read_yaml` reads back as the same values."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Builder:
    """Builds values from nodes, and notes lines and mistakes in a document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._open: set[int] = set()

    def refuse(self, node: yaml.Node, message: str) -> None:
        """Note a mistake at a node, once however often aliases repeat the node."""
        problem = YamlProblem(_line(node), message)
        if problem not in self._document.problems:
            self._document.problems.append(problem)

    def build(self, node: yaml.Node, path: Path) -> Any:
        """The value of a node, or None after noting a mistake."""
        self._document.lines.setdefault(path, _line(node))
        if id(node) in self._open:
            self.refuse(node, "this value contains itself; write it without the alias.")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _PREFIX + "map":
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == _PREFIX + "seq":
                return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node)
        finally:
            self._open.discard(id(node))
        self._refuse_tag(node)
        return None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        first: dict[str, int] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.refuse(key_node, "a key must be a single word; quote it if it is meant as text.")
                continue
            key = str(key_node.value)
            if key in first:
                lines = f"lines {first[key]} and {_line(key_node)}"
                self.refuse(key_node, f"`{key}` is given twice, on {lines}; keep one of them.")
                continue
            first[key] = _line(key_node)
            if key_node.tag == MERGE_TAG:
                merged.append(value_node)
                continue
            self._document.lines.setdefault((*path, key), _line(key_node))
            values[key] = self.build(value_node, (*path, key))
        for value_node in merged:
            self._merge(value_node, path, values)
        return values

    def _merge(self, node: yaml.Node, path: Path, values: dict[str, Any]) -> None:
        """Add what `<<` brings in, behind the section's own keys; of several, the earlier ones win."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                self.refuse(source, "`<<` merges sections; give it an alias of one, or a list of such aliases.")
                continue
            built = self.build(source, path)
            for key, value in (built or {}).items():
                values.setdefault(key, value)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text, kind = str(node.value), str(node.tag).removeprefix(_PREFIX)
        try:
            match kind:
                case "str" | "merge":
                    return text
                case "null":
                    return None
                case "bool" if text.lower() in ("true", "false"):
                    return text.lower() == "true"
                case "int":
                    return int(text)
                case "float":
                    return float(text)
                case _:
                    self._refuse_tag(node)
        except ValueError:
            self.refuse(node, f"`{text}` is not of the type that its tag `!!{kind}` claims; drop the tag.")
        return None

    def _refuse_tag(self, node: yaml.Node) -> None:
        tag = str(node.tag).replace(_PREFIX, "!!")
        self.refuse(node, f"the tag `{tag}` is not supported; write a plain value.")


def _line(node: yaml.Node) -> int:
    """The line of a node, counted from 1."""
    return 0 if node.start_mark is None else node.start_mark.line + 1
