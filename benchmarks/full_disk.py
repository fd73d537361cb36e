"""A run on a volume that fills up: what becomes of it without the storage guard, and with it.

Three runs of one configuration, on-policy on one thread, so that all must end with the same weights:

- undisturbed, on a large volume;
- unguarded (`storage.min_free` 0) on a small one, which its samples fill up: it stops, the volume is made larger, and
  it is resumed;
- guarded on such a volume. After three quarters of the steps a neighbour takes what is left; the run pauses, is given
  the space back after some seconds, and goes on.

The small volumes are tmpfs. Where nothing may be mounted, the unguarded run is left out, and the guarded one takes
place on the volume of temporary files, with `storage.min_free` so high that 200 MB are left to it and whoever else
writes there, which only the neighbour fills. The last line is one JSON object.

    python benchmarks/full_disk.py [--steps 60]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic.live_run import PATIENCE, wait_for
from xxhash import xxh3_128_hexdigest

from deployments.local import stop_local_server
from gyre_core.monitor.metrics import read_metrics

VOLUME, RESERVE = 2_200_000, 300_000
LARGE_VOLUME = 200_000_000
PAUSE_SECONDS = 3.0
"""How long the neighbour keeps the space."""
CONFIG = """
experiment: {{name: disk, seed: 1, steps: {steps}, output: {output}, threads: 1, step_retries: 0}}
models: {{tiny: {{hidden_size: 32, layers: 1}}, warm_start: {{max_steps: 0}}}}
data: {{evaluation_size: 0}}
rollout: {{batch_size: 32, samples_per_prompt: 8, max_tokens: 5}}
learning: {{lr: 1e-4}}
checkpoint: {{interval: 100000}}
evaluation: {{every: 0}}
monitor: {{tensorboard: false, completions_per_step: 0}}
storage: {{min_free: {min_free}, pause_timeout: 60}}
"""
"""No checkpoint is due before the end, so that every sample stays on the volume unless something is done."""


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@contextmanager
def small_volume(folder: Path) -> Generator[tuple[Path, bool]]:
    """A folder on a volume of `VOLUME` bytes, and whether there is one; else one on the volume of temporary files."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={VOLUME}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield folder, mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Gyre:
    """A running `gyre train`."""

    def __init__(self, folder: Path, steps: int, min_free: int, *options: str) -> None:
        self.folder = folder
        file, self._log = folder.with_suffix(".yaml"), folder.with_suffix(".log")
        file.write_text(CONFIG.format(steps=steps, output=folder, min_free=min_free))
        command = [sys.executable, "-m", "deployments.cli", "train", "--config", str(file), "--run-id", "run"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*command, "--keep-server", *options], stdout=log, stderr=log)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def rows(self) -> list[Any]:
        return read_metrics(self.folder / "disk" / "run")

    def wait_for(self, what: str, found: Callable[[], Any]) -> None:
        try:
            wait_for(what, found, self.process)
        except SystemExit:
            self.process.kill()
            raise SystemExit(f"no {what}; the run said:\n{self.said}") from None

    def end(self) -> int:
        """The exit code, when the run has ended by itself."""
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()

    def weights(self) -> str:
        """Digest of the exported weights."""
        return xxh3_128_hexdigest((self.folder / "disk" / "run" / "export" / "model.safetensors").read_bytes())


def run_undisturbed(folder: Path, steps: int) -> Gyre:
    folder.mkdir()
    run = Gyre(folder, steps, 0)
    if run.end():
        raise SystemExit(run.said)
    return run


def run_unguarded(folder: Path, steps: int) -> dict[str, Any]:
    """Let the run fill its volume, make that larger, and resume."""
    run = Gyre(folder, steps, 0)
    exit_code, done = run.end(), len(run.rows())
    told = next((line for line in reversed(run.said.splitlines()) if "no space left" in line), "")
    subprocess.run(["mount", "-o", f"remount,size={10 * VOLUME}", str(folder)], check=True)
    resumed = Gyre(folder, steps, 0, "--resume")
    return {
        "exit_code": exit_code,
        "steps_before": done,
        "told": told.replace(str(folder), "VOLUME"),
        "resumed_exit_code": resumed.end(),
        "weights": resumed.weights(),
    }


def run_guarded(folder: Path, steps: int, min_free: int) -> dict[str, Any]:
    """Let a neighbour take the space after three quarters of the steps, and give it back."""
    run = Gyre(folder, steps, min_free)
    run.wait_for("steps", lambda: len(run.rows()) >= 3 * steps // 4)
    ballast = folder / "neighbour"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(folder) - min_free + RESERVE // 2)
    run.wait_for("pause", lambda: "waits for space" in run.said)
    paused_at = len(run.rows())
    time.sleep(PAUSE_SECONDS)
    assert len(run.rows()) == paused_at, "a step was taken in the pause"
    ballast.unlink()
    given = time.monotonic()
    run.wait_for("step after the pause", lambda: len(run.rows()) > paused_at)
    went_on = time.monotonic() - given
    exit_code, rows = run.end(), run.rows()
    return {
        "exit_code": exit_code,
        "steps": len(rows),
        "steps_by_level": dict(sorted(Counter(int(row.metrics["perf/space_guard"]) for row in rows).items())),
        "checkpoints_brought_forward": sum("time/checkpoint" in row.metrics for row in rows),
        "paused_after_step": paused_at,
        "seconds_from_space_to_next_step": round(went_on, 2),
        "weights": run.weights(),
    }


def main() -> None:
    """Take the three runs and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["GYRE_HOME"] = str(root / "home")
        try:
            expected = run_undisturbed(root / "undisturbed", steps).weights()
            with small_volume(root / "unguarded") as (folder, mounted):
                unguarded = run_unguarded(folder, steps) if mounted else None
            with small_volume(root / "guarded") as (folder, mounted):
                reserve = RESERVE if mounted else free_bytes(folder) - LARGE_VOLUME
                guarded = run_guarded(folder, steps, reserve)
        finally:
            stop_local_server()
    digests = {outcome.pop("weights") for outcome in (unguarded, guarded) if outcome is not None}
    result = {
        "volume": {"kind": "tmpfs", "bytes": VOLUME}
        if mounted
        else {"kind": "temporary files, by storage.min_free", "bytes": LARGE_VOLUME},
        "steps": steps,
        "unguarded": unguarded,
        "guarded": guarded,
        "same_weights": digests == {expected},
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
