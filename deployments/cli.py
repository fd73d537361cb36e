"""The command `gyre`: trains, checks, evaluates and exports policies from the command line.

Exit codes: 0 success, 1 a run that failed, 2 a mistake in the configuration or the command (one sentence for each on
stderr), 130 interrupted, 143 terminated. Heavy imports stay inside the commands, so that help and `--dry-run` are
quick.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter, UnknownOptionError

from deployments.exit_codes import FAILED, INTERRUPTED, USER_ERROR
from gyre_core.config import ConfigError, GyreConfig, dump_config, load_config
from gyre_core.config.fields import Field, list_fields, list_sections
from gyre_core.config.plan import make_plan
from gyre_core.config.runnable import refuse_unbuilt
from gyre_core.config.suggestions import suggest_key
from gyre_core.config.template import TEMPLATE
from gyre_core.rewards.values import RewardError
from gyre_core.storage import OutOfSpaceError, StorageError


def _version() -> str:
    from deployments.environment import package_version

    return package_version("gyre")


app = App(
    name="gyre",
    help="Elastic reinforcement learning for aligning language models, on Prefect.",
    help_flags=["--help"],
    version_flags=["--version"],
    version=_version,
    help_format="plaintext",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)

ConfigFile = Annotated[Path, Parameter(help="YAML file of the run; `gyre init` writes one.")]
WITH_SETTINGS = ("train", "preflight", "schedule")
"""Commands that take every setting as an option."""
Flag = Parameter(negative=(), show_default=False)
Run = Annotated[str, Parameter(help="NAME, which means its newest run, or NAME/RUN_ID.")]
Output = Annotated[str, Parameter(help="Folder that holds the run folders (experiment.output).")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` are those of the process when None."""
    try:
        return app(sys.argv[1:] if arguments is None else list(arguments)) or 0
    except CycloptsError as error:
        return _complain(_explain_usage(error))
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        return _complain(str(error))
    except (RewardError, StorageError, OutOfSpaceError) as error:
        print(error, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _identifier(field: Field) -> str:
    return field.name.replace(".", "__")


def _option(name: str, field: Field, group: Group) -> inspect.Parameter:
    """The command-line option of a setting: text, which `load_config` reads and checks."""
    default = f"; default {field.default}" if field.default else ""
    text = f"{field.description} [{field.kind}{default}]"
    option = Parameter(name=f"--{field.name}", help=text, group=group, show_default=False, allow_leading_hyphen=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=Annotated[str | None, option])


def with_settings(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command one option per setting; those that are used reach it as `overrides`, (name, text) pairs."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    options = {_identifier(field): field for field in list_fields()}
    groups = {
        name: Group(name, help=text, sort_key=index) for index, (name, text) in enumerate(list_sections().items())
    }

    def run(**given: Any) -> int:
        overrides = [(options[name].name, given.pop(name)) for name in list(given) if name in options]
        return command(**given, overrides=overrides)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    parameters = [parameter for parameter in own if parameter.name != "overrides"]
    parameters += [_option(name, field, groups[field.section]) for name, field in options.items()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@app.command
@with_settings
def train(
    *,
    config: ConfigFile,
    dry_run: Annotated[bool, Flag, Parameter(help="Print the resolved configuration and the plan, and stop.")] = False,
    resume: Annotated[bool, Flag, Parameter(help="Go on from the newest checkpoint of the run.")] = False,
    resume_step: Annotated[
        int | None,
        Parameter(name="--resume.step", help="Go on from the checkpoint after this step; give up what came later."),
    ] = None,
    resume_from: Annotated[
        str | None,
        Parameter(
            name="--resume.from",
            help="Begin a new run from the newest checkpoint of another one, or that of --resume.step.",
        ),
    ] = None,
    run_id: Annotated[str | None, Parameter(help="Id of the run below its name; made from the time if absent.")] = None,
    keep_server: Annotated[bool, Flag, Parameter(help="Leave a Prefect server that this run started up.")] = False,
    overrides: Sequence[tuple[str, str]],
) -> int:
    """Train a policy. Every setting below may be given here; it prevails over the file."""
    settings = load_config(config, overrides)
    if dry_run:
        return _print_dry_run(settings)
    refuse_unbuilt(settings)
    print(make_plan(settings).describe(), flush=True)
    from deployments.launch import run_training
    from deployments.local import ServerStartError
    from deployments.platform_state import PlatformError
    from gyre_core.training.resume import Origin

    origin = Origin(resume, resume_step, resume_from)
    try:
        return run_training(settings, origin=origin, run_id=run_id, keep_server=keep_server)
    except (ServerStartError, PlatformError) as error:
        print(error, file=sys.stderr)
        return FAILED


@app.command
@with_settings
def preflight(*, config: ConfigFile, overrides: Sequence[tuple[str, str]]) -> int:
    """Check engine, models, rewards, storage and disk by a short generation, before any training."""
    settings = load_config(config, overrides)
    refuse_unbuilt(settings)
    from deployments.scoring import configured_runner
    from deployments.storage_access import load_storage_access
    from gyre_core.training.preflight import run_preflight

    load_storage_access(settings)
    with configured_runner(settings) as runner:
        return run_preflight(settings, runner)


@app.command
def init(directory: Annotated[Path, Parameter(help="Folder for gyre.yaml; made if absent.")] = Path(), /) -> int:
    """Write a small, commented GRPO configuration that runs as it stands."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "gyre.yaml"
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(TEMPLATE)
    except FileExistsError:
        raise FileExistsError(f"{file} exists already; remove it, or name another folder.") from None
    print(f"wrote {file}; train with: gyre train --config {file}")
    return 0


@app.command
def evaluate(run: Run, /, *, output: Output = "runs") -> int:
    """Evaluate a run's newest policy on its held-out prompts."""
    from deployments.scoring import configured_runner
    from deployments.storage_access import load_storage_access
    from gyre_core.training.evaluate_run import evaluate_run
    from gyre_core.training.run_folder import RunFolder

    config = RunFolder.find(run, output).config()
    load_storage_access(config)
    with configured_runner(config) as runner:
        print(evaluate_run(run, output, runner))
    return 0


@app.command
def export(
    run: Run,
    /,
    *,
    to: Annotated[
        str | None, Parameter(help="Folder to write; the run's own `export` (or `adapter`) if absent.")
    ] = None,
    adapter: Annotated[bool, Flag, Parameter(help="Only the LoRA adapters of the newest full checkpoint.")] = False,
    output: Output = "runs",
) -> int:
    """Write a run's newest policy as a Hugging Face folder, or its adapters in PEFT's format."""
    from deployments.storage_access import load_storage_access
    from gyre_core.training.export import export_adapter, export_run
    from gyre_core.training.run_folder import RunFolder

    load_storage_access(RunFolder.find(run, output).config())
    print(export_adapter(run, output, to) if adapter else export_run(run, output, to))
    return 0


@app.command
def status(
    run: Annotated[str | None, Parameter(help="NAME or NAME/RUN_ID; all runs if absent.")] = None,
    /,
    *,
    output: Output = "runs",
) -> int:
    """Say where each run stands."""
    from gyre_core.training.status import describe_runs

    print(describe_runs(output, run))
    return 0


@app.command
def checkpoints(run: Run, /, *, output: Output = "runs") -> int:
    """List a run's checkpoints, and verify every object of each in every store; ends with 1 when none is whole."""
    from deployments.storage_access import load_storage_access
    from gyre_core.training.checkpoints import describe_checkpoints
    from gyre_core.training.run_folder import RunFolder

    load_storage_access(RunFolder.find(run, output).config())
    text, restorable = describe_checkpoints(run, output)
    print(text)
    return 0 if restorable else 1


@app.command
def up(
    *,
    port: Annotated[
        int | None, Parameter(help="Port of the Prefect server on this machine; 4200 if it is still to be started.")
    ] = None,
    database: Annotated[
        str | None,
        Parameter(
            help="PostgreSQL of that server, postgresql://USER:PASSWORD@HOST/DATABASE, in place of SQLite; better by "
            "the environment variable GYRE_DATABASE_URL, which no list of processes shows."
        ),
    ] = None,
) -> int:
    """Start Prefect with Gyre's work pools, workers and deployments on this machine, and leave it running."""
    from deployments.platform_commands import bring_up

    return bring_up(port, database)


@app.command
def down() -> int:
    """End what `gyre up` started, after its flow runs."""
    from deployments.platform_commands import bring_down

    return bring_down()


@app.command
@with_settings
def schedule(
    *,
    config: ConfigFile,
    cron: Annotated[str, Parameter(help='When: minute, hour, day, month, weekday; "0 3 * * *" is every night at 3.')],
    timezone: Annotated[str, Parameter(help="Timezone of these times.")] = "UTC",
    overlap: Annotated[
        Literal["skip", "queue", "refuse"],
        Parameter(help="While a run of the series still trains: skip the firing, queue it, or have it fail."),
    ] = "skip",
    start: Annotated[
        Literal["model", "last_export"],
        Parameter(help="Where each run starts: the configured model, or the last export of the series, if any."),
    ] = "model",
    overrides: Sequence[tuple[str, str]],
) -> int:
    """Train again and again, each time as a run of its own, at the times of a cron line."""
    settings = load_config(config, overrides)
    refuse_unbuilt(settings)
    from deployments.schedule import schedule_runs

    name = schedule_runs(settings, cron, timezone, overlap, start)
    print(f"scheduled as the deployment {name}; end it with: prefect deployment delete {name}")
    return 0


@app.command
def stop_server() -> int:
    """End the local Prefect server that `--keep-server` left up."""
    from deployments.local import stop_local_server

    print("the local Prefect server has ended" if stop_local_server() else "there is no local Prefect server")
    return 0


@app.command
def env() -> int:
    """Print versions, cores, memory and thread settings; no secrets."""
    from deployments.environment import describe_environment

    print(describe_environment())
    return 0


def _print_dry_run(config: GyreConfig) -> int:
    """Print the resolved configuration as YAML, with the plan in its comments, and what `train` would refuse."""
    print(dump_config(config), end="")
    for line in make_plan(config).describe().splitlines():
        print(f"# {line}")
    try:
        refuse_unbuilt(config)
    except ConfigError as error:
        print(f"This configuration is valid, and `gyre train` refuses it:\n{error}", file=sys.stderr)
    return 0


def _explain_usage(error: CycloptsError) -> str:
    """One sentence on a command line that cannot be read."""
    if isinstance(error, UnknownOptionError):
        option = (error.token.keyword or error.token.value).partition("=")[0]
        takes_settings = error.command_chain is not None and error.command_chain[0] in WITH_SETTINGS
        takes_settings &= not option.startswith("--resume")  # Its own dots are no sections.
        if takes_settings and ("." in option or "Did you mean" not in str(error)):
            return f"command line: there is no option {option}; {suggest_key(option.lstrip('-'))}"
    return f"command line: {error} Try `gyre --help`."


def _complain(message: str) -> int:
    print(message, file=sys.stderr)
    return USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
