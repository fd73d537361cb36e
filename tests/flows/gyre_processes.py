"""The command `gyre` in processes of their own, which may be interrupted and killed.

They are forked from a server that has imported Gyre once, so that a test does not wait for torch each time.
"""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings
from tiny_runs import tiny_config

from gyre_core.training.run_folder import RunFolder

DEADLINE = 90.0
"""Seconds until a process must have got somewhere."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["deployments.launch", "gyre_processes"])


def write_config(folder: Path, **changes: dict) -> Path:
    """A YAML file with the tiny run's settings, its output in the same folder."""
    file = folder / "run.yaml"
    settings = tiny_config(folder / "runs", **changes).model_dump(mode="json", exclude_unset=True)
    file.write_text(yaml.safe_dump(settings))
    return file


def wait_until(ready, what: str):
    """What `ready` returns as soon as that is true; fails after `DEADLINE`."""
    deadline = time.monotonic() + DEADLINE
    while not (result := ready()):
        assert time.monotonic() < deadline, f"gave up waiting for {what}"
        time.sleep(0.02)
    return result


class GyreProcess:
    """A running `gyre`: `output` is what it printed so far."""

    def __init__(self, log: Path, *arguments: str, api_url: str | None = None, home: Path | None = None) -> None:
        self._log = log
        self._process = _forks.Process(target=_run_gyre, args=(str(log), arguments, api_url, home and str(home)))
        self._process.start()

    @property
    def output(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        self._process.join(DEADLINE)
        if self._process.is_alive():
            self._process.kill()
            raise AssertionError(f"the process did not end; its output:\n{self.output}")
        code = self._process.exitcode
        self._process.close()
        return code


def _run_gyre(log: str, arguments: tuple[str, ...], api_url: str | None, home: str | None) -> None:
    from deployments.cli import main

    with Path(log).open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if home is not None:
        os.environ["GYRE_HOME"] = home
    api = {"updates": {PREFECT_API_URL: api_url}} if api_url else {"restore_defaults": {PREFECT_API_URL}}
    with temporary_settings(**api):
        code = main(arguments)
    sys.stdout.flush()
    sys.exit(code)


def newest_run(folder: Path) -> RunFolder:
    """The newest run that was started with `write_config`'s file."""
    return RunFolder.find("tiny", folder / "runs")
