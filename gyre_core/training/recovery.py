"""From which checkpoint a run goes on, and how it gets there; and how a run begins from another run's checkpoint."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gyre_core.checkpoint.manifest import CheckpointManifest, checkpoint_order
from gyre_core.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    CorruptCheckpointError,
    committed_checkpoints,
    whole_manifests,
)
from gyre_core.checkpoint.warm import copy_segments
from gyre_core.cluster.epochs import current_epoch, require_current
from gyre_core.config import GyreConfig
from gyre_core.experience.replay import replayed_minibatches, segment_sizes
from gyre_core.learner.local import LocalLearner
from gyre_core.learner.repeatability import state_digest
from gyre_core.monitor.metrics import MetricsWriter, read_metrics
from gyre_core.rollout.shared import START_POLICY
from gyre_core.storage import Storage
from gyre_core.training.checkpoints import open_checkpoints
from gyre_core.training.lineage import on_lineage
from gyre_core.training.recovery_report import PREFIX
from gyre_core.training.resume import check_fingerprint
from gyre_core.training.run import TrainingRun
from gyre_core.training.run_folder import RunFolder, RunFolderError, checkpoint_storage, run_storage, warm_storage
from gyre_core.training.saver import LearnerState

logger = logging.getLogger(__name__)

TELLING_SECONDS = 10.0
"""Between two words on how far the repetition of steps is."""


def find_checkpoints(store: CheckpointStore, data: Storage, key: str, step: int | None) -> list[str]:
    """The names of the checkpoints that a run may go on from, the best last; `step` wants one after that step.

    `data` is the run's storage. Raises ValueError that lists the steps there are when none is of that step.
    """
    names = on_lineage(data, store.names())
    if step is None:
        return names
    found = [name for name in names if checkpoint_order(name)[1] == step]
    if not found:
        there = ", ".join(map(str, sorted({checkpoint_order(name)[1] for name in names}))) or "none"
        raise ValueError(f"--resume.step {step}: the run {key} has no checkpoint after that step; it has: {there}")
    return found


@dataclass(frozen=True, slots=True)
class Repeater:
    """What takes steps again that led from a full checkpoint to an increment: a learner, and how they were taken."""

    learner: LocalLearner
    on_policy: bool
    smallest_group: int


def recover(run: TrainingRun, names: Sequence[str], source: Callable[[], Repeater] | None = None) -> Checkpoint | None:
    """Bring the run to the last of these checkpoints that can be restored; None when there are none.

    `source` makes the repeater of the run that a fork begins from. A segment that the pool has lost comes back from the
    warm store. Raises ValueError when none of the checkpoints can be restored, and for one of a run with other
    contents, of which a fork may change more.
    """
    store, warm = run.saver.store, warm_storage(run.config, run.folder)
    reason: CorruptCheckpointError | None = None
    for name in reversed(names):
        try:
            with run.recovery.timed("restore"):
                checkpoint = store.load(name)
                check_fingerprint(checkpoint.state["fingerprint"], run.fingerprint, forked=source is not None)
                if warm is not None and (restored := copy_segments(warm, run.storage, checkpoint.segments)):
                    logger.warning("%d segments that the pool has lost came back from %s", restored, warm.url)
                restore(run, checkpoint, source)
        except CorruptCheckpointError as error:
            logger.warning("skipping %s", error)
            reason = error
            continue
        if lost := run.pool.drop_missing():
            logger.warning("%d groups of the pool are not trained on, as their segments are not there any more", lost)
        logger.info("%s goes on from the checkpoint after step %d", run.key, checkpoint.step)
        return checkpoint
    if reason is None:
        return None
    raise ValueError(
        f"of {len(names)} checkpoints that the run {run.key} may go on from none can be restored: {reason}; `gyre "
        "checkpoints` shows which are whole, and --resume.step takes another one, best a full one"
    )


def restore(run: TrainingRun, checkpoint: Checkpoint, source: Callable[[], Repeater] | None) -> None:
    """Bring the whole run to the state in a checkpoint.

    Raises CorruptCheckpointError when the learner cannot be brought to it.
    """
    learner = run.saver.learner_state(checkpoint)
    repeater = Repeater(run.learner, run.config.rollout.max_lag == 0, run.credit.smallest_group)
    if source is not None and learner.records:
        repeater = source()
    repeater.learner.load_state(learner.tensors, learner.counters)
    with run.recovery.timed("replay"):
        _repeat(run, checkpoint, learner, repeater)
    if repeater.learner is not run.learner:
        run.learner.load_state(*repeater.learner.state())
    run.recovery.steps = len(learner.records)
    run.restore(checkpoint)
    if source is None:
        run.saver.resumed(checkpoint, learner, segment_sizes(run.storage, learner.records))


def _repeat(run: TrainingRun, checkpoint: Checkpoint, learner: LearnerState, repeater: Repeater) -> None:
    """Train again on what was trained on since the full checkpoint, and check what came out."""
    count, told_at = len(learner.records), time.monotonic()
    if count:
        logger.info("repeating %d steps from the full checkpoint %s", count, checkpoint.base)
    try:
        steps = replayed_minibatches(run.storage, learner.records, repeater.smallest_group)
        for number, minibatches in enumerate(steps, 1):
            run.folder.require_owned()
            repeater.learner.take_step(minibatches, repeater.on_policy)
            if time.monotonic() - told_at > TELLING_SECONDS:
                logger.info("repeated %d of %d steps", number, count)
                told_at = time.monotonic()
    except RunFolderError:
        raise
    except (FileNotFoundError, ValueError) as error:
        raise CorruptCheckpointError(f"checkpoint {checkpoint.name} cannot be repeated: {error}") from error
    if learner.digest is not None and state_digest(*repeater.learner.state()) != learner.digest:
        raise CorruptCheckpointError(
            f"checkpoint {checkpoint.name}: the {len(learner.records)} steps after {checkpoint.base} led to other "
            "weights when they were repeated here, as happens with another number of threads (experiment.threads) or "
            "another release of torch"
        )


def refuse_taken(config: GyreConfig, folder: RunFolder, source: RunFolder | None) -> None:
    """Raise ValueError when a storage outside of a new run's folder holds something of another run of its name.

    What an earlier try has copied from `source`, which the run begins from, is no such thing. Raises SupersededError
    when another process has taken over this very run.
    """
    storage, warm = run_storage(config, folder), warm_storage(config, folder)
    if not config.storage.url or folder.summary():
        require_current(storage, 0)
    if current_epoch(storage):
        raise ValueError(
            f"storage.url: {storage.url} holds a run {folder.key} already; choose another --run-id, or go on with "
            "that run by --resume where its run folder is"
        )
    copies = whole_manifests(checkpoint_storage(source.config(), source)) if source is not None else []
    _refuse_checkpoints(checkpoint_storage(config, folder), folder, copies)
    if warm is not None:
        try:
            _refuse_checkpoints(warm, folder, copies)
        except OSError as error:  # Training goes on without a warm store.
            logger.warning("the warm store %s cannot be listed: %s", warm.url, error)


def _refuse_checkpoints(store: Storage, folder: RunFolder, copies: Sequence[CheckpointManifest]) -> None:
    copied = {manifest.name for manifest in whole_manifests(store) if manifest in copies}
    if not copied.issuperset(committed_checkpoints(store)):
        raise ValueError(
            f"{store.url} holds checkpoints of another run {folder.key}; choose another --run-id, or remove them"
        )


def copy_source(source: RunFolder, config: GyreConfig, folder: RunFolder, step: int | None) -> None:
    """Give a new run the checkpoint of another one to begin from, with all that it refers to.

    That is the newest that is whole, or one after `step`. The policy that the source began with, and its metrics, come
    along. Raises ValueError when there is none.
    """
    before = source.config()
    store, target = open_checkpoints(before, source), checkpoint_storage(config, folder)
    for name in reversed(find_checkpoints(store, run_storage(before, source), source.key, step)):
        try:
            manifest = store.manifest(name)
            for each in (manifest.base, name):
                if each is not None:
                    store.copy_to(each, target)
        except CorruptCheckpointError as error:
            logger.warning("skipping %s", error)
            continue
        copy_segments(run_storage(before, source), run_storage(config, folder), manifest.segments)
        if (source.path / START_POLICY).is_dir():
            shutil.copytree(source.path / START_POLICY, folder.path / START_POLICY)
        _copy_metrics(source.path, folder.path)
        return
    raise ValueError(f"--resume.from {source.key}: the run has no whole checkpoint to begin from")


def _copy_metrics(source: Path, target: Path) -> None:
    """Copy what was logged, but for the recoveries of the other run."""
    with closing(MetricsWriter(target, tensorboard=False)) as writer:
        for row in read_metrics(source):
            metrics = {name: value for name, value in row.metrics.items() if not name.startswith(PREFIX)}
            writer.write(row.step, metrics, row.time)
