"""Who imports whom, what loads quickly, and that the documentation points at what is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.cli import app
from gyre_core.cluster.requests import REQUEST_FORMAT
from gyre_core.config import load_config
from gyre_core.config.runnable import refuse_unbuilt
from gyre_core.data.prompts import load_prompts
from gyre_core.experience.consumption import CONSUMPTION_FORMAT
from gyre_core.experience.schema import SEGMENT_FORMAT
from gyre_core.experience.snapshot import SNAPSHOT_FORMAT
from gyre_core.rewards.scorer import Scorer

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```", re.DOTALL)
TREE_PATH = re.compile(r"`((?:gyre_core|tasks|flows|deployments|tests|benchmarks|examples|docs)/[\w./-]*)`")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = HEADING.findall(CODE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_import_contracts_hold():
    result = run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("gyre_core.config", {"torch", "transformers", "prefect", "pyarrow"}),
        ("gyre_core.rewards.worker", {"torch", "transformers", "prefect", "pyarrow"}),
        ("gyre_core.training.build", {"prefect"}),
    ],
)
def test_module_loads_without(module, absent):
    result = run(sys.executable, "-c", f"import sys, {module}; print(*sys.modules)")
    assert result.returncode == 0, result.stderr
    assert absent.isdisjoint(result.stdout.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page):
    text = CODE.sub("", page.read_text())
    targets = [target for target in LINK.findall(text) if not target.startswith(("http://", "https://"))]
    for target in targets:
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(file), f"{target} has no such heading"
    missing = [path for path in TREE_PATH.findall(text) if not (ROOT / path).exists()]
    assert not missing, f"paths that are not there: {missing}"


async def test_example_of_the_readme_fits_together(tmp_path):
    blocks = dict(re.findall(r"```(json|python|yaml)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
    lines = (blocks["json"].replace("39+52", f"{first}+{second}") for first in range(30) for second in range(20))
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    (tmp_path / "reward.py").write_text(blocks["python"])
    (tmp_path / "run.yaml").write_text(blocks["yaml"])
    config = load_config(tmp_path / "run.yaml")
    refuse_unbuilt(config)
    rows = load_prompts(config.data, config.experiment.seed)
    scorer = Scorer(config.reward, tmp_path)
    await scorer.start()
    try:
        scorer.check_columns(rows.columns)
    finally:
        scorer.close()


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    listed = {target for target in LINK.findall(index) if "/" not in target}
    assert listed == {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"}


def test_the_page_of_the_storage_names_the_formats_that_are_written():
    named = set(re.findall(r"`([a-z]+/[0-9]+)`", (ROOT / "docs" / "storage.md").read_text()))
    assert named == {REQUEST_FORMAT, SEGMENT_FORMAT.name, CONSUMPTION_FORMAT.name, SNAPSHOT_FORMAT}


def test_the_readme_lists_every_command():
    rows = re.findall(r"^\| (`gyre [^|]*) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`gyre ([a-z-]+)", row)}
    assert listed == {name for name in app if not name.startswith("-")}
