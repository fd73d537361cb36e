"""Pauses between restarts, and when it is enough."""

from deployments.restarts import ATTEMPTS, LONGEST_PAUSE, STEADY_SECONDS, Restarts


def test_pauses_grow_up_to_a_longest_one_and_end():
    restarts = Restarts()
    pauses = []
    for _ in range(ATTEMPTS):
        restarts.ended(now=100.0, lived=1.0)
        pauses.append(restarts.due_at - 100.0)
        assert not restarts.exhausted
    assert pauses[:6] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert max(pauses) == LONGEST_PAUSE
    restarts.ended(now=100.0, lived=1.0)
    assert restarts.exhausted


def test_a_process_that_ran_for_long_begins_anew():
    restarts = Restarts()
    for _ in range(ATTEMPTS):
        restarts.ended(now=0.0, lived=1.0)
    restarts.ended(now=0.0, lived=STEADY_SECONDS)
    assert (restarts.in_a_row, restarts.due_at) == (1, 0.0)
