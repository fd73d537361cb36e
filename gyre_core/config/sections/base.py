"""What every section of the configuration is made of: closed models, and numbers as people write them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NUMBER_TEXT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
"""A decimal number as people write it. YAML 1.1 takes `1e-5` for text, so a field of numbers accepts it as such."""


def _read_number(value: object) -> object:
    """The number that `value` spells, when it is text that spells one."""
    return float(value) if isinstance(value, str) and NUMBER_TEXT.fullmatch(value) else value


Number = Annotated[float, BeforeValidator(_read_number), Field(allow_inf_nan=False)]
Fraction = Annotated[Number, Field(ge=0.0, le=1.0)]
PositiveFraction = Annotated[Number, Field(gt=0.0, le=1.0)]
DecayRate = Annotated[Number, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[Number, Field(gt=0.0)]
NonNegativeFloat = Annotated[Number, Field(ge=0.0)]
Text = Annotated[str, Field(min_length=1)]
# A list of YAML becomes a tuple; its elements stay as strict as everything else.
AsTuple = Field(strict=False)


class Section(BaseModel):
    """A section of the configuration: immutable, closed to unknown keys, and without silent conversions of type."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, use_attribute_docstrings=True
    )
