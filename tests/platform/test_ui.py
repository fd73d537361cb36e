"""A training run in Prefect's UI: launched from the form, watched, and cancelled, in a real browser."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from platform_tools import TOYS, reaches, until
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, FlowRunFilterTags
from prefect_ui import DEADLINE, opened_ui

from deployments.deploy import DEPLOYMENTS, register
from deployments.flow_processes import flow_processes

REWARDS = Path(__file__).parents[1] / "flows" / "reward_functions.py"
WATCHED = {
    "models": {"tiny": {"hidden_size": 16, "layers": 1}, "warm_start": {"max_steps": 0}},
    "data": {"evaluation_size": 0, "size": 64},
    "rollout": {
        "launcher": "pool",
        "max_worker": 1,
        "batch_size": 4,
        "samples_per_prompt": 4,
        "max_tokens": 2,
        # Steps of some seconds, so that a person could follow them.
        "tokens_per_second": 8,
    },
    "reward": {"functions": [{"path": f"{REWARDS}:even_digits"}]},
    "monitor": {"artifact_every": 1, "tensorboard": False},
}
RUN = "watched/first"
MENU_OF_PARAMETERS = "//h3[normalize-space()='Parameters']/following::button[1]"
JSON_INPUT = "//textarea[contains(@class,'p-code-input__textarea')]"
TRAIN_ROW = "//tr[.//*[normalize-space()='train']]"


@pytest.fixture
def ui(platform, tmp_path):
    with opened_ui(platform.api_url.removesuffix("/api"), tmp_path) as ui:
        yield ui


@pytest.fixture
def real_workers(platform):
    """Rollout workers with engines, where the other tests have toys."""
    (real,) = [deployment for deployment in DEPLOYMENTS if deployment.flow == "rollout_worker"]
    (toy,) = [deployment for deployment in TOYS if deployment.flow == "rollout_worker"]
    asyncio.run(register_one(real))
    yield
    asyncio.run(register_one(toy))


async def register_one(deployment):
    async with get_client() as client:
        await register(client, deployment)


async def flow_run(name, tag):
    """The flow run with this name and tag."""
    wanted = FlowRunFilter(name=FlowRunFilterName(any_=[name]), tags=FlowRunFilterTags(all_=[tag]))
    async with get_client() as client:
        (found,) = await client.read_flow_runs(flow_run_filter=wanted)
    return found


async def all_ended(processes):
    return not any(process.running() for process in processes)


async def form_schema():
    async with get_client() as client:
        return (await client.read_deployment_by_name("train/gyre")).parameter_openapi_schema


def described(schema, properties, required=()):
    """Each field of a form in order, sections before their fields: its label and its description."""
    for name, field in properties.items():
        reference = field.get("$ref", "").rpartition("/")[2]
        section = schema["definitions"].get(reference, {})
        label = field.get("title") or name.replace("_", " ").title()
        text = field.get("description") or section["description"]
        yield label if name in required else f"{label} (Optional)", " ".join(text.replace("`", "").split())
        if reference:
            yield from described(schema, section["properties"], section.get("required", ()))


def open_form(ui):
    """From the list of deployments to the form of `train/gyre`."""
    ui.open("deployments")
    ui.click(f"{TRAIN_ROW}//a[normalize-space()='gyre']", "the deployment train/gyre")
    ui.click_button("Run")
    ui.click_button("Custom run")
    ui.see(MENU_OF_PARAMETERS, "the form")


def launch(ui, changes):
    """Submit the form as JSON: what it shows, with some settings changed."""
    open_form(ui)
    ui.click(MENU_OF_PARAMETERS, "the menu of the form")
    ui.click_button("Use JSON input")
    shown = ui.see(JSON_INPUT, "the form as JSON").get_attribute("value")
    ui.paste(JSON_INPUT, json.dumps(merged(json.loads(shown), changes)), "the form as JSON")
    ui.click_button("Submit")


def merged(values, changes):
    """Nested values with some of them changed."""
    both = {
        name: merged(values[name], change) if isinstance(change, dict) and name in values else change
        for name, change in changes.items()
    }
    return values | both


def open_artifact(ui, kind):
    """From the page of the flow run to the page of one of its artifacts."""
    ui.click("//*[contains(@class,'sidebar') or self::nav]//a[normalize-space()='Runs']", "the menu")
    ui.click("//a[normalize-space()='train-watched']", "the run in the list of runs")
    link = f"//a[contains(@href,'/artifacts/artifact/')][contains(.,'{kind}-watched-first')]"
    ui.click(link, f"the artifact {kind}", tab="Artifacts")


def check_artifacts(ui):
    open_artifact(ui, "steps")
    ui.see("//table//th[normalize-space()='reward std']", "the table of steps")
    ui.see("//table//td[1][normalize-space()='1']", "the first step in the table")
    open_artifact(ui, "workers")
    ui.see("//table//tr[contains(.,'000.1')][contains(.,'ready')]", "the worker in the table of workers")
    open_artifact(ui, "curves")
    curves = ui.see("//img[starts-with(@src,'data:image/png')]", "the picture of the curves")
    ui.until(lambda: curves.get_property("naturalWidth") > 500, "the picture to be decoded")


@pytest.mark.timeout(600)
def test_the_form_shows_every_field_with_its_description(ui):
    fields = asyncio.run(form_schema())
    open_form(ui)
    shown = " ".join(ui.texts("//body")[0].split())
    expected = list(described(fields, fields["properties"], fields.get("required", ())))
    assert len(expected) > 100
    assert [field for field in expected if " ".join(field) not in shown] == []


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("real_workers")
def test_a_run_is_launched_watched_and_cancelled_in_the_browser_and_then_resumed(ui, tmp_path):
    experiment = {"name": "watched", "steps": 100_000, "threads": 1, "output": str(tmp_path)}
    launch(ui, {"run_id": "first", "config": {**WATCHED, "experiment": experiment}})
    ui.click("//a[normalize-space()='train-watched']", "the run on the page of its deployment")
    ui.see("//a[normalize-space()='step-000001']", "the first step", tab="Subflow Runs")
    done = "//*[contains(@class,'state-list-item')][contains(.,'step-0')][contains(.,'Completed')]"
    ui.see(done, "a completed step", tab="Subflow Runs")
    check_artifacts(ui)
    ui.open("runs")
    worker_row = f"//*[contains(@class,'state-list-item')][contains(.,'{RUN}')]"
    ui.see(f"{worker_row}//a[normalize-space()='worker-000.1']", "the worker in the list of runs")

    train, worker = asyncio.run(flow_run("train-watched", "gyre")), asyncio.run(flow_run("worker-000.1", RUN))
    processes = [flow_processes()[run.id] for run in (train, worker)]
    assert all(process.running() for process in processes)
    ui.click("//a[normalize-space()='train-watched']", "the run in the list of runs")
    ui.click_button("Cancel")
    ui.click_button("Confirm")
    ui.see("//*[contains(@class,'state-badge')][normalize-space()='Cancelled']", "the run to be cancelled")
    asyncio.run(reaches(worker, "Completed", "Cancelled"))
    asyncio.run(until(lambda: all_ended(processes), "both processes to end"))
    check_resumable(tmp_path / RUN, experiment)


def check_resumable(folder, experiment):
    """Go on for two steps, and look for each step once."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert list((folder / "checkpoints").glob("*/manifest.json"))
    steps = summary["steps"] + 2
    config = folder.parent / "config.json"
    config.write_text(json.dumps({**WATCHED, "experiment": {**experiment, "steps": steps}}))
    command = [sys.executable, "-m", "deployments.cli", "train", "--config", str(config), "--resume"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE)
    assert result.returncode == 0, result.stderr
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, steps + 1))
