"""The plan that brings the rollout workers of a run to the number that it wants; pure.

- Slots are counted from 0, and the lowest ones are kept. Whoever follows in a slot has a higher generation, so that two
  plans made of the same state name the same workers.
- A worker that drains, or is lost, does not count. One that is lost is cancelled and its place filled.
- A warm spare is promoted before a worker is started, and replaced by another spare.
- To shrink, workers that wait for a start go first, then those that start, then ready ones are drained; of each the
  highest slot first.
- A slot whose last workers ended without ever being ready waits longer and longer, and in the end is given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gyre_core.cluster.fleet import worker_name

Role = Literal["active", "standby"]
Phase = Literal["pending", "starting", "ready", "draining", "lost", "ended"]

FREE_FAILURES = 1
"""Failed starts in a row after which a slot is filled again at once."""
LONGEST_PAUSE = 120.0
"""Seconds between two starts in a slot at the most."""
GIVE_UP_FAILURES = 6
"""Failed starts in a row after which a slot stays empty."""
_PROGRESS: dict[Phase, int] = {"pending": 0, "starting": 1, "ready": 2}


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that was ever started for the run."""

    slot: int
    generation: int
    role: Role
    phase: Phase
    failed_at: float | None = None
    """When it ended without ever having been ready, in seconds of the caller's clock; None for any other."""

    @property
    def name(self) -> str:
        """The worker's name."""
        return worker_name(self.slot, self.generation)


@dataclass(frozen=True, slots=True)
class Start:
    """A worker to start."""

    slot: int
    generation: int
    standby: bool


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What to do now; workers that are there are named. A plan that says nothing leaves all as it is."""

    start: tuple[Start, ...] = ()
    promote: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    cancel: tuple[str, ...] = ()
    waiting: tuple[int, ...] = ()
    """Slots that stay empty for now, because the last starts in them failed."""
    given_up: tuple[int, ...] = ()
    """Slots that stay empty because too many starts in them failed."""


def plan_fleet(wanted: int, standby: int, members: Sequence[Member], now: float) -> FleetPlan:
    """What brings `members` to `wanted` active workers and `standby` warm spares.

    `members` are all workers that were ever started, ended ones included; `now` is on the clock of their `failed_at`.
    """
    assert wanted >= 0 and standby >= 0, "a fleet has no negative size"
    members = sorted(members, key=lambda member: (member.slot, member.generation))
    living = [member for member in members if member.phase in _PROGRESS]
    latest = {member.slot: member for member in living}
    superseded = [member for member in living if latest[member.slot] != member]
    lost = [member for member in members if member.phase == "lost"]
    spares = _by_progress(member for member in latest.values() if member.role == "standby")
    active = _by_progress(member for member in latest.values() if member.role == "active")
    promoted = spares[: max(0, wanted - len(active))]
    active_kept, spares_kept = [*active, *promoted][:wanted], spares[len(promoted) :][:standby]
    kept = {member.slot for member in (*active_kept, *spares_kept)}
    surplus = [member for member in latest.values() if member.slot not in kept]
    unready = [member for member in surplus if member.phase != "ready"]
    missing_active = wanted - len(active_kept)
    places = _free_slots(kept, missing_active + standby - len(spares_kept))
    resting = {slot: _failures_in_a_row(slot, members) for slot in places}
    given_up = [slot for slot, failures in resting.items() if len(failures) >= GIVE_UP_FAILURES]
    waiting = [slot for slot, failures in resting.items() if slot not in given_up and now < _due_at(failures)]
    return FleetPlan(
        start=tuple(
            Start(slot, _next_generation(slot, members), standby=index >= missing_active)
            for index, slot in enumerate(places)
            if slot not in given_up and slot not in waiting
        ),
        promote=tuple(member.name for member in promoted),
        drain=tuple(member.name for member in surplus if member.phase == "ready"),
        cancel=tuple(member.name for member in (*unready, *superseded, *lost)),
        waiting=tuple(waiting),
        given_up=tuple(given_up),
    )


def _by_progress(members: Iterable[Member]) -> list[Member]:
    """Those that are furthest first, and of equals the lowest slot: in this order they are kept and promoted."""
    return sorted(members, key=lambda member: (-_PROGRESS[member.phase], member.slot))


def _free_slots(taken: set[int], count: int) -> list[int]:
    return [slot for slot in range(len(taken) + count) if slot not in taken][:count]


def _next_generation(slot: int, members: Sequence[Member]) -> int:
    return 1 + max((member.generation for member in members if member.slot == slot), default=0)


def _failures_in_a_row(slot: int, members: Sequence[Member]) -> list[float]:
    """When the newest workers of a slot failed, newest first, back to the first that did not; `members` in order."""
    failures: list[float] = []
    for member in reversed(members):
        if member.slot == slot:
            if member.failed_at is None:
                break
            failures.append(member.failed_at)
    return failures


def _due_at(failures: Sequence[float]) -> float:
    """When a slot may be filled again: pauses of 2, 4, 8, … seconds, after the failures that are free."""
    counted = len(failures) - FREE_FAILURES
    return failures[0] + min(LONGEST_PAUSE, 2.0**counted) if counted > 0 else float("-inf")
