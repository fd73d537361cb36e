"""The warm copy of the checkpoints: follows the primary store in the background, with a place of its own.

After each commit the follower brings the warm store to what the primary keeps: it copies what is missing, the newest
first, a full checkpoint before what builds on it, with the segments that they refer to and each checkpoint's manifest
last, and then drops what the primary has dropped. A checkpoint that the primary drops while it is copied is given up,
so a store that is slower than checkpoints come holds a part of them, the newest that it can. What fails is counted,
told once, and tried again after the next commit; training never waits for it. The place of the follower is the newest
checkpoint that the warm store holds whole.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import shutil
import threading
from collections.abc import Callable, Iterable
from functools import partial

from gyre_core.checkpoint.manifest import CheckpointManifest, checkpoint_order
from gyre_core.checkpoint.store import (
    FOLDER,
    MANIFEST,
    begun_checkpoints,
    delete_checkpoint,
    has_all_bytes,
    is_intact,
    whole_manifests,
)
from gyre_core.cluster.requests import POOL
from gyre_core.storage import Storage, unwatched

logger = logging.getLogger(__name__)


class WarmCopy:
    """Keeps `warm` like `primary`; segments come from `data`, the storage of the run's pool."""

    def __init__(self, primary: Storage, warm: Storage, data: Storage) -> None:
        self._primary = primary
        self._warm = warm
        self._data = data
        self._changed = threading.Condition()
        self._committed: tuple[int, int] = (0, 0)
        self._copied: tuple[int, int] = (0, 0)
        self._wanted = self._seen = 0
        self._closed = self._failing = False
        self._errors = 0
        self._thread: threading.Thread | None = None
        self.require_owned: Callable[[], None] = unwatched
        """Raises when another process owns the run by now, whose follower copies what this one would drop."""

    def committed(self, name: str) -> None:
        """Have the follower look, as the primary store has a new checkpoint."""
        with self._changed:
            self._committed = checkpoint_order(name)
        self.look()

    def look(self) -> None:
        """Have the follower look, as the primary store has changed."""
        if self._thread is None:
            # With the caller's context, by which Prefect knows whose log lines they are.
            follow = partial(contextvars.copy_context().run, self._follow)
            self._thread = threading.Thread(target=follow, name="warm-copy", daemon=True)
            self._thread.start()
        with self._changed:
            self._wanted += 1
            self._changed.notify_all()

    def metrics(self) -> dict[str, float]:
        """How many steps the warm store is behind the primary's newest checkpoint, and what failed so far."""
        with self._changed:
            behind = max(0, self._committed[1] - self._copied[1])
            return {"perf/warm_lag": float(behind), "perf/warm_errors": float(self._errors)}

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the follower has looked after the last commit; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._seen == self._wanted, timeout)

    def close(self, timeout: float) -> None:
        """Let the follower finish, for `timeout` seconds at the most, and end it."""
        if self._thread is None:
            return
        if not self.wait(timeout) or self._copied < self._committed:
            logger.warning("the run ends, and the warm store %s lacks its newest checkpoint", self._warm.url)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(1.0)

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._seen != self._wanted)
                if self._closed:
                    return
                wanted = self._wanted
            self._look()
            with self._changed:
                self._seen = wanted
                self._changed.notify_all()

    def _look(self) -> None:
        try:
            copied = copy_missing(self._primary, self._warm, self._data, self.require_owned)
            self._copied = max(self._copied, copied)
            self._failing = False
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on without the copy
            self._errors += 1
            if not self._failing:
                logger.warning("the warm store %s does not follow, and is tried again: %s", self._warm.url, error)
            self._failing = True


def copy_missing(
    primary: Storage, warm: Storage, data: Storage, require_owned: Callable[[], None] = unwatched
) -> tuple[int, int]:
    """Bring the warm store to what the primary holds; returns (epoch, step) of the newest checkpoint that both have.

    Raises OSError when either does not do as it should, and what `require_owned` raises, with nothing dropped. A
    checkpoint that is damaged in the primary is left alone.
    """
    manifests = {manifest.name: manifest for manifest in whole_manifests(primary)}
    there = {manifest.name for manifest in whole_manifests(warm)}
    for newest in reversed(manifests.values()):
        for manifest in (manifests.get(newest.base or ""), newest):
            if manifest and manifest.name not in there and _copy_checkpoint(primary, warm, data, manifest):
                there.add(manifest.name)
    if manifests:  # A primary that was lost takes nothing with it.
        _drop(warm, list(manifests.values()), require_owned)
    return max((checkpoint_order(name) for name in manifests if name in there), default=(0, 0))


def copy_segments(source: Storage, target: Storage, names: Iterable[str]) -> int:
    """Copy the segments that the target lacks and the source has; returns how many."""
    there, known = set(target.list(POOL)), set(source.list(POOL))
    missing = [name for name in names if name not in there and name in known]
    for name in missing:
        # One that was deleted meanwhile is needed by nobody any more.
        with contextlib.suppress(FileNotFoundError), source.local_file(name) as path:
            target.create_file(name, lambda copy, path=path: shutil.copyfile(path, copy))
    return len(missing)


def _copy_checkpoint(primary: Storage, warm: Storage, data: Storage, manifest: CheckpointManifest) -> bool:
    """Copy one; whether it is there now."""
    try:
        return _copy_objects(primary, warm, data, manifest)
    except FileNotFoundError:
        if primary.exists(f"{FOLDER}/{manifest.name}/{MANIFEST}"):
            raise
        # The primary dropped it meanwhile.
        delete_checkpoint(warm, manifest.name)
        return False


def _copy_objects(primary: Storage, warm: Storage, data: Storage, manifest: CheckpointManifest) -> bool:
    folder = f"{FOLDER}/{manifest.name}"
    if warm.exists(f"{folder}/{MANIFEST}") and has_all_bytes(warm, manifest):
        return True  # Another owner's follower has been here since the look.
    # Left by a copy that did not get to its end.
    delete_checkpoint(warm, manifest.name)
    copy_segments(data, warm, manifest.segments)
    for item, record in manifest.objects.items():
        with primary.local_file(f"{folder}/{item}") as path:
            if not is_intact(path, record):
                logger.warning("checkpoint %s is not copied: %s is damaged in %s", manifest.name, item, primary.url)
                return False
            warm.create_file(f"{folder}/{item}", lambda target, path=path: shutil.copyfile(path, target))
    warm.create(f"{folder}/{MANIFEST}", manifest.to_json())
    return has_all_bytes(warm, manifest)


def _drop(warm: Storage, manifests: list[CheckpointManifest], require_owned: Callable[[], None]) -> None:
    """Remove what the primary no longer holds from the warm store, what is newer than all of that excepted."""
    kept, newest = {manifest.name for manifest in manifests}, checkpoint_order(manifests[-1].name)
    dropped = [name for name in begun_checkpoints(warm) if name not in kept and checkpoint_order(name) < newest]
    segments = warm.list(POOL)
    needed = {name for manifest in whole_manifests(warm) if manifest.name not in dropped for name in manifest.segments}
    # In this order: what another owner copies after this check is in none of these lists.
    require_owned()
    for name in dropped:
        delete_checkpoint(warm, name)
    for name in segments:
        if name not in needed:
            warm.delete(name)
