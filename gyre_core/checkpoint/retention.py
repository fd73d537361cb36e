"""Which checkpoints stay; pure.

The law: the newest `keep` stay, so that a damaged one never leaves a run without. Of the others stay the `keep_best`
with the highest score, and every full one whose step is a multiple of `keep_every`; both count full ones of the run's
own line only, not those of a branch that was given up: one whose step a later epoch has come back to. Whatever stays
keeps the full checkpoint that it builds on. Newer is: of a later epoch, then of a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gyre_core.checkpoint.manifest import CheckpointManifest, checkpoint_order


@dataclass(frozen=True, slots=True)
class Retention:
    """How many checkpoints are kept, and why; 0 for `keep_best` or `keep_every` keeps none for that reason."""

    keep: int
    keep_best: int = 0
    keep_every: int = 0

    def recent(self, manifests: Sequence[CheckpointManifest]) -> set[str]:
        """The names of the newest `keep` and of what they build on."""
        return _with_bases(self._newest(manifests))

    def oldest(self, manifests: Sequence[CheckpointManifest]) -> tuple[int, int]:
        """The order of the oldest of the newest `keep`."""
        return min(map(_order, self._newest(manifests)), default=(0, 0))

    def kept(self, manifests: Sequence[CheckpointManifest]) -> set[str]:
        """The names of all that stay."""
        lasting = [manifest for manifest in manifests if manifest.base is None and not _given_up(manifest, manifests)]
        scored = [manifest for manifest in lasting if manifest.score is not None]
        best = sorted(scored, key=lambda manifest: (manifest.score or 0.0, *_order(manifest)))
        spaced = [manifest for manifest in lasting if self.keep_every and manifest.step % self.keep_every == 0]
        chosen = [*(best[-self.keep_best :] if self.keep_best else []), *spaced]
        return self.recent(manifests) | {manifest.name for manifest in chosen}

    def _newest(self, manifests: Sequence[CheckpointManifest]) -> list[CheckpointManifest]:
        return sorted(manifests, key=_order)[-self.keep :]


def _order(manifest: CheckpointManifest) -> tuple[int, int]:
    return checkpoint_order(manifest.name)


def _with_bases(manifests: Sequence[CheckpointManifest]) -> set[str]:
    names = {manifest.name for manifest in manifests}
    return names | {manifest.base for manifest in manifests if manifest.base is not None}


def _given_up(manifest: CheckpointManifest, manifests: Sequence[CheckpointManifest]) -> bool:
    return any(other.epoch > manifest.epoch and other.step <= manifest.step for other in manifests)
