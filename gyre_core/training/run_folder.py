"""The folder of a run, `OUTPUT/NAME/RUN_ID`, and who may write to it.

A run id begins with the time of its creation unless the user chose another. The process that trains
holds a lock on `owner.lock` for as long as it lives, so that two live owners of one run are refused, and a
run that says "running" without a lock is known to have died.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from gyre_core.config import GyreConfig, dump_config, load_config
from gyre_core.config.checks import data_urls
from gyre_core.monitor.metrics import METRICS_FILE
from gyre_core.rollout.shared import CONFIG
from gyre_core.storage import Storage, exercise_storage, open_storage, telling_out_of_space, unwatched
from gyre_core.storage.s3_options import block_is_loaded, s3_url

SUMMARY = "summary.json"
_LOCK = "owner.lock"
_BEGINS_FROM = "begins_from"


class RunFolderError(ValueError):
    """A run folder is missing, taken, or in use."""


class RunFolder:
    """One run's folder; `key` is NAME/RUN_ID."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.key = f"{self.path.parent.name}/{self.path.name}"
        self._lock: FileIO | None = None

    @classmethod
    def create(cls, config: GyreConfig, run_id: str | None, source: RunFolder | None = None) -> RunFolder:
        """Make the folder of a new run and write its resolved configuration.

        `source` is the run that it is to begin from, which the folder says until `note_begun`.

        Raises RunFolderError when the folder cannot be made: the run id is taken or no name, or nothing may be written;
        and OutOfSpaceError, with nothing left behind.
        """
        if run_id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_id):
            raise RunFolderError(
                f"--run-id {run_id!r} is not a name; use letters, digits, dots, dashes and underscores only"
            )
        parent = Path(config.experiment.output) / config.experiment.name
        identity = run_id or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        path = parent / identity
        data = dump_config(config)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise RunFolderError(
                f"the run folder {path} is there already; go on with it by --resume, or choose another --run-id"
            ) from None
        except OSError as error:
            raise RunFolderError(
                f"the run folder {path} cannot be made ({error.strerror}); name a folder for experiment.output that "
                "you may write to"
            ) from error
        try:
            with telling_out_of_space(path / CONFIG, len(data)):
                if source is not None:
                    (path / _BEGINS_FROM).write_text(source.key)
                (path / CONFIG).write_text(data)
        except OSError:
            shutil.rmtree(path)
            raise
        return cls(path)

    @classmethod
    def find(cls, run: str, output: str | Path) -> RunFolder:
        """The folder of `run`, which is NAME (its newest run), NAME/RUN_ID, or a path.

        Raises RunFolderError that lists what there is when there is no such run.
        """
        for path in (Path(output) / run, Path(run)):
            if (path / CONFIG).is_file():
                return cls(path)
            # Its time is that of the run's creation.
            runs = sorted(path.glob(f"*/{CONFIG}"), key=lambda file: file.stat().st_mtime_ns)
            if runs:
                return cls(runs[-1].parent)
        name = run.partition("/")[0]
        of_name = sorted(f"{name}/{entry.parent.name}" for entry in (Path(output) / name).glob(f"*/{CONFIG}"))
        known = of_name or sorted({entry.parent.parent.name for entry in Path(output).glob(f"*/*/{CONFIG}")})
        there = f"there are: {', '.join(known)}" if known else "there are no runs"
        raise RunFolderError(f"no run {run!r} under {Path(output)}; {there}")

    def config(self) -> GyreConfig:
        """The resolved configuration that the run was started with, or resumed with last."""
        return load_config(self.path / CONFIG)

    def update_config(self, config: GyreConfig, require_owned: Callable[[], None] = unwatched) -> None:
        """Write the configuration that the run is resumed with; by its time the file still tells when the run began.

        What `require_owned` raises leaves the old one.
        """
        file, data = self.path / CONFIG, dump_config(config)
        began, new = file.stat(), file.with_suffix(".new")
        try:
            with telling_out_of_space(file, len(data)):
                new.write_text(data)
            os.utime(new, ns=(began.st_atime_ns, began.st_mtime_ns))
            require_owned()
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)

    def begins_from(self) -> str | None:
        """The key of the run that this one is to begin from, until it has; None for others."""
        file = self.path / _BEGINS_FROM
        return file.read_text() if file.exists() else None

    def note_begun(self) -> None:
        """The run has all that it begins from."""
        (self.path / _BEGINS_FROM).unlink(missing_ok=True)

    def last_sign(self) -> float | None:
        """When the process that trained last wrote of the run here, in seconds since 1970; None when it ended well."""
        if self.summary().get("status") not in (None, "running"):
            return None
        files = (self.path / name for name in (METRICS_FILE, SUMMARY))
        return max((file.stat().st_mtime for file in files if file.exists()), default=None)

    def summary(self) -> dict[str, object]:
        """`summary.json`, or an empty dictionary before there is one."""
        try:
            return json.loads((self.path / SUMMARY).read_text())
        except FileNotFoundError:
            return {}

    def present(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / CONFIG).is_file()

    def give_up(self, reason: str) -> None:
        """Note, instead of an owner that died, why the run is not started again."""
        summary = {**self.summary(), "status": "given up", "error": reason}
        open_storage(self.path).replace(SUMMARY, json.dumps(summary, indent=2).encode())

    def acquire(self, patience: float = 0.0) -> None:
        """Become the run's only owner on this machine, until `release` or the process's end.

        Raises RunFolderError that names the process when another live one still owns the run after `patience` seconds,
        and OutOfSpaceError.
        """
        # Unbuffered, as what did not fit would else be written once more when the file is closed.
        file = (self.path / _LOCK).open("a+b", buffering=0)
        deadline = time.monotonic() + patience
        while not _locked(file):
            if time.monotonic() >= deadline:
                file.seek(0)
                owner = file.read().decode().strip() or "unknown"
                file.close()
                raise RunFolderError(f"the run {self.key} is being trained by process {owner}; end that one first")
            time.sleep(0.05)
        self._lock = file
        file.truncate(0)
        with telling_out_of_space(self.path / _LOCK):
            file.write(str(os.getpid()).encode())

    def require_owned(self) -> None:
        """Raise RunFolderError when this object does not own the run: what opens it goes on in a thread for a while
        after whoever wanted it has given up."""
        if self._lock is None:
            raise RunFolderError(f"the run {self.key} is not being opened any more")

    def release(self) -> None:
        """Give up the ownership."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def owned(self) -> bool:
        """Whether a live process owns the run; changes nothing in its folder."""
        try:
            with (self.path / _LOCK).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


def _locked(file: FileIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def replacing(target: Path, require_owned: Callable[[], None] = unwatched) -> Generator[Path]:
    """A folder beside `target` to write to, which takes its place when the block ends well and else is removed.

    What `require_owned` raises, before and after the block, leaves the target as it was. Raises OutOfSpaceError.
    """
    require_owned()
    for left_behind in target.parent.glob(f".{target.name}.*.unfinished"):
        shutil.rmtree(left_behind, ignore_errors=True)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(8)}.unfinished")
    try:
        with telling_out_of_space(target):
            unfinished.mkdir(parents=True)
            yield unfinished
        require_owned()
        unfinished.stat()  # Raises where the next owner has cleared it away, before the target goes.
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def run_storage(config: GyreConfig, folder: RunFolder) -> Storage:
    """Where the run's data lies: its own place below `storage.url`, or the run folder.

    Raises ValueError for a `storage.block` that was not loaded.
    """
    return data_storage(config).child(folder.key) if config.storage.url else open_storage(folder.path)


def checkpoint_storage(config: GyreConfig, folder: RunFolder) -> Storage:
    """Where the run's checkpoints lie: its own place below `checkpoint.url`, or with its other data."""
    url = config.checkpoint.url
    return _open(config, url).child(folder.key) if url else run_storage(config, folder)


def warm_storage(config: GyreConfig, folder: RunFolder) -> Storage | None:
    """Where the second copy of the run's checkpoints lies; None without one."""
    if not config.checkpoint.dual_write:
        return None
    output = Path(config.experiment.output).absolute()
    url = config.checkpoint.warm_url or str(output.with_name(f"{output.name}-warm"))
    return _open(config, url).child(folder.key)


def data_storage(config: GyreConfig, *, trial: bool = False) -> Storage:
    """What `storage.url` names, or the folder of all runs; the data of a run lie in `NAME/RUN_ID` below it.

    Raises ValueError for a `storage.block` that was not loaded.
    """
    return _open(config, config.storage.url or config.experiment.output, trial=trial)


def _open(config: GyreConfig, url: str, *, trial: bool = False) -> Storage:
    """The storage at a URL, with the access that the configuration gives."""
    return open_storage(s3_url(url, config.storage.block, config.storage.endpoint), trial=trial)


def check_storage(config: GyreConfig) -> None:
    """Raise ValueError, in one sentence, for a place on S3 that cannot hold data of a run; leaves nothing there.

    A place whose `storage.block` was not loaded yet is left for later.
    """
    block = config.storage.block
    if block is not None and not block_is_loaded(block):
        return
    for key, url in data_urls(config).items():
        if url.startswith("s3://"):
            _try_out(key, _open(config, url, trial=True))


def _try_out(key: str, storage: Storage) -> None:
    name = f"trial-{secrets.token_hex(8)}"
    try:
        exercise_storage(storage.child(name))
    except OSError as error:
        raise ValueError(f"{key}: {error}") from error
    except RuntimeError as error:
        storage.delete_folder(name)
        raise ValueError(f"{key}: {error}") from error
