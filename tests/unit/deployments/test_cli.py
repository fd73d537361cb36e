"""The command line: options for every setting, exit codes, one sentence for each mistake."""

import subprocess
import sys
from pathlib import Path

import pytest

from deployments import cli
from deployments.environment import describe_environment, mask_url
from gyre_core.config import load_config
from gyre_core.config.fields import list_fields

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "examples" / "quickstart.yaml")


def gyre(*arguments, **options):
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "deployments.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


@pytest.fixture
def run(capsys):
    """Run a command in this process; gives exit code, stdout and stderr."""

    def run_command(*arguments):
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


@pytest.mark.parametrize("command", ["train", "preflight"])
def test_help_shows_every_setting_with_type_default_and_description(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "4000")
    code, out, _ = run(command, "--help")
    assert code == 0
    lines = out.splitlines()
    for field in list_fields():
        (line,) = [line for line in lines if f"--{field.name} " in line]
        assert field.description in line
        assert f"[{field.kind}" in line
        assert f"; default {field.default}]" in line or not field.default


@pytest.mark.parametrize("arguments", [("--help",), (), ("init", "--help"), ("export", "--help")])
def test_help_of_commands(run, arguments):
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert "Usage: gyre" in out


def test_dry_run_prints_a_configuration_that_loads_back_equal(tmp_path):
    result = gyre("train", "--config", QUICKSTART, "--dry-run", "--learning.lr", "1e-5", "--rollout.batch_size=64")
    assert (result.returncode, result.stderr) == (0, "")
    file = tmp_path / "resolved.yaml"
    file.write_text(result.stdout)
    overrides = [("learning.lr", "1e-5"), ("rollout.batch_size", "64")]
    assert load_config(file) == load_config(QUICKSTART, overrides)
    assert load_config(file).rollout.batch_size == 64
    assert "# a step    64 prompts x 8 = 512 completions" in result.stdout


def test_dry_run_loads_neither_torch_nor_prefect():
    code = (
        "import sys; from deployments.cli import main\n"
        f"code = main(['train', '--config', {QUICKSTART!r}, '--dry-run'])\n"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'transformers', 'prefect')))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_dry_run_shows_what_is_not_built_yet(run):
    code, out, err = run("train", "--config", str(ROOT / "examples" / "spec.yaml"), "--dry-run")
    assert code == 0
    assert "lr: 5.0e-07" in out
    assert "rollout.engine: `vllm` is not built yet" in err


def test_training_refuses_what_is_not_built_yet(run):
    code, out, err = run("train", "--config", str(ROOT / "examples" / "spec.yaml"))
    assert (code, out) == (2, "")
    keys = [line.split(":")[0] for line in err.splitlines()]
    assert keys == ["rollout.engine"]


USER_ERRORS = [
    (("train",), "--config requires an argument"),
    (("train", "--config", "missing.yaml"), "missing.yaml: there is no such file"),
    (("train", "--config", QUICKSTART, "--lr", "1"), "no option --lr; did you mean learning.lr or"),
    (("train", "--config", QUICKSTART, "--lr=1"), "no option --lr; did you mean learning.lr or"),
    (("train", "--config", QUICKSTART, "--learning.learnig_rate", "1"), "did you mean learning.lr?"),
    (("train", "--config", QUICKSTART, "--dry-rn"), "Did you mean --dry-run?"),
    (("train", "--config", QUICKSTART, "--learning.lr", "on"), "command line: learning.lr: expected number > 0"),
    (("train", "--config", QUICKSTART, "--learning.lr", "1", "--learning.lr", "2"), "specified multiple times"),
    (("train", "--config", QUICKSTART, "--rollout.batch_size", "-5"), "got the number -5"),
    (("trian",), 'Did you mean "train"?'),
    (("init", "--nonsense"), "Unknown option: --nonsense"),
    (("evaluate",), "requires an argument"),
]


@pytest.mark.parametrize(("arguments", "fragment"), USER_ERRORS)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(run, arguments, fragment):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert fragment in err
    assert len(err.splitlines()) == 1


def test_exit_code_2_without_a_traceback_in_a_process_of_its_own(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning:\n  learnig_rate: 1\n")
    result = gyre("train", "--config", str(file))
    assert result.returncode == 2
    assert result.stderr == (f"{file}:2: learning.learnig_rate: there is no such setting; did you mean learning.lr?\n")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(KeyboardInterrupt(), 130, "interrupted\n"), (ValueError("no such run."), 2, "no such run.\n")],
)
def test_interruption_and_late_mistakes_have_their_codes(run, monkeypatch, error, code, said):
    def fail(*_):
        raise error

    monkeypatch.setattr("deployments.environment.describe_environment", fail)
    assert run("env") == (code, "", said)


def test_a_failure_that_is_no_mistake_of_the_user_is_raised(monkeypatch):
    def fail():
        raise RuntimeError("broken")

    monkeypatch.setattr("deployments.environment.describe_environment", fail)
    with pytest.raises(RuntimeError, match="broken"):
        cli.main(["env"])


def test_init_writes_a_configuration_once(run, tmp_path):
    folder = tmp_path / "new"
    code, out, _ = run("init", str(folder))
    assert code == 0
    assert f"gyre train --config {folder / 'gyre.yaml'}" in out
    text = (folder / "gyre.yaml").read_text()
    assert load_config(folder / "gyre.yaml").experiment.name == "first-run"
    code, _, err = run("init", str(folder))
    assert code == 2
    assert "exists already" in err
    assert (folder / "gyre.yaml").read_text() == text


def test_the_environment_shows_versions_and_no_secrets(monkeypatch):
    from prefect.settings import PREFECT_API_KEY, PREFECT_API_URL, temporary_settings

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    with temporary_settings({PREFECT_API_URL: "https://me:very-secret@host/api", PREFECT_API_KEY: "very-secret"}):
        text = describe_environment()
    assert "very-secret" not in text
    values = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert values["PREFECT_API_URL"] == "https://***@host/api"
    assert values["PREFECT_API_KEY"] == "set"
    assert values["python"] == ".".join(map(str, sys.version_info[:3]))
    for package in ("gyre", "torch", "transformers", "prefect", "pyarrow", "vllm"):
        assert package in values


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("http://127.0.0.1:4200/api", "http://127.0.0.1:4200/api"),
        ("https://user@host/api", "https://***@host/api"),
        ("https://user:pa:ss@host/a@b", "https://***@host/a@b"),
    ],
)
def test_user_information_in_urls_is_masked(url, masked):
    assert mask_url(url) == masked
