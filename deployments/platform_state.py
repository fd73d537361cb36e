"""What `gyre up` runs on this machine, as its supervisor writes it to `~/.gyre/up.json`. It holds no secrets."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from deployments.home import gyre_home, write_whole
from deployments.processes import ProcessId

Stage = Literal["starting", "ready", "stopping"]


class PlatformError(RuntimeError):
    """Something that is to be kept alive did not come up; carries the end of its log."""


@dataclass(slots=True)
class Supervised:
    """A process that is kept alive: which one it is now, how often it was started again, and why it last ended."""

    process: ProcessId | None = None
    restarts: int = 0
    last_error: str = ""
    given_up: bool = False

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Supervised:
        """Read what `asdict` made of one."""
        process = fields.pop("process")
        return cls(process=ProcessId(**process) if process else None, **fields)


@dataclass(slots=True)
class PlatformState:
    """The supervisor, what it looks after, and how far it is.

    `owned` when it ends with the last run that uses it, `local` when it started or shares a server here.
    """

    supervisor: ProcessId
    owned: bool = False
    stage: Stage = "starting"
    api_url: str = ""
    local: bool = True
    server: Supervised = field(default_factory=Supervised)
    workers: dict[str, Supervised] = field(default_factory=dict[str, Supervised])
    """The Prefect worker of each pool."""

    def save(self) -> None:
        """Write the state for others to read."""
        write_whole(state_file(), json.dumps(asdict(self), indent=2))

    @classmethod
    def load(cls) -> PlatformState | None:
        """The state as it was written last; None when there is none."""
        try:
            fields = json.loads(state_file().read_text())
        except FileNotFoundError:
            return None
        workers = {pool: Supervised.from_fields(worker) for pool, worker in fields.pop("workers").items()}
        server = Supervised.from_fields(fields.pop("server"))
        return cls(ProcessId(**fields.pop("supervisor")), server=server, workers=workers, **fields)

    @property
    def running(self) -> bool:
        """Whether its supervisor lives."""
        return self.supervisor.running()

    def worker_processes(self) -> list[ProcessId]:
        """The Prefect workers, whether they run or not."""
        return [worker.process for worker in self.workers.values() if worker.process is not None]


def state_file() -> Path:
    """Where the state lies."""
    return gyre_home() / "up.json"


def owners_folder() -> Path:
    """Where runs that hold a platform of their own leave their names; one of `gyre up` has no owners."""
    return gyre_home() / "owners"


def report_file() -> Path:
    """Where the supervisor leaves remarks for the command that started or ends it."""
    return gyre_home() / "up.report"
