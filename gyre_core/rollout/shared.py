"""What every worker of a run reads before it can begin: the configuration, and a policy that was made on the spot.

They lie on the run's storage as `config.yaml` and `start_policy/`. Where that is the run folder they are there already.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gyre_core.storage import Storage

CONFIG = "config.yaml"
START_POLICY = "start_policy"


def share(storage: Storage, run_folder: Path) -> None:
    """Put on `storage` what workers need of the run folder: the policy unless it is there, the configuration anew."""
    config, policy = (run_folder / CONFIG).read_bytes(), run_folder / START_POLICY
    for file in sorted(policy.iterdir()) if policy.exists() else ():
        name = file.relative_to(run_folder).as_posix()
        if not storage.exists(name):
            storage.create(name, file.read_bytes())
    if not storage.exists(CONFIG) or storage.read(CONFIG) != config:
        storage.replace(CONFIG, config)


@contextmanager
def fetch_start_policy(storage: Storage) -> Generator[Path | None]:
    """A local folder with the policy that was made on the spot, for the length of the block; None for none."""
    names = storage.list(START_POLICY)
    if not names:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            (Path(folder) / Path(name).name).write_bytes(storage.read(name))
        yield Path(folder)
