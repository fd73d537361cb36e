"""What a checkpoint consists of: its objects with their digests, written last."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

FORMAT = 4


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """One object of a checkpoint: its bytes and xxh3-128 digest."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What is known of a checkpoint without its objects: it is the state after `step` RL steps, written in `epoch`.

    `base` is the name of the full checkpoint that an increment builds on, None for a full one. `segments` are the
    objects of the experience pool that it refers to, and `pinned_bytes` the bytes of those that an increment makes the
    learner's state of; all stay while the run may go on from it. `score` is the held-out reward of the policy
    after step `scored_step`, in the first checkpoint after its evaluation.
    """

    step: int
    epoch: int
    base: str | None = None
    segments: tuple[str, ...] = ()
    pinned_bytes: int = 0
    score: float | None = None
    scored_step: int | None = None

    @property
    def name(self) -> str:
        """Its folder below `checkpoints/`."""
        return checkpoint_name(self.step, self.epoch)

    def facts(self) -> dict[str, Any]:
        """These facts, to make another object of that has them."""
        return {field.name: getattr(self, field.name) for field in fields(CheckpointFacts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest(CheckpointFacts):
    """A complete checkpoint, by its objects.

    `created_at` is seconds since 1970, for people to read; nothing is ordered by it.
    """

    objects: Mapping[str, ObjectRecord]
    created_at: float

    @property
    def size(self) -> int:
        """Bytes of its objects."""
        return sum(record.size for record in self.objects.values())

    def to_json(self) -> bytes:
        """The manifest as stored."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> CheckpointManifest:
        """Read `to_json`; raises ValueError for anything else."""
        try:
            values = json.loads(data)
            if values.pop("format") != FORMAT:
                raise ValueError("written by another release of Gyre")
            objects = {name: ObjectRecord(**record) for name, record in values.pop("objects").items()}
            return cls(objects=objects, segments=tuple(values.pop("segments")), **values)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a checkpoint manifest: {error}") from error


def checkpoint_name(step: int, epoch: int) -> str:
    """The folder of a checkpoint below `checkpoints/`."""
    return f"{step:08d}-{epoch:04d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder's name is that of a checkpoint."""
    return re.fullmatch(r"\d{8,}-\d{4,}", name) is not None


def checkpoint_order(name: str) -> tuple[int, int]:
    """What names are ordered by, oldest first: whoever takes over may go back, so the epoch decides before the step."""
    step, _, epoch = name.partition("-")
    return int(epoch), int(step)
