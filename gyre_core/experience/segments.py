"""Segments: the immutable Parquet files that hold what one request produced.

A segment is published once, whole, under its request's name. One that turns out to be of no use is put aside by
`quarantine`, and the next one for the same request gets a new name: a name is never used twice, so that whoever was
frozen in the middle of putting the first one aside cannot hit its successor.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from xxhash import xxh3_128_hexdigest

from gyre_core.cluster.requests import POOL, announced, latest_attempt, request_step
from gyre_core.experience.schema import SEGMENT_FORMAT, groups_to_table, table_to_groups
from gyre_core.experience.tables import CorruptObjectError, decode_table, encode_table
from gyre_core.storage import Storage
from gyre_core.types import RolloutGroup


class CorruptSegmentError(CorruptObjectError):
    """A segment is damaged, of another format, or another request's."""


ABANDONED_BRANCH = "made on an abandoned branch"
"""Why a segment is put aside whose policy version another owner of the run had published."""


@dataclass(frozen=True, slots=True)
class CommittedSegment:
    """A segment that this process wrote: what it says, so that it need not be decoded here, and what it is.

    `size` is in bytes, `digest` their xxh3-128.
    """

    groups: tuple[RolloutGroup, ...]
    size: int
    digest: str


def write_segment(storage: Storage, request_id: str, groups: Sequence[RolloutGroup]) -> CommittedSegment:
    """Publish the request's segment.

    Raises FileExistsError when somebody has committed other groups for this request, or the owner is done with it.
    """
    if storage.exists(_tombstone(request_id)):
        raise FileExistsError(f"request {request_id} was committed, used and deleted")
    data = encode_table(groups_to_table(request_id, groups), SEGMENT_FORMAT, {"request_id": request_id})
    storage.create(segment_name(storage, request_id), data)
    return CommittedSegment(tuple(groups), len(data), xxh3_128_hexdigest(data))


def read_segment(
    storage: Storage, request_id: str, committed: CommittedSegment | None = None
) -> tuple[RolloutGroup, ...]:
    """The groups of the request's segment, every checksum verified.

    One that holds the very bytes that this process `committed` is not decoded. Raises FileNotFoundError when there is
    no segment, and CorruptSegmentError, which names the file and the reason, when there is a damaged or foreign one.
    """
    name = segment_name(storage, request_id)
    data = storage.read(name)
    if committed is not None and xxh3_128_hexdigest(data) == committed.digest:
        return committed.groups
    try:
        table, facts = decode_table(data, SEGMENT_FORMAT, name)
    except CorruptObjectError as error:
        raise CorruptSegmentError(name, error.reason) from error
    found = {facts.get("request_id"), *table["request_id"].unique().to_pylist()}
    if found != {request_id} and not (table.num_rows == 0 and facts.get("request_id") == request_id):
        raise CorruptSegmentError(name, f"it belongs to request {', '.join(map(str, found - {request_id}))}")
    try:
        return tuple(table_to_groups(table))
    except ValueError as error:
        raise CorruptSegmentError(name, str(error)) from error


def segment_ids(storage: Storage) -> list[str]:
    """The requests that have a segment, sorted; damaged ones that were put aside do not count."""
    aside = set(storage.list("quarantine"))
    stems = map(_stem, storage.list(POOL))
    return sorted({stem.partition(".")[0] for stem in stems if f"quarantine/{stem}.json" not in aside})


def segment_exists(storage: Storage, request_id: str) -> bool:
    """Whether the request was answered: its segment is there and was not put aside."""
    return storage.exists(segment_name(storage, request_id))


def open_attempt(storage: Storage, request_id: str) -> int | None:
    """The newest attempt of a request that was not answered yet; None for one that was."""
    return None if segment_exists(storage, request_id) else latest_attempt(storage, request_id)


def open_requests(storage: Storage) -> dict[str, int]:
    """The requests that still want a segment, in the order of ids, each with its newest attempt."""
    done = {*segment_ids(storage), *(name.removeprefix("tombstones/") for name in storage.list("tombstones"))}
    return {request_id: attempt for request_id, attempt in announced(storage).items() if request_id not in done}


def segment_name(storage: Storage, request_id: str) -> str:
    """Where the request's segment is, or would be written: behind every quarantined one follows a new name."""
    return _segment_name(request_id, storage.exists)


def segment_names(storage: Storage, request_ids: Iterable[str]) -> list[str]:
    """`segment_name` of many requests, by one listing."""
    aside = set(storage.list("quarantine"))
    return [_segment_name(request_id, aside.__contains__) for request_id in request_ids]


def quarantine(storage: Storage, name: str, reason: str) -> None:
    """Move the object `name` of `pool/`, damaged or made on an abandoned branch, to `quarantine/`, beside the reason.

    May be repeated after a crash at any point. From the JSON with the reason on, the request counts as not committed.
    """
    stem = _stem(name)
    with contextlib.suppress(FileNotFoundError):  # An earlier call got as far as the delete.
        storage.create(f"quarantine/{stem}.parquet", storage.read(name))
    with contextlib.suppress(FileExistsError):  # Another owner put it aside, and said so in other words.
        storage.create(f"quarantine/{stem}.json", json.dumps({"object": name, "reason": reason}).encode())
    storage.delete(name)


def delete_segment(storage: Storage, request_id: str) -> None:
    """Remove a segment that nothing refers to any more; may be repeated after a crash.

    The tombstone comes first, so that a missing segment with one was deleted, and a writer that comes late gives up.
    """
    storage.create(_tombstone(request_id), b"")
    storage.delete(segment_name(storage, request_id))


def drop_tombstones(storage: Storage, settled: Callable[[str], bool]) -> None:
    """Let requests be answered anew that are not settled for an owner that went back to an earlier state."""
    for name in storage.list("tombstones"):
        if not settled(name.removeprefix("tombstones/")):
            storage.delete(name)


def prune_tombstones(storage: Storage, before_step: int) -> None:
    """Forget the deleted segments of steps that the admission ledger has closed for good."""
    for name in storage.list("tombstones"):
        if request_step(name.removeprefix("tombstones/")) < before_step:
            storage.delete(name)


def _segment_name(request_id: str, exists: Callable[[str], bool]) -> str:
    name, generation = request_id, 0
    while exists(f"quarantine/{name}.json"):
        generation += 1
        name = f"{request_id}.{generation}"
    return f"{POOL}/{name}.parquet"


def _stem(name: str) -> str:
    return name.removeprefix(f"{POOL}/").removesuffix(".parquet")


def _tombstone(request_id: str) -> str:
    return f"tombstones/{request_id}"
