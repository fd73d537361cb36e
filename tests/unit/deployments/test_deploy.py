"""The deployments: that their forms are those of the real flows, read without importing them."""

import importlib
import inspect
import subprocess
import sys

import pytest
from prefect.utilities.callables import parameter_schema

from deployments.deploy import DEPENDENT_DEFAULTS, DEPLOYMENTS, form_schema
from deployments.signatures import read_signature

IDS = [deployment.flow for deployment in DEPLOYMENTS]


def load(deployment):
    module, _, name = deployment.entrypoint.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=IDS)
def test_a_form_is_that_of_the_imported_flow_with_help_for_every_parameter(deployment):
    flow = load(deployment)
    assert flow.name.replace("-", "_") == deployment.flow
    real = inspect.signature(flow.fn, eval_str=True)
    assert read_signature(deployment.entrypoint).parameters == real.parameters
    expected = parameter_schema(flow).model_dump(mode="json")
    for name, field in expected["properties"].items():
        field["description"] = deployment.parameters[name]
    for name, definition in expected["definitions"].items():
        for key, field in definition.get("properties", {}).items():
            if "$ref" in field or key in DEPENDENT_DEFAULTS.get(name, ()):
                field.pop("default", None)
    assert form_schema(deployment) == expected


def test_registering_the_flows_loads_no_model_library():
    code = (
        "import sys; from deployments.deploy import DEPLOYMENTS, form_schema\n"
        "[form_schema(deployment) for deployment in DEPLOYMENTS]\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
