"""Configurations as Prefect's form sends them."""

from __future__ import annotations

from typing import Annotated

from prefect.utilities.schema_tools.hydration import hydrate
from pydantic import BeforeValidator

from gyre_core.config import GyreConfig


def as_meant(config: object) -> object:
    """A configuration without the wrapping that the form's JSON mode leaves around mappings.

    The form holds the value of a mapping as `{"__prefect_kind": "json", "value": TEXT}`. Prefect's server unwraps what
    fields send, but takes the text of the JSON mode, in which the form shows its wrapping, literally.
    """
    return hydrate(config) if isinstance(config, dict) else config


FormConfig = Annotated[GyreConfig, BeforeValidator(as_meant)]
"""The configuration of a flow that people start from the form."""
