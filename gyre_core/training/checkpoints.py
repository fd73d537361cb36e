"""A run's checkpoints as its configuration wants them: where they lie, how they are written, what `gyre checkpoints`
says of them."""

from __future__ import annotations

import logging
import time

from gyre_core.checkpoint.manifest import CheckpointManifest, checkpoint_order
from gyre_core.checkpoint.retention import Retention
from gyre_core.checkpoint.store import CheckpointStore, CorruptCheckpointError
from gyre_core.checkpoint.warm import WarmCopy
from gyre_core.cluster.requests import POOL
from gyre_core.config import GyreConfig
from gyre_core.learner.local import LocalLearner
from gyre_core.learner.repeatability import repeats
from gyre_core.policy.models import Policy
from gyre_core.training.forecast import bytes_text
from gyre_core.training.lineage import on_lineage
from gyre_core.training.run_folder import RunFolder, checkpoint_storage, run_storage, warm_storage
from gyre_core.training.saver import Exact, Saver

logger = logging.getLogger(__name__)


def open_checkpoints(config: GyreConfig, folder: RunFolder) -> CheckpointStore:
    """The run's checkpoints, in both stores where there are two."""
    checkpoint = config.checkpoint
    retention = Retention(checkpoint.keep, checkpoint.keep_best, checkpoint.keep_every)
    return CheckpointStore(checkpoint_storage(config, folder), retention, warm_storage(config, folder))


def make_saver(config: GyreConfig, folder: RunFolder, learner: LocalLearner, policy: Policy) -> Saver:
    """What writes the run's checkpoints, with the warm copy that follows them.

    Raises ValueError when `checkpoint.exact` asks for what does not hold here.
    """
    warm = warm_storage(config, folder)
    data, checkpoints = run_storage(config, folder), checkpoint_storage(config, folder)
    return Saver(
        config.checkpoint,
        open_checkpoints(config, folder),
        config.experiment.steps,
        _choose_exact(config, learner, policy),
        WarmCopy(checkpoints, warm, data) if warm is not None else None,
    )


def _choose_exact(config: GyreConfig, learner: LocalLearner, policy: Policy) -> Exact:
    """How increments hold the learner, by a test of whether its updates repeat."""
    wanted = config.checkpoint.exact
    if not config.checkpoint.incremental or wanted == "always":
        return "always"
    if wanted == "auto" and policy.model.device.type != "cpu":
        return "always"
    started = time.monotonic()
    repeat = repeats(learner, policy.model.config.get_text_config().vocab_size, config.learning.lr)
    logger.info(
        "increments of checkpoints are %s: an update taken twice %s (%.1f s)",
        "repeated" if repeat else "differences",
        "came out alike" if repeat else "did not come out alike",
        time.monotonic() - started,
    )
    if wanted == "replay" and not repeat:
        raise ValueError(
            "checkpoint.exact: replay needs updates that repeat bit for bit, and on this machine two of the same did "
            "not; set it to always, or to auto"
        )
    return "replay" if repeat else "always"


def describe_checkpoints(run: str, output: str) -> tuple[str, bool]:
    """A line for each checkpoint of a run, every object of it verified in every store, and where `--resume` goes on.

    Returns the text, and whether there is a checkpoint to go on from. Raises ValueError for an unknown run.
    """
    folder = RunFolder.find(run, output)
    config = folder.config()
    store, data = open_checkpoints(config, folder), run_storage(config, folder)
    names, segments = store.names(), frozenset(data.list(POOL))
    if not names:
        return f"the run {folder.key} has no checkpoint, and --resume starts it again at its first step", False
    lines = [line for name in names for line in _describe(store, name, segments)]
    newest = next((name for name in reversed(on_lineage(data, names)) if _can_restore(store, name)), None)
    if newest is None:
        return "\n".join([*lines, "none of them can be restored"]), False
    return "\n".join([*lines, f"--resume goes on from step {checkpoint_order(newest)[1]}"]), True


def _can_restore(store: CheckpointStore, name: str) -> bool:
    if not store.is_whole(name):
        return False
    base = store.manifest(name).base
    return base is None or store.is_whole(base)


def _describe(store: CheckpointStore, name: str, segments: frozenset[str]) -> list[str]:
    try:
        manifest = store.manifest(name)
    except CorruptCheckpointError as error:
        return [str(error)]
    lines = [f"step {manifest.step}, epoch {manifest.epoch}: {_kind(manifest)}, {_facts(manifest)}"]
    for url, problems in store.problems(name).items():
        lines.append(f"    {'; '.join(problems) or 'whole'} in {url}")
    if gone := set(manifest.segments) - segments:
        lines.append(f"    {len(gone)} of its {len(manifest.segments)} segments are not in the pool any more")
    return lines


def _kind(manifest: CheckpointManifest) -> str:
    return "full" if manifest.base is None else f"increment on {manifest.base}"


def _facts(manifest: CheckpointManifest) -> str:
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created_at))
    parts = [bytes_text(manifest.size)]
    if manifest.base is not None and manifest.pinned_bytes:
        parts.append(f"{bytes_text(manifest.pinned_bytes)} of pinned segments")
    if manifest.score is not None:
        parts.append(f"held-out reward {manifest.score:.4f} after step {manifest.scored_step}")
    return ", ".join([*parts, f"written {written}"])
