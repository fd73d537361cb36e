"""The plan of the fleet: who is started, promoted, drained and cancelled, and which slots rest."""

import random

import pytest

from gyre_core.cluster.planning import GIVE_UP_FAILURES, FleetPlan, Member, Start, plan_fleet


def ready(slot, generation=1, role="active"):
    return Member(slot, generation, role, "ready")


def test_an_empty_fleet_fills_the_lowest_slots_workers_before_spares():
    assert plan_fleet(2, 1, [], 0.0) == FleetPlan(start=(Start(0, 1, False), Start(1, 1, False), Start(2, 1, True)))


def test_a_fleet_that_is_as_wanted_is_left_alone():
    assert plan_fleet(2, 1, [ready(0), ready(1, 4), ready(2, 1, "standby")], 0.0) == FleetPlan()


def test_starts_that_are_under_way_count():
    members = [Member(0, 1, "active", "pending"), Member(1, 1, "active", "starting")]
    assert plan_fleet(3, 0, members, 0.0) == FleetPlan(start=(Start(2, 1, False),))


def test_a_lost_worker_is_cancelled_and_followed_in_its_slot():
    members = [ready(0), Member(1, 2, "active", "lost"), Member(1, 1, "active", "ended"), ready(2)]
    assert plan_fleet(3, 0, members, 0.0) == FleetPlan(start=(Start(1, 3, False),), cancel=("001.2",))


def test_a_draining_worker_does_not_count():
    members = [ready(0), Member(1, 1, "active", "draining")]
    assert plan_fleet(2, 0, members, 0.0) == FleetPlan(start=(Start(1, 2, False),))


def test_a_spare_is_promoted_before_a_worker_is_started_and_replaced():
    members = [Member(0, 1, "active", "ended"), ready(1), ready(2, 1, "standby")]
    assert plan_fleet(2, 1, members, 0.0) == FleetPlan(start=(Start(0, 2, True),), promote=("002.1",))
    # The promoted one is an active worker from then on.
    assert plan_fleet(2, 1, [ready(0, 2, "standby"), ready(1), ready(2)], 0.0) == FleetPlan()


def test_the_warm_spare_is_promoted_before_one_that_still_loads():
    members = [Member(0, 1, "standby", "starting"), ready(1, 1, "standby")]
    assert plan_fleet(1, 1, members, 0.0).promote == ("001.1",)


def test_shrinking_cancels_what_has_not_begun_then_drains_the_highest_slots():
    members = [
        Member(0, 1, "active", "starting"),
        ready(1),
        ready(2),
        ready(3),
        Member(4, 1, "active", "pending"),
    ]
    assert plan_fleet(4, 0, members, 0.0) == FleetPlan(cancel=("004.1",))
    assert plan_fleet(3, 0, members, 0.0) == FleetPlan(cancel=("000.1", "004.1"))
    assert plan_fleet(1, 0, members, 0.0) == FleetPlan(drain=("002.1", "003.1"), cancel=("000.1", "004.1"))
    assert plan_fleet(0, 0, members, 0.0).drain == ("001.1", "002.1", "003.1")


def test_spares_too_many_are_drained():
    members = [ready(0), ready(1, 1, "standby"), ready(2, 1, "standby")]
    assert plan_fleet(1, 1, members, 0.0) == FleetPlan(drain=("002.1",))


def test_of_two_that_live_in_one_slot_the_older_one_goes():
    assert plan_fleet(1, 0, [ready(0, 1), ready(0, 2)], 0.0) == FleetPlan(cancel=("000.1",))


def failed(slot, times):
    return [Member(slot, index + 1, "active", "ended", time) for index, time in enumerate(times)]


@pytest.mark.parametrize(("failures", "pause"), [(1, 0), (2, 2), (3, 4), (4, 8), (5, 16)])
def test_a_slot_whose_starts_fail_rests_longer_and_longer(failures, pause):
    members = failed(0, [float(time) for time in range(failures)])
    last = failures - 1.0
    if pause:
        assert plan_fleet(1, 0, members, last + pause - 0.01) == FleetPlan(waiting=(0,))
    assert plan_fleet(1, 0, members, last + pause) == FleetPlan(start=(Start(0, failures + 1, False),))


def test_a_slot_that_rests_is_not_replaced_by_another_one():
    members = [*failed(0, [1.0, 2.0, 3.0]), ready(1)]
    assert plan_fleet(2, 0, members, 3.0) == FleetPlan(waiting=(0,))


def test_after_too_many_failures_a_slot_is_given_up():
    members = failed(0, [0.0] * GIVE_UP_FAILURES)
    assert plan_fleet(2, 0, members, 1e6) == FleetPlan(start=(Start(1, 1, False),), given_up=(0,))


def test_a_worker_that_was_ready_once_wipes_out_what_failed_before():
    members = [*failed(0, [0.0] * 5), Member(0, 6, "active", "ended"), Member(0, 7, "active", "ended", 10.0)]
    assert plan_fleet(1, 0, members, 10.0) == FleetPlan(start=(Start(0, 8, False),))


def carry_out(plan, members):
    """The members as they are once a plan was carried out and all that it began has come to its end."""
    gone = {*plan.drain, *plan.cancel}
    after = []
    for member in members:
        role = "active" if member.name in plan.promote else member.role
        phase = "ended" if member.name in gone or member.phase in ("draining", "lost", "ended") else "ready"
        after.append(Member(member.slot, member.generation, role, phase))
    after += [
        Member(start.slot, start.generation, "standby" if start.standby else "active", "ready") for start in plan.start
    ]
    return after


def test_any_fleet_is_as_wanted_after_one_plan_and_no_name_is_used_twice():
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    phases = ["pending", "starting", "ready", "draining", "lost", "ended"]
    for _ in range(500):
        names = {(draw.randrange(6), draw.randrange(1, 4)) for _ in range(draw.randrange(12))}
        members = [Member(*name, draw.choice(["active", "standby"]), draw.choice(phases)) for name in names]
        wanted, standby = draw.randrange(6), draw.randrange(3)
        plan = plan_fleet(wanted, standby, members, 0.0)
        assert plan == plan_fleet(wanted, standby, draw.sample(members, len(members)), 0.0)
        after = carry_out(plan, members)
        assert len({member.name for member in after}) == len(after)
        living = [member for member in after if member.phase == "ready"]
        assert sum(member.role == "active" for member in living) == wanted
        assert sum(member.role == "standby" for member in living) == standby
        assert plan_fleet(wanted, standby, after, 0.0) == FleetPlan()
        began_late = {member.name for member in members if member.phase in ("pending", "starting")}
        assert not began_late & set(plan.drain)
