"""What ends a lease, and what follows: each request is answered, tried again, or failed with its reason."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from gyre_core.cluster.claims import Failure, claim, report_failure
from gyre_core.cluster.heartbeat import WorkerBeat
from gyre_core.cluster.registry import Registry
from gyre_core.cluster.requests import announce, latest_attempt
from gyre_core.experience.segments import write_segment
from gyre_core.rewards.values import RewardError
from gyre_core.rollout.dispatch import Dispatcher, RequestFailedError
from gyre_core.storage import LocalStorage
from gyre_core.types import GroupRequest, PolicyVersion, Prompt, RolloutRequest, SamplingParameters

TIMEOUT = 5.0


class World:
    """An owner with one request, and workers that are as alive as a test says."""

    def __init__(self, folder):
        self.now = 0.0
        self.storage = LocalStorage(folder)
        self.registry = Registry(self.storage, TIMEOUT, 60.0, clock=lambda: self.now)
        self.dispatcher = Dispatcher(self.storage, self.registry, timeout=TIMEOUT, attempts=3, clock=lambda: self.now)
        prompt = Prompt("p", "1+1=", "1+1=", np.array([1, 2], np.int32), {})
        self.request = RolloutRequest(
            "00000001-0000",
            1,
            PolicyVersion(1, 0),
            (GroupRequest("g", prompt),),
            SamplingParameters(samples=1, max_tokens=4),
        )
        announce(self.storage, self.request, 1)
        self.dispatcher.follow([self.request])
        self.beats = {}

    def work(self, name, token=None, state="ready", in_flight=()):
        self.beats[name] = WorkerBeat(name, token or f"{name} t", "", "h", 1, state, in_flight=tuple(in_flight))

    def pass_seconds(self, seconds, silent=()):
        """Second by second, with a heartbeat of every worker that is not silent."""
        for _ in range(seconds):
            self.now += 1.0
            for name, beat in self.beats.items():
                if name not in silent:
                    self.beats[name] = beat = replace(beat, sequence=beat.sequence + 1)
                    self.storage.replace(f"workers/{name}.json", json.dumps(asdict(beat)).encode())
            self.dispatcher.tick()

    @property
    def attempt(self):
        return latest_attempt(self.storage, self.request.request_id)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


ATTEMPT = "00000001-0000.1"


def test_an_unclaimed_request_waits_and_is_counted(world):
    world.pass_seconds(1000)
    assert (world.attempt, world.dispatcher.queued, world.dispatcher.open) == (1, 1, ["00000001-0000"])


def test_a_lease_lasts_as_long_as_its_worker_names_it(world):
    claim(world.storage, "00000001-0000", 1, "000.1 t")
    world.work("000.1", in_flight=[ATTEMPT])
    world.pass_seconds(10_000 // 10)
    assert (world.attempt, world.dispatcher.queued) == (1, 0)


def test_a_claim_that_cannot_be_read_at_first_is_a_lease_all_the_same(world, monkeypatch):
    claim(world.storage, "00000001-0000", 1, "000.1 t")
    world.work("000.1", in_flight=[ATTEMPT])
    read, failing = LocalStorage.read, [True]

    def unreadable_once(storage, name):
        if name.startswith("claims/") and failing:
            failing.pop()
            raise OSError("away")
        return read(storage, name)

    monkeypatch.setattr(LocalStorage, "read", unreadable_once)
    with pytest.raises(OSError, match="away"):
        world.pass_seconds(1)
    world.pass_seconds(100)
    assert world.attempt == 1


def test_an_attempt_that_an_earlier_owner_announced_is_passed_over(world):
    claim(world.storage, "00000001-0000", 1, "000.1 t")
    world.work("000.1", state="ended")
    announce(world.storage, replace(world.request, version=PolicyVersion(0, 7)), 2)
    world.pass_seconds(1)
    assert (world.attempt, world.dispatcher.reissued) == (3, 1)


def test_a_lost_workers_request_goes_to_another_after_the_timeout(world):
    claim(world.storage, "00000001-0000", 1, "000.1 t")
    world.work("000.1", in_flight=[ATTEMPT])
    world.pass_seconds(3)
    world.pass_seconds(5, silent=["000.1"])
    assert world.attempt == 1
    world.pass_seconds(1, silent=["000.1"])
    assert (world.attempt, world.dispatcher.reissued) == (2, 1)


def test_a_worker_that_died_before_its_first_heartbeat_is_seen_too(world):
    claim(world.storage, "00000001-0000", 1, "000.1 t")
    world.pass_seconds(6)
    assert world.attempt == 1  # The claim was first seen after one second.
    world.pass_seconds(1)
    assert world.attempt == 2


def test_a_claim_by_an_earlier_process_of_the_same_name_ends(world):
    claim(world.storage, "00000001-0000", 1, "000.1 killed")
    world.work("000.1", token="000.1 relaunched")
    world.pass_seconds(7)
    assert world.attempt == 2


def test_a_worker_that_ended_holds_nothing(world):
    claim(world.storage, "00000001-0000", 1, "000.1 t")
    world.work("000.1", state="ended")
    world.pass_seconds(1)
    assert world.attempt == 2


def test_a_worker_that_lives_and_forgot_the_attempt_loses_it(world):
    claim(world.storage, "00000001-0000", 1, "000.1 t")
    world.work("000.1", in_flight=[ATTEMPT])
    world.pass_seconds(3)
    world.work("000.1", in_flight=[])
    world.beats["000.1"] = replace(world.beats["000.1"], sequence=100)
    world.pass_seconds(5)
    assert world.attempt == 1
    world.pass_seconds(1)
    assert world.attempt == 2


def test_a_reported_failure_is_answered_at_once_and_the_last_one_is_told(world):
    for attempt in (1, 2, 3):
        claim(world.storage, "00000001-0000", attempt, "000.1 t")
        world.work("000.1")
        report_failure(
            world.storage,
            f"00000001-0000.{attempt}",
            Failure("000.1", "OutOfMemoryError", f"no memory, time {attempt}"),
        )
        world.pass_seconds(1)
    assert world.attempt == 3
    with pytest.raises(RequestFailedError, match=r"00000001-0000, worker 000\.1: OutOfMemoryError: no memory, time 3"):
        world.dispatcher.raise_failure(["00000001-0000"])
    # A retried step has as many attempts again.
    world.dispatcher.follow([world.request])
    world.dispatcher.raise_failure(["00000001-0000"])
    assert world.attempt == 4
    for attempt in (4, 5):
        report_failure(world.storage, f"00000001-0000.{attempt}", Failure("000.1", "OSError", "away"))
        claim(world.storage, "00000001-0000", attempt, "000.1 t")
        world.pass_seconds(1)
        world.dispatcher.raise_failure(["00000001-0000"])
    assert world.attempt == 6


def test_a_reward_that_cannot_be_computed_is_not_tried_again(world):
    claim(world.storage, "00000001-0000", 1, "000.1 t")
    report_failure(world.storage, ATTEMPT, Failure("000.1", "RewardError", "NameError: x"))
    world.pass_seconds(1)
    assert world.attempt == 1
    with pytest.raises(RewardError, match="NameError: x"):
        world.dispatcher.raise_failure(["00000001-0000"])


def test_a_segment_that_comes_after_all_answers_the_request(world):
    claim(world.storage, "00000001-0000", 1, "000.1 t")
    world.pass_seconds(8)
    assert world.attempt == 2
    write_segment(world.storage, "00000001-0000", [])  # The first worker thawed.
    world.pass_seconds(1)
    assert world.dispatcher.answered(["00000001-0000"]) == ["00000001-0000"]
    assert world.dispatcher.open == []


def test_whom_names_the_holder_with_its_last_error_or_that_there_is_nobody(world):
    assert "none of which has appeared" in str(world.dispatcher.whom(["00000001-0000"])[0])
    claim(world.storage, "00000001-0000", 1, "000.1 t")
    world.work("000.1", in_flight=[ATTEMPT])
    world.work("001.1")
    world.beats["000.1"] = replace(world.beats["000.1"], last_error="OSError: away")
    world.pass_seconds(2)
    (told,) = world.dispatcher.whom(["00000001-0000"])
    assert str(told) == "worker 000.1 (ready, last heartbeat 0 s ago) (last error: OSError: away)"
