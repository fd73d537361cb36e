"""The scaling law. In all cases a decision is asked for every 100 s, a worker makes 100 tokens/s, the pool holds
100,000 tokens; its fill is brought to 0.68 (0.8 of the way from 0.2 to 0.8) within 400 s."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.config import GyreConfig
from gyre_core.elastic.scaler import READINGS, Law, Scaler
from gyre_core.elastic.signals import Signals

INTERVAL, COOLING = 100.0, 250.0
STEADY = Signals(
    fill=0.68,
    pool_tokens=100_000.0,
    produced=800.0,
    consumed=800.0,
    worker_rate=100.0,
    queued=50,
    learner_wait=0.0,
    worker_idle=0.0,
    stale_share=0.0,
    loss_spread_growth=1.0,
    start_seconds=50.0,
    live=8,
    starting=0,
    draining=0,
)
"""Eight workers make what the learner takes; with the margin of 1.05 the need is 8.4."""
EMPTY = replace(STEADY, fill=0.1)
"""The need is 8.4 + (0.68 - 0.1) x 100,000 / 400 / 100 = 9.85, and cannot wait."""
LOW = replace(STEADY, fill=0.28)
"""The need is 8.4 + 0.4 x 100,000 / 400 / 100 = 9.4; the dead band of 8 workers ends at 8.8."""


def make_scaler(law=None, max_lag=1, **rollout):
    elastic = {"enabled": True, "scale_interval": INTERVAL, "scale_cooling": COOLING}
    rollout = {"min_worker": 2, "max_worker": 20, "max_lag": max_lag} | rollout
    return Scaler(GyreConfig.model_validate({"rollout": rollout, "elastic": elastic}), law)


def decide(*course, scaler=None):
    """The last decision after a course of signals."""
    scaler = scaler or make_scaler()
    decisions = [scaler.decide(signals, INTERVAL) for signals in course]
    return decisions[-1]


def wanted(*course, scaler=None):
    return decide(*course, scaler=scaler).wanted


# What is computed from the readings.


def test_demand_is_what_the_learner_would_take_if_it_never_waited():
    numbers = decide(replace(STEADY, consumed=640.0, learner_wait=0.2)).numbers
    assert numbers["demand"] == pytest.approx(800.0)


def test_need_is_demand_with_margin_over_the_rate_of_a_worker():
    assert decide(STEADY).numbers["need"] == pytest.approx(8.4)
    assert decide(replace(STEADY, worker_rate=50.0)).numbers["need"] == pytest.approx(16.8)


@pytest.mark.parametrize(("signals", "need"), [(LOW, 9.4), (EMPTY, 9.85), (replace(STEADY, fill=1.0), 7.6)])
def test_need_is_corrected_by_what_the_pool_lacks_or_has_too_much(signals, need):
    assert decide(signals).numbers["need"] == pytest.approx(need)


def test_fill_is_taken_from_the_middle_of_the_interval_to_its_end():
    numbers = decide(replace(STEADY, fill=0.5, produced=900.0)).numbers
    assert numbers["fill_now"] == pytest.approx(0.5 + 100.0 * 50.0 / 100_000)


def test_fill_ahead_counts_starting_workers_in_and_draining_ones_out():
    numbers = decide(replace(STEADY, starting=3, draining=1)).numbers
    assert numbers["fill_ahead"] == pytest.approx(0.68 + 200.0 * 150.0 / 100_000)


def test_estimates_move_half_way_to_a_near_reading_and_all_the_way_to_a_far_one():
    near = decide(STEADY, replace(STEADY, consumed=880.0, worker_rate=90.0)).numbers
    assert (near["demand"], near["rate"]) == (pytest.approx(840.0), pytest.approx(95.0))
    far = decide(STEADY, replace(STEADY, consumed=1000.0, worker_rate=70.0)).numbers
    assert (far["demand"], far["rate"]) == (pytest.approx(1000.0), pytest.approx(70.0))


def test_an_interval_in_which_the_learner_took_nothing_leaves_the_demand():
    assert decide(STEADY, replace(STEADY, consumed=0.0, learner_wait=1.0)).numbers["demand"] == pytest.approx(800.0)


# Up.


def test_grows_at_once_when_the_fill_is_below_the_low_threshold():
    decision = decide(EMPTY)
    assert (decision.wanted, decision.direction) == (10, "up")
    assert "below 0.2" in decision.reasons[0]


def test_grows_at_once_when_the_learner_waited():
    assert wanted(replace(STEADY, consumed=950.0, learner_wait=0.05)) == 11  # demand 1000, need 10.5


def test_grows_at_once_when_the_fill_will_be_low_before_later_help():
    # 0.4 - 400 x 50 / 100,000 = 0.2 now, and 400 tokens/s are lacking; need 12.6 + 1.2
    assert wanted(replace(STEADY, fill=0.4, consumed=1200.0)) == 14


def test_otherwise_grows_when_two_needs_in_a_row_ask_for_it_to_the_smaller():
    assert wanted(LOW) == 8
    assert wanted(LOW, replace(LOW, fill=0.22)) == 10
    assert wanted(LOW, STEADY, LOW) == 8
    assert wanted(replace(STEADY, consumed=900.0, produced=900.0), replace(LOW, consumed=1500.0, produced=1500.0)) == 10


def test_growth_has_a_step_limit():
    starved = replace(EMPTY, consumed=1500.0, produced=1500.0, live=2)
    assert wanted(starved) == 6
    assert "adds 4 at the most" in " ".join(decide(starved).reasons)


def test_no_more_workers_than_queued_requests():
    assert wanted(replace(EMPTY, queued=1)) == 9
    assert wanted(replace(EMPTY, queued=0)) == 8


def test_a_pending_start_is_capacity():
    assert wanted(replace(EMPTY, live=8, starting=2)) == 10
    assert decide(replace(EMPTY, live=8, starting=2)).direction == "hold"


def test_a_start_must_earn_its_cost():
    assert wanted(LOW, replace(LOW, start_seconds=50.0)) == 10
    assert wanted(LOW, replace(LOW, start_seconds=900.0)) == 9  # the tenth would be needed for 0.4 of 0.5


def test_a_growing_spread_of_losses_freezes_growth():
    decision = decide(replace(EMPTY, loss_spread_growth=2.5))
    assert decision.direction == "hold"
    assert "spread of the losses is 2.5 times" in " ".join(decision.reasons)


# Down.


def test_shrinks_when_the_largest_need_of_three_decisions_is_low():
    idle = replace(STEADY, consumed=600.0, produced=600.0)  # need 6.3
    assert wanted(idle, idle) == 8
    assert wanted(idle, idle, idle) == 7
    assert wanted(idle, STEADY, idle) == 8
    assert wanted(idle, STEADY, idle, idle, idle) == 7


def test_shrinking_has_a_step_limit():
    idle = replace(STEADY, consumed=100.0, produced=100.0, live=12)
    assert wanted(idle, idle, idle) == 8
    assert wanted(*3 * [replace(idle, live=3)]) == 2


def test_never_shrinks_while_the_pool_is_low_or_the_learner_waits():
    excess = replace(STEADY, consumed=200.0, produced=200.0, live=16)
    assert wanted(*3 * [excess]) < 16
    assert wanted(*3 * [replace(excess, fill=0.1)]) == 16
    assert wanted(*3 * [replace(excess, learner_wait=0.02)]) == 16


# Rest.


def test_noise_within_the_dead_band_changes_nothing():
    scaler = make_scaler()
    for fill in 50 * [0.55, 0.8]:  # needs 8.73 and 8.1
        assert scaler.decide(replace(STEADY, fill=fill), INTERVAL).wanted == 8


def test_without_dead_band_and_confirmation_the_same_noise_moves_it():
    scaler = make_scaler(Law(dead_band=0.0, growth_ticks=1, stabilisation_ticks=1))
    assert scaler.decide(replace(STEADY, fill=0.55), INTERVAL).wanted == 9


def test_after_a_change_nothing_changes_until_the_cooling_is_over():
    scaler = make_scaler()
    assert wanted(LOW, LOW, scaler=scaler) == 10
    more = replace(LOW, consumed=1100.0, produced=1100.0, live=10)  # need 12.55
    assert [scaler.decide(more, INTERVAL).wanted for _ in range(3)] == [10, 10, 13]


def test_growth_at_once_does_not_wait_for_the_cooling():
    scaler = make_scaler()
    assert wanted(LOW, LOW, scaler=scaler) == 10
    assert wanted(replace(EMPTY, consumed=1100.0, produced=1100.0, live=10), scaler=scaler) == 13


def test_cooling_survives_a_restart_as_what_is_left_of_it():
    scaler = make_scaler()
    decide(LOW, LOW, scaler=scaler)
    assert scaler.state()["cooling"] == COOLING
    more = replace(LOW, consumed=1100.0, produced=1100.0, live=10)
    scaler.decide(more, INTERVAL)
    state = json.loads(json.dumps(scaler.state()))
    assert state["cooling"] == COOLING - INTERVAL
    restarted = make_scaler()
    restarted.load_state(state)
    assert [restarted.decide(more, INTERVAL).wanted for _ in range(2)] == [10, 13]


def test_replacing_a_dead_worker_is_no_change():
    assert decide(STEADY, STEADY, STEADY) == replace_numbers(
        decide(STEADY, STEADY, replace(STEADY, live=7, starting=1)), live=8, starting=0, fill_ahead=0.68
    )


def replace_numbers(decision, **numbers):
    return replace(decision, numbers=decision.numbers | numbers)


# Every signal counts.


@pytest.mark.parametrize("name", [*READINGS, "fill", "pool_tokens"])
@pytest.mark.parametrize("value", [None, float("nan")])
def test_without_a_signal_nothing_changes(name, value):
    assert decide(EMPTY).direction == "up"
    decision = decide(replace(EMPTY, **{name: value}))
    assert decision.direction == "hold"
    assert name in " ".join(decision.reasons)


def test_a_missing_signal_leaves_estimates_and_history():
    scaler = make_scaler()
    assert wanted(LOW, replace(EMPTY, queued=None), LOW, scaler=scaler) == 10


@pytest.mark.parametrize(
    ("course", "name", "neutral"),
    [
        ([EMPTY], "fill", 0.68),
        ([replace(STEADY, fill=0.4, consumed=1200.0)], "produced", 1200.0),
        ([replace(STEADY, fill=0.4, consumed=1200.0)], "consumed", 800.0),
        (2 * [replace(STEADY, worker_rate=80.0)], "worker_rate", 100.0),
        ([replace(EMPTY, queued=0)], "queued", 50),
        ([replace(STEADY, consumed=950.0, learner_wait=0.05)], "learner_wait", 0.0),
        (2 * [replace(LOW, stale_share=0.5)], "stale_share", 0.0),
        ([replace(EMPTY, loss_spread_growth=2.5)], "loss_spread_growth", 1.0),
        (2 * [replace(LOW, start_seconds=900.0)], "start_seconds", 50.0),
        ([replace(EMPTY, live=7, starting=3)], "starting", 0),
        ([replace(STEADY, fill=0.4, live=6, draining=2)], "draining", 0),
    ],
)
def test_another_value_of_one_signal_changes_the_decision(course, name, neutral):
    changed = [replace(signals, **{name: neutral}) for signals in course]
    present = course[-1].live + course[-1].starting
    assert wanted(*course) - present != wanted(*changed) - changed[-1].live - changed[-1].starting


# On-policy.


def on_policy(live, update_seconds=10.0, step_tokens=8000.0):
    """Generation and update take turns: `live` workers make a step's tokens, then the learner takes them all."""
    generation_seconds = step_tokens / (100.0 * live)
    seconds = generation_seconds + update_seconds
    return replace(
        STEADY,
        fill=None,
        pool_tokens=None,
        produced=step_tokens / seconds,
        consumed=step_tokens / seconds,
        learner_wait=generation_seconds / seconds,
        worker_idle=update_seconds / seconds,
        live=live,
    )


def test_on_policy_the_need_makes_generation_as_long_as_the_update():
    for live in (2, 4, 8, 16):  # 8,000 tokens in 10 s by workers of 100 tokens/s are 8, with the margin 8.4
        assert decide(on_policy(live), scaler=make_scaler(max_lag=0)).numbers["need"] == pytest.approx(8.4)


def test_on_policy_goes_up_after_two_decisions_down_after_three_and_rests_between():
    assert wanted(on_policy(4), scaler=make_scaler(max_lag=0)) == 4
    assert wanted(on_policy(4), on_policy(4), scaler=make_scaler(max_lag=0)) == 9
    assert wanted(*5 * [on_policy(9)], scaler=make_scaler(max_lag=0)) == 9
    assert wanted(*2 * [on_policy(12)], scaler=make_scaler(max_lag=0)) == 12
    assert wanted(*3 * [on_policy(12)], scaler=make_scaler(max_lag=0)) == 9


def test_on_policy_idle_workers_are_no_reason_for_more_and_a_waiting_learner_none_for_fewer():
    few, many = replace(on_policy(4), worker_idle=0.9), replace(on_policy(12), worker_idle=0.1)
    assert wanted(*3 * [few], scaler=make_scaler(max_lag=0)) == 4
    assert wanted(*3 * [many], scaler=make_scaler(max_lag=0)) == 12


@pytest.mark.parametrize("name", READINGS)
def test_on_policy_too_nothing_changes_without_a_signal(name):
    missing = replace(on_policy(4), **{name: None})
    assert wanted(missing, missing, missing, scaler=make_scaler(max_lag=0)) == 4


def test_fill_is_missing_only_where_steps_overlap():
    assert decide(on_policy(4), on_policy(4)).direction == "hold"


# The learner is the limit.


def test_says_that_the_learner_is_the_limit_when_the_least_workers_overflow_the_pool_for_five_decisions():
    scaler, full = make_scaler(), replace(STEADY, fill=0.95, consumed=150.0, produced=150.0, live=2)
    assert [scaler.decide(full, INTERVAL).learner_is_limit for _ in range(6)] == [False] * 4 + [True] * 2
    assert "The learner is the limit" in scaler.decide(full, INTERVAL).reasons[-1]
    assert not scaler.decide(replace(full, fill=0.7), INTERVAL).learner_is_limit
    assert not scaler.decide(full, INTERVAL).learner_is_limit


def test_an_overflow_that_fewer_workers_can_end_is_not_the_learners():
    scaler, live = make_scaler(), 8
    for _ in range(4):
        decision = scaler.decide(replace(STEADY, fill=0.95, consumed=150.0, live=live), INTERVAL)
        assert not decision.learner_is_limit
    assert decision.direction in ("down", "hold")


# Laws.


@pytest.mark.parametrize("signals", [STEADY, replace(STEADY, fill=None)])
def test_bounds_hold_at_once_with_or_without_signals(signals):
    assert wanted(replace(signals, live=1)) == 2
    assert wanted(replace(signals, live=25)) == 20
    assert "max_worker is 20" in decide(replace(signals, live=25)).reasons[-1]


def readings(low, high):
    return st.none() | st.floats(low, high)


SIGNALS = st.builds(
    Signals,
    fill=readings(0.0, 1.5),
    pool_tokens=readings(0.0, 1e9),
    produced=readings(0.0, 1e6),
    consumed=readings(0.0, 1e6),
    worker_rate=readings(0.0, 1e5),
    queued=st.none() | st.integers(0, 1000),
    learner_wait=readings(0.0, 1.0),
    worker_idle=readings(0.0, 1.0),
    stale_share=readings(0.0, 1.0),
    loss_spread_growth=readings(0.0, 10.0),
    start_seconds=readings(0.0, 1e4),
    live=st.integers(0, 40),
    starting=st.integers(0, 20),
    draining=st.integers(0, 20),
)
COURSES = st.lists(st.tuples(SIGNALS, st.floats(0.0, 1000.0)), min_size=1, max_size=12)


@settings(deadline=None)
@given(COURSES, st.sampled_from([0, 1]))
def test_bounds_and_step_limits_hold_on_any_course(course, max_lag):
    scaler = make_scaler(max_lag=max_lag)
    for signals, seconds in course:
        decision = scaler.decide(signals, seconds)
        have = signals.live + signals.starting
        assert 2 <= decision.wanted <= 20
        assert decision.wanted <= max(2, have + max(1, 2 * have))
        assert decision.wanted >= min(20, have - max(1, have // 3))
        assert decision.direction == ("up" if decision.wanted > have else "down" if decision.wanted < have else "hold")
        assert decision.reasons


@settings(deadline=None)
@given(COURSES, st.data())
def test_a_restart_at_any_time_changes_no_decision(course, data):
    restart = data.draw(st.integers(0, len(course)))
    undisturbed, restarted = make_scaler(), make_scaler()
    for number, (signals, seconds) in enumerate(course):
        if number == restart:
            state = json.loads(json.dumps(restarted.state()))
            restarted = make_scaler()
            restarted.load_state(state)
        assert undisturbed.decide(signals, seconds) == restarted.decide(signals, seconds)


@settings(deadline=None)
@given(st.floats(220.0, 1800.0), st.integers(2, 20))
def test_a_constant_demand_is_met_by_few_workers_without_hasty_turns(demand, first):
    """In a pool that holds what was made and not taken, with workers that are there at the next decision."""
    scaler, live, fill, course = make_scaler(), first, 0.5, []
    for _ in range(120):
        made = min(100.0 * live, demand + (1.0 - fill) * 1000.0)
        taken = min(demand, made + fill * 1000.0)
        before, fill = fill, fill + (made - taken) * INTERVAL / 100_000
        signals = replace(
            STEADY,
            fill=(before + fill) / 2,
            produced=made,
            consumed=taken,
            learner_wait=1.0 - taken / demand,
            worker_idle=1.0 - made / (100.0 * live),
            live=live,
        )
        course.append((live, taken))
        live = scaler.decide(signals, INTERVAL).wanted
    settled = course[20:]
    assert all(taken == pytest.approx(demand) for _, taken in settled)
    average = sum(live for live, _ in settled) / len(settled)
    assert average <= 1.15 * demand / 100.0 + 0.5
    moves = [(at, after - before) for at, ((before, _), (after, _)) in enumerate(pairwise(settled)) if after != before]
    assert all(later - sooner >= 3 for (sooner, was), (later, now) in pairwise(moves) if was * now < 0)
