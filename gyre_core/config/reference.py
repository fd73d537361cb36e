"""The table of every setting in docs/configuration.md: `python -m gyre_core.config.reference FILE` renews it there."""

from __future__ import annotations

import sys
from pathlib import Path

from gyre_core.config.fields import Field, list_fields, list_sections

BEGIN = "<!-- settings: made from gyre_core/config/sections; renew with `python -m gyre_core.config.reference` -->"


def settings_reference() -> str:
    """A Markdown section for each section of the schema, with a table of its fields."""
    parts: list[str] = []
    for section, description in list_sections().items():
        fields = [field for field in list_fields() if field.section == section]
        rows = ["| key | values | default | meaning |", "| --- | --- | --- | --- |", *map(_row, fields)]
        parts.append("\n".join([f"### `{section}`", "", description, "", *rows]))
    return "\n\n".join(parts) + "\n"


def renew(document: str) -> str:
    """A document with all that follows its marker made anew; raises ValueError without a marker."""
    text, marker, _ = document.partition(BEGIN)
    if not marker:
        raise ValueError(f"the document has no line {BEGIN!r}; add it where the table belongs.")
    return f"{text}{BEGIN}\n\n{settings_reference()}"


def _row(field: Field) -> str:
    key, default = f"`{field.name.rpartition('.')[2]}`", f"`{field.default}`" if field.default else "see meaning"
    return f"| {key} | {_cell(field.kind)} | {_cell(default)} | {_cell(field.description)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/configuration.md")
    target.write_text(renew(target.read_text(encoding="utf-8")), encoding="utf-8")
