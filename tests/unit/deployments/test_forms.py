"""What Prefect's form sends as a configuration."""

import pytest
from pydantic import TypeAdapter, ValidationError

from flows.forms import FormConfig
from gyre_core.config import GyreConfig

CONFIG = TypeAdapter(FormConfig)


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ({"__prefect_kind": "json"}, {}),
        ({"__prefect_kind": "json", "value": "{}"}, {}),
        ({"__prefect_kind": "json", "value": '{"digits": 3}'}, {"digits": 3}),
        ({"digits": 3}, {"digits": 3}),
    ],
)
def test_a_mapping_is_what_the_form_shows_however_it_is_sent(sent, meant):
    data = {"path": "reasoning_gym:basic_arithmetic"}
    read = CONFIG.validate_python({"data": {**data, "parameters": sent}})
    assert read == GyreConfig.model_validate({"data": {**data, "parameters": meant}})


def test_a_mapping_that_is_no_json_is_refused():
    with pytest.raises(ValidationError, match=r"data\.parameters"):
        CONFIG.validate_python({"data": {"parameters": {"__prefect_kind": "json", "value": "{"}}})


def test_a_configuration_that_was_read_stays_as_it_is():
    config = GyreConfig()
    assert CONFIG.validate_python(config) == config
