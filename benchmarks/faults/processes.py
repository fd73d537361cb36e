"""Tiny runs in processes of their own that are killed or frozen, and what a run has come to.

Processes are forked from this one, which has imported everything, so that each takes about a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas  # noqa: F401 - pyarrow imports it when first asked for a table, in each process anew
import xxhash
from faults.points import Tap

from gyre_core.cluster.requests import POOL
from gyre_core.config import GyreConfig
from gyre_core.experience.consumption import read_consumption, records_table
from gyre_core.learner.repeatability import state_digest
from gyre_core.monitor.metrics import read_metrics
from gyre_core.monitor.names import UNREPEATABLE
from gyre_core.training.build import open_run
from gyre_core.training.checkpoints import open_checkpoints
from gyre_core.training.ending import export_policy, write_run_summary
from gyre_core.training.export import EXPORT
from gyre_core.training.resume import NEW, RESUME, Origin
from gyre_core.training.run import TrainingRun
from gyre_core.training.run_folder import RunFolder, RunFolderError, run_storage
from gyre_core.training.saver import RANDOM
from gyre_core.training.stages import take_step
from gyre_core.types import PolicyVersion
from gyre_core.weights import chain
from gyre_core.weights.chain import VersionChain
from gyre_core.weights.digests import file_digest

STEPS, NAME = 5, "killed"
DEADLINE = 120.0
"""Seconds after which a process has hung."""
STOPPED = 256
"""Instead of an exit code: a process that stands still."""
UNREPEATABLE_COLUMNS = ("segment", "segment_bytes", "version_epoch")
"""Of the pool's index: numbers that a restored pool gives anew, sizes that depend on the clock, and which process
published a version."""
LONGEST_CHAIN = 2
"""Differences that may follow a whole policy version here, so that a short run has whole ones behind them."""

WHOLE = {"models": {"dtype": "float32"}, "learning": {"lr": 1e-2}, "checkpoint": {"every": 1, "keep": 2}}
SMALL_STEPS = {"models": {"dtype": "bfloat16"}, "learning": {"lr": 1e-4}}
"""So small that differences of policy versions are worth while."""
INCREMENTS = {"every": 1, "keep": 2, "incremental": True, "dual_write": True}
CONFIGURATIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "full": WHOLE,
    "replay": {**SMALL_STEPS, "checkpoint": {**INCREMENTS, "exact": "replay", "replay_budget": 0.05}},
    "always": {**SMALL_STEPS, "checkpoint": {**INCREMENTS, "exact": "always"}},
}
"""Full checkpoints and whole policy versions; increments that are repeated, and increments that hold differences, both
with a warm store and with policy versions as differences."""


@dataclass(frozen=True)
class Fault:
    """At which call of which point, or after how many seconds, a process is killed; or frozen at a call."""

    point: str
    call: int = 0
    seconds: float | None = None
    freeze: bool = False


@dataclass(frozen=True)
class End:
    """How a process ended: struck at an event, or by itself with the calls of each point and what the run came to."""

    seconds: float
    struck: str | None = None
    frozen: int | None = None
    """The id of the process that stands still there."""
    counts: Mapping[str, int] | None = None
    outcome: Mapping[str, str] | None = None
    error: str | None = None


def tiny_config(name: str, output: Path) -> GyreConfig:
    """The settings of a configuration, with its output in a folder."""
    changes = CONFIGURATIONS[name]
    return GyreConfig.model_validate(
        {
            "experiment": {"name": NAME, "seed": 3, "steps": STEPS, "threads": 1, "output": str(output)},
            "models": {
                "tiny": {"hidden_size": 16, "layers": 1},
                "warm_start": {"max_steps": 0},
                **changes["models"],
            },
            "data": {"size": 64, "evaluation_size": 0},
            "rollout": {"batch_size": 8, "samples_per_prompt": 4, "groups_per_request": 4, "max_tokens": 4},
            "reward": {"functions": [{"path": f"{Path(__file__).with_name('rewards.py')}:even_digits"}]},
            "learning": {"update_steps": 4, "kl_coef": 0.01, **changes["learning"]},
            "evaluation": {"every": 0, "prompts": 4},
            "monitor": {"tensorboard": False},
            "checkpoint": {"interval": 1e9, **changes["checkpoint"]},
        }
    )


def run_process(configuration: str, folder: Path, fault: Fault | None) -> End:
    """Begin the run in `folder`, or go on with it, in a process that is struck as told, if it is."""
    child = _fork(folder, lambda: _train(configuration, folder, fault))
    return _end_of(child, folder, DEADLINE if fault is None or fault.seconds is None else fault.seconds)


def thaw(child: int, folder: Path) -> End:
    """Let a process that was frozen come to its end."""
    os.kill(child, signal.SIGCONT)
    return _end_of(child, folder, DEADLINE)


def look(configuration: str, folder: Path) -> End:
    """What the run in `folder` has come to, though no process goes on with it."""
    child = _fork(folder, lambda: {"outcome": outcome(tiny_config(configuration, folder / "runs"))})
    return _end_of(child, folder, DEADLINE)


def _fork(folder: Path, work: Callable[[], Mapping[str, Any]]) -> int:
    """A process that does the work and leaves what it returns in `folder`; its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with _log(folder, os.getpid()).open("ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        _result(folder, os.getpid()).write_text(json.dumps(work()))
        code = 0
    except BaseException:  # noqa: BLE001 - this process has nobody above it to tell
        traceback.print_exc()
    finally:
        os._exit(code)


def _result(folder: Path, child: int) -> Path:
    return folder / f"{child}.result"


def _struck(folder: Path, child: int) -> Path:
    return folder / f"{child}.struck"


def _log(folder: Path, child: int) -> Path:
    return folder / f"{child}.log"


def _end_of(child: int, folder: Path, deadline: float) -> End:
    struck = _struck(folder, child)
    started = time.monotonic()
    status = _wait(child, started + deadline)
    seconds = time.monotonic() - started
    if status in (-signal.SIGKILL, STOPPED) and struck.exists():
        return End(seconds, struck=struck.read_text(), frozen=child if status == STOPPED else None)
    if status == -signal.SIGKILL and deadline < DEADLINE:
        return End(seconds, struck=f"{seconds:.2f} s after its start")
    if status != 0:
        return End(seconds, error=f"a process ended with {status}:\n{_log(folder, child).read_text()[-3000:]}")
    return End(seconds, **json.loads(_result(folder, child).read_text()))


def _wait(child: int, deadline: float) -> int:
    """The exit code of a process that is killed at the deadline, or STOPPED."""
    while True:
        found, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if found:
            return STOPPED if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.005)


def _train(configuration: str, folder: Path, fault: Fault | None) -> dict[str, Any]:
    """Take the steps that are left; returns how often each point was reached, and what the run has come to."""
    chain.LEAST_DELTA_BYTES = chain.LEAST_DELTA_BYTES if configuration == "full" else 0
    chain.LONGEST_CHAIN = LONGEST_CHAIN
    config = tiny_config(configuration, folder / "runs")
    begun = _find(config) is not None
    point = None if fault is None or fault.seconds is not None else fault.point
    strike = signal.SIGSTOP if fault and fault.freeze else signal.SIGKILL
    told = _struck(folder, os.getpid())
    tap = Tap("recovering" if begun else "opening", point, fault.call if fault else 0, told, strike)
    tap.install()
    asyncio.run(_take_steps(config, RESUME if begun else NEW, tap))
    return {"counts": dict(tap.counts), "outcome": outcome(config)}


async def _take_steps(config: GyreConfig, origin: Origin, tap: Tap) -> None:
    run = await open_run(config, origin=origin)
    tap.phase = "running"
    await asyncio.to_thread(write_run_summary, run, "running")
    for step in range(run.step + 1, STEPS + 1):
        await _take_step(run, step)
    await run.save()
    await export_policy(run)
    await asyncio.to_thread(write_run_summary, run, "completed")
    await run.close()


async def _take_step(run: TrainingRun, step: int) -> None:
    """Take a step, with the tries that the flow gives it."""
    retries = run.config.experiment.step_retries
    for last in [False] * retries + [True]:
        try:
            with run.recording_fatal_errors():
                await take_step(run, step)
                return
        except Exception:
            traceback.print_exc()
            if last:
                raise


def differences(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """A line for each part of an outcome that is not as it should be."""
    return [
        f"{name}: {found.get(name)} instead of {wanted.get(name)}"
        for name in sorted(wanted.keys() | found.keys())
        if found.get(name) != wanted.get(name)
    ]


def _find(config: GyreConfig) -> RunFolder | None:
    """The run's folder; None when no process came so far as to make one."""
    try:
        return RunFolder.find(NAME, config.experiment.output)
    except RunFolderError:
        return None


def outcome(config: GyreConfig) -> dict[str, str]:
    """What a run left on disk: weights, moments, pool, policy and export, and what each step trained on and said of it.

    Of steps that several processes drew, what the last one drew.
    """
    folder = _find(config)
    assert folder is not None
    storage, store = run_storage(config, folder), open_checkpoints(config, folder)
    checkpoint = store.newest()
    assert checkpoint is not None
    learner = {name: tensor for name, tensor in checkpoint.tensors.items() if name != RANDOM}
    pool = checkpoint.tables["pool"]
    index = pool.drop_columns([*UNREPEATABLE_COLUMNS]).to_pylist()
    version = PolicyVersion(**checkpoint.state["version"])
    VersionChain(storage).load(version)
    found = {
        "step": str(checkpoint.step),
        "learner": state_digest(learner, checkpoint.state["learner"]),
        "random": state_digest({RANDOM: checkpoint.tensors[RANDOM]}, {}),
        "pool": _digest([index, pool.schema.metadata]),
        "policy": f"{version.number} {VersionChain(storage).manifest(version).digest}",
        "samples": f"{checkpoint.state['samples_seen']} {checkpoint.state['tokens_seen']}",
        "stores": str([*store.problems(checkpoint.name).values()]),
        "status": str(folder.summary().get("status")),
        "export": file_digest(folder.path / EXPORT / "model.safetensors"),
        "segments": str(set(checkpoint.segments) - set(storage.list(POOL))),
    }
    for step in range(1, STEPS + 1):
        records = (read_consumption(storage, epoch, step) for epoch in range(checkpoint.epoch, 0, -1))
        record = next((record for record in records if record is not None), None)
        found[f"consumed in step {step}"] = _digest(record and records_table([record]).to_pylist())
    for row in read_metrics(folder.path):
        known = {f"step {row.step}: {name}": repr(value) for name, value in row.metrics.items()}
        assert not known.keys() & found.keys(), f"step {row.step} has two lines"
        found |= {name: value for name, value in known.items() if not name.split(": ")[1].startswith(UNREPEATABLE)}
    return found


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(repr(value).encode())
