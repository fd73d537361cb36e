"""Requests are announced once per attempt, and read as they were announced."""

import numpy as np
import pytest

from gyre_core.cluster.epochs import SupersededError
from gyre_core.cluster.requests import (
    announce,
    announce_next,
    announced,
    decode_request,
    encode_request,
    latest_attempt,
    prune_requests,
    read_request,
    request_name,
    request_step,
)
from gyre_core.storage import open_storage
from gyre_core.types import GroupRequest, PolicyVersion, Prompt, RolloutRequest, SamplingParameters


@pytest.fixture
def storage(tmp_path):
    return open_storage(tmp_path)


VERSION = PolicyVersion(2, 7)


def make_request(step=3, shard=1, version=VERSION, columns=None):
    prompts = [
        Prompt("p0", "2+2=", "2+2=", np.array([1, 2**31 - 1], np.int32), columns or {}),
        Prompt("p1", [{"role": "user", "content": "é☃\n"}], "<é>", np.empty(0, np.int32), {"answer": None, "n": [1.5]}),
    ]
    name = request_name(step, shard)
    groups = tuple(GroupRequest(f"{name}-{index}", prompt) for index, prompt in enumerate(prompts))
    sampling = SamplingParameters(8, 64, 0.8, 0.95, 40, ("\n", "é"), 2**40)
    return RolloutRequest(name, step, version, groups, sampling)


def fields(request):
    """The request in comparable parts."""
    groups = [
        (g.group_id, g.prompt.prompt_id, g.prompt.prompt, g.prompt.text, g.prompt.token_ids.tolist(),
         g.prompt.token_ids.dtype, dict(g.prompt.columns))
        for g in request.groups
    ]  # fmt: skip
    return (request.request_id, request.step, request.version, request.sampling, groups)


def test_round_trip(storage):
    request = make_request()
    announce(storage, request, 1)
    assert fields(read_request(storage, request.request_id, 1)) == fields(request)
    assert encode_request(read_request(storage, request.request_id, 1)) == encode_request(request)


def test_ids_sort_by_step_and_shard():
    names = [request_name(step, shard) for step in (0, 9, 10, 123456) for shard in (0, 9, 10)]
    assert names == sorted(names)
    assert [request_step(name) for name in names] == [0] * 3 + [9] * 3 + [10] * 3 + [123456] * 3


@pytest.mark.parametrize("text", ["", "12", "a-1", "1-", "-1-2"])
def test_what_is_not_an_id_is_refused(text):
    with pytest.raises(ValueError, match="is not a request id; one looks like '00000012-0000'"):
        request_step(text)


def test_an_attempt_is_announced_once(storage):
    announce(storage, make_request(), 1)
    announce(storage, make_request(), 1)
    with pytest.raises(FileExistsError):
        announce(storage, make_request(version=PolicyVersion(3, 0)), 1)


def test_the_next_attempt_is_the_first_that_nobody_announced_otherwise(storage):
    foreign = make_request(version=PolicyVersion(3, 0))
    for attempt in (1, 2, 4):
        announce(storage, foreign, attempt)
    assert announce_next(storage, make_request(), 1) == 3
    assert announce_next(storage, make_request(), 3) == 3, "repeated after a failure"
    assert announce_next(storage, make_request(), 4) == 5
    assert read_request(storage, request_name(3, 1), 2).version == foreign.version


def test_a_superseded_owner_announces_nothing_behind_its_successor(storage):
    """Workers look at the newest attempt alone."""
    announce(storage, make_request(version=PolicyVersion(3, 0)), 1)

    def superseded():
        raise SupersededError

    with pytest.raises(SupersededError):
        announce_next(storage, make_request(), 1, superseded)
    assert latest_attempt(storage, request_name(3, 1)) == 1
    assert announce_next(storage, make_request(), 2, superseded) == 2, "asked only where another one's stands"


def test_the_latest_attempt_counts_as_a_number(storage):
    assert latest_attempt(storage, request_name(3, 1)) == 0
    for attempt in (2, 10, 9):
        announce(storage, make_request(), attempt)
    announce(storage, make_request(shard=0), 1)
    assert latest_attempt(storage, request_name(3, 1)) == 10
    assert announced(storage) == {request_name(3, 0): 1, request_name(3, 1): 10}


def test_a_foreign_or_unknown_object_is_refused(storage):
    storage.create("requests/00000004-0000.1", encode_request(make_request()))
    with pytest.raises(ValueError, match="holds request '00000003-0001' instead of '00000004-0000'"):
        read_request(storage, "00000004-0000", 1)
    with pytest.raises(ValueError, match="x has format 'request/9', and this version reads 'request/1'"):
        decode_request(b'{"format": "request/9"}', "x")
    for data in (b"", b"[1]", b"\xff"):
        with pytest.raises(ValueError, match="x is not a request"):
            decode_request(data, "x")


def test_a_column_that_json_cannot_hold_is_refused(storage):
    with pytest.raises(ValueError, match="request 00000003-0001: a prompt has a column that JSON cannot hold"):
        announce(storage, make_request(columns={"picture": object()}), 1)


def test_closed_steps_are_pruned(storage):
    for step in (1, 2):
        announce(storage, make_request(step=step), 1)
        storage.create(f"claims/{request_name(step, 1)}.1", b"w")
    prune_requests(storage, before_step=2)
    assert storage.list("requests") == ["requests/00000002-0001.1"]
    assert storage.list("claims") == ["claims/00000002-0001.1"]
