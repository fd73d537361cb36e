"""Segments on S3: whoever lists sees what was committed, and damaged ones are put aside while the pool goes on."""

import pytest
from experience_samples import grpo, make_group

from gyre_core.config.sections import ExperienceConfig
from gyre_core.experience.pool import Pool
from gyre_core.experience.segments import segment_ids, write_segment

FIRST, SECOND, THIRD = "00000001-0000", "00000001-0001", "00000001-0002"


@pytest.fixture(params=["moto", "seaweedfs"])
def storages(request):
    """The same storage as two processes have it."""
    server = request.getfixturevalue(request.param)
    url = server.url
    return server.storage(url), server.storage(url)


def groups(name):
    return [make_group(name, [0.0, 1.0], step=1)]


def admit(pool, request_id):
    return pool.admit(request_id, 1, grpo, 0.0, skip_dead_groups=True)


def test_a_segment_of_another_process_is_listed_at_once_and_what_was_not_committed_never(storages):
    owner, worker = storages
    assert segment_ids(owner) == []
    write_segment(worker, FIRST, groups("a"))
    assert segment_ids(owner) == [FIRST]
    client, place = worker._client, {"Bucket": worker.bucket}
    for name in (f"pool/.{SECOND}.parquet.tmp", "pool/"):
        client.call("put_object", {**place, "Key": f"{worker.folder}/{name}", "Body": b"half"})
    client.call("create_multipart_upload", {**place, "Key": f"{worker.folder}/pool/{THIRD}.parquet"})
    assert segment_ids(owner) == [FIRST]
    assert owner.list("pool") == [f"pool/{FIRST}.parquet"]


def test_empty_and_cut_segments_are_put_aside_named_and_counted_while_the_pool_goes_on(storages):
    owner, worker = storages
    pool = Pool(owner, ExperienceConfig(), epoch=1)
    write_segment(worker, FIRST, groups("a"))
    write_segment(worker, SECOND, groups("b"))
    whole = worker.read(f"pool/{SECOND}.parquet")
    worker.replace(f"pool/{SECOND}.parquet", whole[: len(whole) // 2])
    worker.create(f"pool/{THIRD}.parquet", b"")
    admissions = {name: admit(pool, name) for name in (FIRST, SECOND, THIRD)}
    assert {name: admission.outcome for name, admission in admissions.items()} == {
        FIRST: "admitted",
        SECOND: "corrupt",
        THIRD: "corrupt",
    }
    for name in (SECOND, THIRD):
        assert f"pool/{name}.parquet" in admissions[name].reason
        assert owner.exists(f"quarantine/{name}.json")
    assert pool.metrics(0.0)["experience/quarantined"] == 2
    write_segment(worker, SECOND, groups("b"))
    assert admit(pool, SECOND).outcome == "admitted"
    assert pool.metrics(0.0)["experience/samples"] == 4


def test_a_rival_that_answered_first_is_a_clean_loss_and_a_repeated_commit_none(storages):
    owner, worker = storages
    write_segment(worker, FIRST, groups("a"))
    write_segment(worker, FIRST, groups("a"))
    with pytest.raises(FileExistsError):
        write_segment(owner, FIRST, groups("other"))
    assert segment_ids(owner) == [FIRST]
