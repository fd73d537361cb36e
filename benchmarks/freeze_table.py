"""Owners frozen at named points, and thawed while or after another process has taken their run over.

A tiny run with inline generation, in the configurations of `benchmarks/faults/processes.py`. Its process is frozen
(`SIGSTOP`) at some call of a point of `benchmarks/faults/points.py`. Another one takes the run over, which the lock of
the run folder would prevent on one machine, and is frozen or killed on its way or comes to its end. Then the first one
is thawed and comes to its end, and then the other one, or who follows it. One of them completes the run, and the other
one is told that it was superseded or refused, or had nothing left to do. In the end weights, moments, the pool's index,
what was consumed, the published policy, export, summary and metrics equal those of an undisturbed run. The last line is
one JSON object.

    python benchmarks/freeze_table.py [--freezes 5] [--seed 1] [--configurations full replay always] [--jobs 2]
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # Before torch is imported; also, a fork would not take its threads along.

import json
import multiprocessing
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from fault_table import BETWEEN, Undisturbed, measure
from faults.command import NAMES, make_parser, print_table
from faults.points import RECOVERING
from faults.processes import End, Fault, differences, look, run_process, thaw

FROZEN_TOO = 0.7
"""Share of the second owners that are frozen; the others are killed."""
END = "its end"
"""Instead of an event, of an owner that was not struck."""
SUPERSEDED = "SupersededError"
COMPLETE = "is complete: "
"""What one is told that had not yet taken its epoch, or follows one that was killed, when the run has ended."""

REFUSED = "is being trained by process"
"""What one is told that was frozen before it had the lock of the run folder, and thaws while another one has it."""


@dataclass(frozen=True)
class Plan:
    """One run: how its first owner is frozen, and where the second one is frozen or killed, if it comes there."""

    configuration: str
    first: Fault
    second: Fault


@dataclass
class Story:
    """What became of a plan: the events at which both owners were frozen, and what was wrong in the end."""

    plan: Plan
    events: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def tell_story(plan: Plan, undisturbed: Undisturbed) -> Story:
    """Freeze, take over, thaw, compare; earlier where the first owner does not come so far, as threads differ."""
    story = _tell(plan, undisturbed)
    while story.events[0] == END and plan.first.call > 1:
        plan = replace(plan, first=replace(plan.first, call=plan.first.call // 2))
        story = _tell(plan, undisturbed)
    return story


def _tell(plan: Plan, undisturbed: Undisturbed) -> Story:
    story = Story(plan)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if plan.first.point == RECOVERING:
            run_process(plan.configuration, folder, Fault(BETWEEN, undisturbed.calls[BETWEEN] // 2 + 1))
        owners = [_take_over(plan.configuration, folder, fault) for fault in (plan.first, plan.second)]
        story.events = [owner.struck or END for owner in owners]
        if owners[0].frozen is None:
            story.problems.append(f"the first owner did not come to {plan.first}: {owners[0].error}")
        ends = [owner if owner.frozen is None else thaw(owner.frozen, folder) for owner in owners]
        if owners[1].struck is not None and owners[1].frozen is None:
            ends[1] = _take_over(plan.configuration, folder, None)
        last = look(plan.configuration, folder)
    story.problems += _judge(ends, last, undisturbed.outcome)
    return story


def _take_over(configuration: str, folder: Path, fault: Fault | None) -> End:
    for lock in folder.rglob("owner.lock"):
        lock.unlink()
    return run_process(configuration, folder, fault)


def _judge(ends: list[End], last: End, wanted: Mapping[str, str]) -> list[str]:
    """What is wrong with how two owners ended, and with what the run has come to."""
    problems = [
        f"owner {number}: {end.error}"
        for number, end in enumerate(ends, 1)
        if end.error is not None and not any(word in end.error for word in (SUPERSEDED, COMPLETE, REFUSED))
    ]
    if all(end.error is not None and COMPLETE not in end.error for end in ends):
        problems.append("both owners ended without having completed the run")
    if last.error is not None:
        return [*problems, f"the run cannot be read: {last.error}"]
    return problems + differences(last.outcome or {}, wanted)


def plan_all(undisturbed: Mapping[str, Undisturbed], freezes: int, rng: random.Random) -> list[Plan]:
    """So many freezes of every point in every configuration that knows it."""
    plans: list[Plan] = []
    for configuration, known in undisturbed.items():
        names = [name for name in NAMES if known.calls.get(name)]
        for name in names * freezes:
            first = Fault(name, rng.randint(1, known.calls[name]), freeze=True)
            second = rng.choice(names)
            # About every second owner comes so far; the others come to their end first.
            call = rng.randint(1, known.calls[second])
            plans.append(Plan(configuration, first, Fault(second, call, freeze=rng.random() < FROZEN_TOO)))
    return plans


def main() -> None:
    """Freeze, compare and print; exits with 1 when a run ended otherwise."""
    parser = make_parser(__doc__)
    parser.add_argument("--freezes", type=int, default=5, help="of each point in each configuration")
    arguments = parser.parse_args()
    freezes, equal, met = Counter[str](), Counter[str](), 0
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        names = arguments.configurations
        undisturbed = dict(zip(names, pool.map(measure, names), strict=True))
        plans = plan_all(undisturbed, arguments.freezes, random.Random(arguments.seed))
        for story in pool.map(tell_story, plans, [undisturbed[plan.configuration] for plan in plans]):
            freezes[story.plan.first.point] += 1
            equal[story.plan.first.point] += not story.problems
            met += END not in story.events
            for problem in story.problems:
                print(f"NOT EQUAL, {story.plan}, {' then '.join(story.events)}\n    {problem}", flush=True)
            print(".", end="", file=sys.stderr, flush=True)
    table = print_table("freezes", freezes, equal)
    unequal = freezes.total() - equal.total()
    result = {"freezes": freezes.total(), "while_both_lived": met, "points": table, "unequal": unequal}
    print(json.dumps(result))
    sys.exit(1 if unequal else 0)


if __name__ == "__main__":
    main()
