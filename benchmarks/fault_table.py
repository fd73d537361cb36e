"""Runs killed again and again at named points and at random times: whether each ends like an undisturbed one.

A tiny run with inline generation, in the configurations of `benchmarks/faults/processes.py`. Its process is killed
(`SIGKILL`) at some call of a point of `benchmarks/faults/points.py`, up to four times in a run, also while it comes
back, and the run is resumed until it is complete. Then weights, moments, the pool's index, what was consumed, the
published policy and the metrics must equal those of the undisturbed run. Every point is reached at least once in every
configuration that knows it, else the benchmark fails. The last line is one JSON object.

    python benchmarks/fault_table.py [--kills 200] [--seed 1] [--configurations full replay always] [--jobs 2]
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from faults.command import NAMES, make_parser, print_table
from faults.points import OPENING, POINTS, RANDOM, RECOVERING
from faults.processes import Fault, differences, run_process

ROUNDS = 12
"""How often a point is tried anew that a run did not come to."""
MOST_KILLS = 4
"""Kills in one run."""
BETWEEN = "between checkpoint's objects and manifest"


@dataclass(frozen=True)
class Undisturbed:
    """What a run of a configuration comes to when nobody kills it, how often it comes to each point, and how fast."""

    outcome: Mapping[str, str]
    calls: Mapping[str, int]
    seconds: float


@dataclass
class Story:
    """One run: how it was killed, and what was different in the end; `missed` are points that it did not come to."""

    configuration: str
    kills: list[tuple[str, str]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def measure(configuration: str) -> Undisturbed:
    """Run once without a kill, and once with one in the middle, to know what a recovery is made of."""
    with tempfile.TemporaryDirectory() as folder:
        golden = run_process(configuration, Path(folder), None)
    assert golden.outcome is not None and golden.counts is not None, golden.error
    with tempfile.TemporaryDirectory() as folder:
        half = golden.counts[BETWEEN] // 2 + 1
        assert run_process(configuration, Path(folder), Fault(BETWEEN, half)).struck
        resumed = run_process(configuration, Path(folder), None)
    assert resumed.counts is not None, resumed.error
    calls = {**golden.counts, RECOVERING: resumed.counts[RECOVERING]}
    for point in POINTS:
        unknown = configuration == "full" and point.increments_only
        assert (calls.get(point.name, 0) == 0) == unknown, f"{configuration}: {calls.get(point.name, 0)} {point.name}"
    return Undisturbed(golden.outcome, calls, resumed.seconds)


def tell_story(configuration: str, kills: Sequence[Fault], undisturbed: Undisturbed) -> Story:
    """Begin a run, kill it as planned, resume it to its end, and compare."""
    story = Story(configuration)
    with tempfile.TemporaryDirectory() as folder:
        for kill in (*kills, None):
            end = run_process(configuration, Path(folder), kill)
            if kill is not None and end.struck is None:
                story.missed.append(kill.point)
            elif kill is not None and end.struck is not None:
                story.kills.append((kill.point, end.struck))
            if end.error is not None:
                story.problems.append(end.error)
            if end.struck is None:
                break
        # Who came to its end earlier than planned does not come to what was still to follow.
        story.missed += [kill.point for kill in kills[len(story.kills) + len(story.missed) :]]
    if end.error is None:
        story.problems += differences(end.outcome or {}, undisturbed.outcome)
    return story


def plan(
    wanted: Sequence[tuple[str, str]], undisturbed: Mapping[str, Undisturbed], rng: random.Random
) -> list[tuple[str, list[Fault]]]:
    """Runs with one to `MOST_KILLS` kills each that hold all (configuration, point) that are wanted."""
    runs: list[tuple[str, list[Fault]]] = []
    for configuration, known in undisturbed.items():
        points = [point for name, point in wanted if name == configuration]
        rng.shuffle(points)
        while points:
            size = rng.randint(1, MOST_KILLS)
            chosen, points = points[:size], points[size:]
            # A run is opened once, and recovers from a kill only.
            chosen.sort(key=lambda point: (point == RECOVERING, point != OPENING))
            if chosen[0] == RECOVERING:
                chosen.insert(0, BETWEEN)
            runs.append((configuration, [_kill(point, known, len(chosen), rng) for point in chosen]))
    return runs


def _kill(point: str, known: Undisturbed, kills: int, rng: random.Random) -> Fault:
    """A kill at some call of a point, early enough that a run comes to all of its kills for the most part."""
    if point == RANDOM:
        return Fault(point, seconds=rng.uniform(0.0, known.seconds))
    share = 1 if point in (OPENING, RECOVERING) else kills
    return Fault(point, call=rng.randint(1, max(1, known.calls[point] // share)))


def run_all(cells: Sequence[tuple[str, str]], seed: int, jobs: int) -> list[Story]:
    """Tell stories until every cell was reached as often as it is there; raises RuntimeError when one is not."""
    rng, stories, wanted = random.Random(seed), list[Story](), list(cells)
    names = dict.fromkeys(name for name, _ in cells)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        undisturbed = dict(zip(names, pool.map(measure, names), strict=True))
        for _ in range(ROUNDS):
            futures = [
                pool.submit(tell_story, name, kills, undisturbed[name])
                for name, kills in plan(wanted, undisturbed, rng)
            ]
            wanted = []
            for future in futures:
                story = future.result()
                stories.append(story)
                wanted += [(story.configuration, point) for point in story.missed]
                for problem in story.problems:
                    told = "; ".join(f"{point} ({event})" for point, event in story.kills)
                    print(f"NOT EQUAL, {story.configuration}, killed: {told}\n    {problem}", flush=True)
                print(".", end="", file=sys.stderr, flush=True)
            if not wanted:
                return stories
    raise RuntimeError(f"seed {seed}: no run came to {sorted(set(wanted))}")


def main() -> None:
    """Kill, compare and print; exits with 1 when a run ended otherwise."""
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=200, help="at the least, and one of each kind")
    arguments = parser.parse_args()
    absent = {point.name for point in POINTS if point.increments_only}
    kinds = [
        (name, point) for point in NAMES for name in arguments.configurations if name != "full" or point not in absent
    ]
    cells = list(islice(cycle(kinds), max(arguments.kills, len(kinds))))
    stories = run_all(cells, arguments.seed, arguments.jobs)
    kills, equal = Counter[str](), Counter[str]()
    for story in stories:
        points = [point for point, _ in story.kills]
        kills.update(points)
        equal.update(() if story.problems else points)
    table = print_table("kills", kills, equal)
    unequal = sum(bool(story.problems) for story in stories)
    print(json.dumps({"kills": kills.total(), "runs": len(stories), "points": table, "unequal": unequal}))
    sys.exit(1 if unequal else 0)


if __name__ == "__main__":
    main()
