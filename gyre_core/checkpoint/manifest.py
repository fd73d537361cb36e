"""What a checkpoint consists of: its objects with their digests, written last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

FORMAT = 3


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """One object of a checkpoint: its bytes and xxh3-128 digest."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """A complete checkpoint: the state after `step` RL steps, written in `epoch`.

    `created_at` is seconds since 1970, for people to read; nothing is ordered by it.
    """

    step: int
    epoch: int
    objects: Mapping[str, ObjectRecord]
    created_at: float

    def to_json(self) -> bytes:
        """The manifest as stored."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> CheckpointManifest:
        """Read `to_json`; raises ValueError for anything else."""
        try:
            fields = json.loads(data)
            if fields.pop("format") != FORMAT:
                raise ValueError("written by another release of Gyre")
            objects = {name: ObjectRecord(**record) for name, record in fields.pop("objects").items()}
            return cls(objects=objects, **fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a checkpoint manifest: {error}") from error
