import pytest

from gyre_core.monitor.timing import StepTimer, peak_memory_bytes, throughput_metrics


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


def test_phases_and_orchestration_add_up_to_the_step():
    clock = Clock()
    timer = StepTimer(clock)
    clock.move(1.0)
    with timer("generation"):
        clock.move(4.0)
        with timer("sample"):
            clock.move(2.0)
            with timer("reward"):
                clock.move(0.5)
        clock.move(1.0)
    with timer("generation"):
        clock.move(3.0)
    clock.move(0.5)
    assert timer.metrics() == {
        "time/step": 12.0,
        "time/reward": 0.5,
        "time/sample": 2.0,
        "time/generation": 8.0,
        "time/orchestration": 1.5,
    }


def test_a_step_may_count_from_the_end_of_the_one_before():
    clock = Clock()
    timer = StepTimer(clock)
    with timer("generation"):
        clock.move(4.0)
    clock.move(1.0)
    assert timer.metrics(since=49.0) == {"time/step": 6.0, "time/generation": 4.0, "time/orchestration": 2.0}
    assert timer.metrics(since=52.0) == {"time/step": 3.0, "time/generation": 4.0, "time/orchestration": 0.0}


def test_a_phase_that_raises_is_counted():
    clock = Clock()
    timer = StepTimer(clock)

    def fail() -> None:
        with timer("update"), timer("broadcast_weights"):
            clock.move(2.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with timer("update"):
        clock.move(1.0)
    assert timer.metrics()["time/broadcast_weights"] == 2.0
    assert timer.metrics()["time/update"] == 1.0


def test_seconds_from_elsewhere_never_make_orchestration_negative():
    timer = StepTimer(Clock())
    timer.add("generation", 3.0)
    assert timer.metrics() == {"time/step": 0.0, "time/generation": 3.0, "time/orchestration": 0.0}


def test_an_unknown_phase_is_refused():
    with pytest.raises(AssertionError, match="'lunch'"):
        StepTimer(Clock()).add("lunch", 1.0)


def test_throughput_is_tokens_over_seconds():
    assert throughput_metrics(64, 1000, {"time/step": 4.0, "time/generation": 2.0}) == {
        "perf/throughput": 250.0,
        "perf/samples_per_second": 16.0,
        "perf/generation_throughput": 500.0,
    }
    assert throughput_metrics(0, 0, {"time/step": 0.0}) == {}


def test_peak_memory_sees_an_allocation_and_never_falls():
    size = 64 * 2**20
    before = peak_memory_bytes()
    block = bytearray(size)
    during = peak_memory_bytes()
    del block
    assert during >= size
    # The kernel counts pages per core, so a reading may be off by a few.
    assert before - 2**20 <= during <= peak_memory_bytes() + 2**20
