"""Who lives is judged by numbers that move, on the observer's own clock."""

from dataclasses import asdict, replace

import pytest

from gyre_core.cluster.heartbeat import Heart, OwnerBeat, OwnerWatch, WorkerBeat
from gyre_core.cluster.registry import Registry
from gyre_core.storage import LocalStorage


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path)


@pytest.fixture
def clock():
    return Clock()


BEAT = WorkerBeat("000.1", "000.1 a", "", "host", 1, "ready", sequence=1)


def write(storage, beat):
    import json

    storage.replace(f"workers/{beat.worker}.json", json.dumps(asdict(beat)).encode())


def watch(registry, clock, seconds, storage=None, beat=None, until_beats=0):
    """Let the registry look every second; up to `until_beats` seconds the worker's number moves."""
    for second in range(seconds):
        if beat is not None and second < until_beats:
            beat = replace(beat, sequence=beat.sequence + 1)
            write(storage, beat)
        clock.now += 1.0
        registry.observe()
    return beat


def phase(registry, name="000.1"):
    return registry.find(name).phase


def test_a_worker_whose_number_stands_still_is_lost_after_the_timeout_and_back_when_it_moves(storage, clock):
    registry = Registry(storage, timeout=5.0, start_grace=60.0, clock=clock)
    write(storage, BEAT)
    registry.observe()
    beat = watch(registry, clock, 10, storage, BEAT, until_beats=10)
    assert phase(registry) == "ready"
    watch(registry, clock, 5)
    assert phase(registry) == "ready"  # Silent for five seconds, and not longer.
    watch(registry, clock, 1)
    assert phase(registry) == "lost"
    write(storage, replace(beat, sequence=beat.sequence + 1))
    watch(registry, clock, 1)
    assert phase(registry) == "ready"


def test_a_worker_that_is_reported_gone_is_lost_at_once_and_back_when_it_moves(storage, clock):
    registry = Registry(storage, timeout=5.0, start_grace=60.0, clock=clock)
    write(storage, BEAT)
    registry.observe()
    registry.report_gone(["000.1", "001.1"])
    assert phase(registry) == "lost"
    clock.now += 0.5
    write(storage, replace(BEAT, sequence=2))  # Written before its end, read after the report.
    registry.observe()
    registry.report_gone(["000.1"])
    assert phase(registry) == "lost"
    clock.now += 2.5
    write(storage, replace(BEAT, sequence=3))
    registry.observe()
    assert phase(registry) == "ready"


def test_another_process_of_a_name_that_was_reported_gone_is_not_lost(storage, clock):
    registry = Registry(storage, timeout=5.0, start_grace=60.0, clock=clock)
    write(storage, BEAT)
    registry.observe()
    registry.report_gone(["000.1"])
    write(storage, replace(BEAT, token="000.1 b"))
    registry.observe()
    assert phase(registry) == "ready"


def test_an_ended_worker_that_is_reported_gone_stays_ended(storage, clock):
    registry = Registry(storage, timeout=5.0, start_grace=60.0, clock=clock)
    write(storage, replace(BEAT, state="ended"))
    registry.observe()
    registry.report_gone(["000.1"])
    assert phase(registry) == "ended"


def test_a_start_has_its_own_grace(storage, clock):
    registry = Registry(storage, timeout=5.0, start_grace=120.0, clock=clock)
    write(storage, replace(BEAT, state="starting"))
    registry.observe()
    watch(registry, clock, 120)
    assert phase(registry) == "starting"
    watch(registry, clock, 1)
    assert phase(registry) == "lost"


def test_an_ended_worker_is_never_lost(storage, clock):
    registry = Registry(storage, timeout=5.0, start_grace=60.0, clock=clock)
    write(storage, replace(BEAT, state="ended"))
    registry.observe()
    watch(registry, clock, 100)
    assert phase(registry) == "ended"


def test_a_pause_of_the_observer_is_held_against_nobody(storage, clock):
    registry = Registry(storage, timeout=5.0, start_grace=60.0, clock=clock)
    write(storage, BEAT)
    registry.observe()
    clock.now += 600.0  # The train process was stopped, or its machine slept.
    registry.observe()
    assert phase(registry) == "ready"
    watch(registry, clock, 6)
    assert phase(registry) == "lost"


def test_a_relaunched_worker_of_the_same_name_starts_afresh(storage, clock):
    registry = Registry(storage, timeout=5.0, start_grace=60.0, clock=clock)
    write(storage, replace(BEAT, sequence=7))
    registry.observe()
    watch(registry, clock, 6)
    assert phase(registry) == "lost"
    write(storage, replace(BEAT, token="000.1 b", sequence=7))  # Another process, which happens to be at 7 too.
    watch(registry, clock, 1)
    assert phase(registry) == "ready"


def test_a_torn_or_foreign_heartbeat_counts_as_not_moved(storage, clock):
    registry = Registry(storage, timeout=5.0, start_grace=60.0, clock=clock)
    write(storage, BEAT)
    registry.observe()
    storage.replace("workers/000.1.json", b'{"worker": "000.1"')
    storage.replace("workers/001.1.json", b"{}")
    watch(registry, clock, 6)
    assert [(worker.beat.worker, worker.phase) for worker in registry.workers] == [("000.1", "lost")]


def test_a_worker_watches_its_owner_and_ignores_a_zombie_of_an_older_epoch(storage, clock):
    import json

    def own(beat):
        storage.replace("learner/heartbeat.json", json.dumps(asdict(beat)).encode())

    watched = OwnerWatch(storage, clock)
    own(OwnerBeat(epoch=2, step=3, ended=False, sequence=5))
    watched.observe()
    clock.now += 30.0
    own(OwnerBeat(epoch=1, step=9, ended=True, sequence=900))  # Superseded, and it does not know.
    watched.observe()
    assert (watched.epoch, watched.ended, watched.silent_seconds) == (2, False, 30.0)
    own(OwnerBeat(epoch=2, step=3, ended=False, sequence=6))
    watched.observe()
    assert watched.silent_seconds == 0.0
    own(OwnerBeat(epoch=3, step=3, ended=False, sequence=1))
    watched.observe()
    assert watched.epoch == 3


def test_an_owner_that_was_never_heard_is_silent_since_the_worker_began(storage, clock):
    watched = OwnerWatch(storage, clock)
    clock.now += 42.0
    watched.observe()
    assert (watched.silent_seconds, watched.epoch, watched.ended) == (42.0, 0, False)


def test_a_heart_that_cannot_write_goes_on(storage, caplog):
    failing = [True]
    real = storage.replace

    def replace_object(name, data):
        if failing[0]:
            raise OSError("the store is away")
        real(name, data)

    storage.replace = replace_object
    heart = Heart(storage, "workers/x.json", 0.05, lambda: {"state": "ready"})
    heart.beat()
    heart.beat()
    assert caplog.text.count("the store is away") == 1
    failing[0] = False
    heart.beat()
    assert b'"sequence": 3' in storage.read("workers/x.json")


def test_workers_that_are_gone_are_forgotten_with_their_heartbeats(storage, clock):
    registry = Registry(storage, timeout=5.0, start_grace=60.0, clock=clock)
    write(storage, replace(BEAT, state="ended"))
    write(storage, replace(BEAT, worker="001.1", token="001.1 b"))
    registry.observe()
    watch(registry, clock, 600)
    assert [worker.phase for worker in registry.workers] == ["ended", "lost"]
    watch(registry, clock, 1)
    assert (registry.workers, storage.list("workers")) == ([], [])
