"""Segments are published once, read whole or refused, and put aside or deleted without a trace of doubt."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from experience_samples import plain, random_groups

from gyre_core.experience.schema import SEGMENT_FORMAT, groups_to_table
from gyre_core.experience.segments import (
    CorruptSegmentError,
    delete_segment,
    open_requests,
    prune_tombstones,
    quarantine,
    read_segment,
    segment_exists,
    segment_ids,
    write_segment,
)
from gyre_core.experience.tables import TableFormat, encode_table
from gyre_core.storage import open_storage

REQUEST = "00000003-0001"
NAME = f"pool/{REQUEST}.parquet"


@pytest.fixture
def storage(tmp_path):
    return open_storage(tmp_path)


@pytest.fixture
def groups():
    return random_groups(np.random.default_rng(7), 12)


def test_round_trip(storage, groups):
    written = write_segment(storage, REQUEST, groups)
    assert written.size == storage.size(NAME)
    assert plain(read_segment(storage, REQUEST)) == plain(groups)
    assert segment_ids(storage) == [REQUEST]
    assert segment_exists(storage, REQUEST)


def test_what_this_process_wrote_is_not_decoded_and_still_verified(storage, groups):
    """The file is the truth: the groups in memory stand for these very bytes and no others."""
    committed = write_segment(storage, REQUEST, groups)
    assert read_segment(storage, REQUEST, committed) is committed.groups
    storage.replace(NAME, storage.read(NAME)[:-1])
    with pytest.raises(CorruptSegmentError):
        read_segment(storage, REQUEST, committed)
    storage.delete(NAME)
    with pytest.raises(FileNotFoundError):
        read_segment(storage, REQUEST, committed)
    write_segment(storage, REQUEST, groups[:3])
    assert plain(read_segment(storage, REQUEST, committed)) == plain(groups[:3])


def test_an_empty_segment_is_a_segment(storage):
    write_segment(storage, REQUEST, [])
    assert read_segment(storage, REQUEST) == ()


def test_the_second_writer_loses_and_the_same_content_is_ones_own_repeated_write(storage, groups):
    write_segment(storage, REQUEST, groups)
    write_segment(storage, REQUEST, groups)
    with pytest.raises(FileExistsError):
        write_segment(storage, REQUEST, groups[1:])
    assert plain(read_segment(storage, REQUEST)) == plain(groups)


def test_parquet_is_zstd_without_dictionary(storage, groups):
    write_segment(storage, REQUEST, groups)
    with storage.local_file(NAME) as path, pq.ParquetFile(path) as file:
        chunk = file.metadata.row_group(0).column(0)
        assert chunk.compression == "ZSTD"
        assert not chunk.has_dictionary_page


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.99])
def test_a_cut_file_is_refused(storage, groups, share):
    write_segment(storage, REQUEST, groups)
    data = storage.read(NAME)
    storage.replace(NAME, data[: int(share * len(data))])
    with pytest.raises(CorruptSegmentError, match=f"{NAME} cannot be used"):
        read_segment(storage, REQUEST)


def test_no_flipped_bit_ever_changes_what_is_read(storage, groups):
    write_segment(storage, REQUEST, groups)
    data, expected = storage.read(NAME), plain(groups)
    rng = np.random.default_rng(11)
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        storage.replace(NAME, bytes(damaged))
        try:
            assert plain(read_segment(storage, REQUEST)) == expected
        except CorruptSegmentError:
            refused += 1
    assert refused > 200  # What is left hits bytes of the footer that carry nothing.


def test_a_foreign_segment_is_refused(storage, groups):
    write_segment(storage, "00000009-0000", groups)
    storage.create(NAME, storage.read("pool/00000009-0000.parquet"))
    with pytest.raises(CorruptSegmentError, match="belongs to request 00000009-0000"):
        read_segment(storage, REQUEST)


def test_another_format_or_schema_is_refused_by_name(storage, groups):
    newer = TableFormat("segment/2", SEGMENT_FORMAT.schema)
    storage.create(NAME, encode_table(groups_to_table(REQUEST, groups), newer, {"request_id": REQUEST}))
    with pytest.raises(CorruptSegmentError, match="format is 'segment/2', and this version reads 'segment/1'"):
        read_segment(storage, REQUEST)
    other = TableFormat("segment/1", pa.schema([("x", pa.int32())]))
    storage.replace(NAME, encode_table(pa.table({"x": pa.array([1], pa.int32())}), other, {"request_id": REQUEST}))
    with pytest.raises(CorruptSegmentError, match="its columns are not those"):
        read_segment(storage, REQUEST)


def test_plain_parquet_and_other_bytes_are_refused(storage, tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "plain.parquet")
    for content in ((tmp_path / "plain.parquet").read_bytes(), b"PAR1", b"not parquet at all"):
        storage.replace(NAME, content)
        with pytest.raises(CorruptSegmentError):
            read_segment(storage, REQUEST)


def test_a_missing_segment_is_not_a_corrupt_one(storage):
    with pytest.raises(FileNotFoundError):
        read_segment(storage, REQUEST)


def test_only_committed_names_are_listed(storage, groups):
    write_segment(storage, REQUEST, groups)
    with storage.local_file(NAME) as path:
        (path.parent / f".{path.name}.abc.tmp").write_bytes(b"half")
    assert segment_ids(storage) == [REQUEST]


def test_quarantine_keeps_the_evidence_and_makes_room(storage, groups):
    storage.create(NAME, b"rubbish")
    with pytest.raises(CorruptSegmentError) as caught:
        read_segment(storage, REQUEST)
    quarantine(storage, caught.value.name, caught.value.reason)
    assert storage.read(f"quarantine/{REQUEST}.parquet") == b"rubbish"
    assert json.loads(storage.read(f"quarantine/{REQUEST}.json")) == {"object": NAME, "reason": caught.value.reason}
    assert segment_ids(storage) == []
    assert not segment_exists(storage, REQUEST)
    write_segment(storage, REQUEST, groups)
    assert segment_ids(storage) == [REQUEST]
    assert plain(read_segment(storage, REQUEST)) == plain(groups)


def test_an_owner_frozen_in_quarantine_cannot_hit_the_successor(storage, groups):
    storage.create(NAME, b"rubbish")
    quarantine(storage, NAME, "damaged")
    write_segment(storage, REQUEST, groups)
    quarantine(storage, NAME, "found damaged earlier, by an owner that was frozen since")
    assert plain(read_segment(storage, REQUEST)) == plain(groups)


def test_a_second_damaged_segment_is_put_aside_beside_the_first(storage, groups):
    storage.create(NAME, b"rubbish")
    quarantine(storage, NAME, "damaged")
    write_segment(storage, REQUEST, groups)
    second = f"pool/{REQUEST}.1.parquet"
    storage.replace(second, b"worse")
    quarantine(storage, second, "damaged as well")
    write_segment(storage, REQUEST, groups[:3])
    assert plain(read_segment(storage, REQUEST)) == plain(groups[:3])
    assert len(storage.list("quarantine")) == 4


def test_a_deleted_segment_stays_deleted(storage, groups):
    write_segment(storage, REQUEST, groups)
    delete_segment(storage, REQUEST)
    delete_segment(storage, REQUEST)
    assert segment_ids(storage) == []
    with pytest.raises(FileExistsError, match="used and deleted"):
        write_segment(storage, REQUEST, groups)


def test_tombstones_go_once_their_step_is_closed(storage):
    for request_id in ("00000003-0001", "00000004-0000"):
        delete_segment(storage, request_id)
    prune_tombstones(storage, before_step=4)
    assert storage.list("tombstones") == ["tombstones/00000004-0000"]


def test_a_request_is_open_until_it_is_answered(storage, groups):
    for request_id in ("00000001-0000", "00000001-0001", REQUEST):
        for attempt in (1, 2):
            storage.create(f"requests/{request_id}.{attempt}", b"")
    delete_segment(storage, "00000001-0000")
    write_segment(storage, REQUEST, groups)
    assert open_requests(storage) == {"00000001-0001": 2}
    quarantine(storage, NAME, "damaged")
    assert open_requests(storage) == {"00000001-0001": 2, REQUEST: 2}
