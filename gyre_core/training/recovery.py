"""From which checkpoint a run goes on, and how it gets there; and how a run begins from another run's checkpoint."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from gyre_core.checkpoint.manifest import checkpoint_order
from gyre_core.checkpoint.store import Checkpoint, CheckpointStore, CorruptCheckpointError
from gyre_core.checkpoint.warm import copy_segments
from gyre_core.config import GyreConfig
from gyre_core.experience.replay import replayed_minibatches, segment_sizes
from gyre_core.learner.repeatability import state_digest
from gyre_core.monitor.metrics import METRICS_FILE
from gyre_core.rollout.shared import START_POLICY
from gyre_core.training.checkpoints import open_checkpoints
from gyre_core.training.resume import check_fingerprint
from gyre_core.training.run import TrainingRun
from gyre_core.training.run_folder import RunFolder, checkpoint_storage, run_storage, warm_storage
from gyre_core.training.saver import LearnerState

logger = logging.getLogger(__name__)


def find_checkpoints(store: CheckpointStore, key: str, step: int | None) -> list[str]:
    """The names of the checkpoints that a run may go on from, the best last; `step` wants one after that step.

    Raises ValueError that lists the steps there are when none is of that step.
    """
    names = store.names()
    if step is None:
        return names
    found = [name for name in names if checkpoint_order(name)[1] == step]
    if not found:
        there = ", ".join(map(str, sorted(set(store.steps())))) or "none"
        raise ValueError(f"--resume.step {step}: the run {key} has no checkpoint after that step; it has: {there}")
    return found


def recover(run: TrainingRun, names: Sequence[str], *, forked: bool) -> Checkpoint | None:
    """Bring the run to the last of these checkpoints that can be restored; None when there are none.

    A segment that the pool has lost comes back from the warm store. Raises CorruptCheckpointError when none of the
    checkpoints can be restored, and ValueError for one of a run with other contents, where `forked` allows fewer.
    """
    store, warm = run.saver.store, warm_storage(run.config, run.folder)
    for name in reversed(names):
        try:
            with run.recovery.timed("restore"):
                checkpoint = store.load(name)
                check_fingerprint(checkpoint.state["fingerprint"], run.fingerprint, forked=forked)
                if warm is not None and (restored := copy_segments(warm, run.storage, checkpoint.segments)):
                    logger.warning("%d segments that the pool has lost came back from %s", restored, warm.url)
                restore(run, checkpoint)
        except CorruptCheckpointError as error:
            logger.warning("skipping %s", error)
            continue
        if lost := run.pool.drop_missing():
            logger.warning("%d groups of the pool are not trained on, as their segments are not there any more", lost)
        return checkpoint
    if names:
        raise CorruptCheckpointError(f"none of the {len(names)} checkpoints of the run {run.key} can be restored")
    return None


def restore(run: TrainingRun, checkpoint: Checkpoint) -> None:
    """Bring the whole run to the state in a checkpoint.

    Raises CorruptCheckpointError when the learner cannot be brought to it.
    """
    learner = run.saver.learner_state(checkpoint)
    run.learner.load_state(learner.tensors, learner.counters)
    with run.recovery.timed("replay"):
        _replay(run, checkpoint, learner)
    run.recovery.steps = len(learner.records)
    run.restore(checkpoint)
    run.saver.resumed(checkpoint, learner, segment_sizes(run.storage, learner.records))


def _replay(run: TrainingRun, checkpoint: Checkpoint, learner: LearnerState) -> None:
    """Train again on what was trained on since the full checkpoint, and check what came out."""
    on_policy, smallest = run.config.rollout.max_lag == 0, run.credit.smallest_group
    try:
        for minibatches in replayed_minibatches(run.storage, learner.records, smallest):
            run.learner.take_step(minibatches, on_policy)
    except (FileNotFoundError, ValueError) as error:
        raise CorruptCheckpointError(f"checkpoint {checkpoint.name} cannot be repeated: {error}") from error
    if learner.digest is not None and state_digest(*run.learner.state()) != learner.digest:
        raise CorruptCheckpointError(
            f"checkpoint {checkpoint.name}: the {len(learner.records)} steps after {checkpoint.base} led to other "
            "weights when they were repeated here, as happens with another number of threads or another release of "
            "torch"
        )


def copy_source(source: RunFolder, config: GyreConfig, folder: RunFolder, step: int | None) -> None:
    """Give a new run the checkpoint of another one to begin from, with all that it refers to.

    That is the newest that is whole, or one after `step`. The policy that the source began with, and its metrics, come
    along. Raises ValueError when there is none.
    """
    before = source.config()
    store, target = open_checkpoints(before, source), checkpoint_storage(config, folder)
    for name in reversed(find_checkpoints(store, source.key, step)):
        try:
            manifest = store.manifest(name)
            for each in (manifest.base, name):
                if each is not None:
                    store.copy_to(each, target)
        except CorruptCheckpointError as error:
            logger.warning("skipping %s", error)
            continue
        copy_segments(run_storage(before, source), run_storage(config, folder), manifest.segments)
        for item in (START_POLICY, METRICS_FILE):
            _copy(source.path / item, folder.path / item)
        return
    raise ValueError(f"--resume.from {source.key}: the run has no whole checkpoint to begin from")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copyfile(source, target)
