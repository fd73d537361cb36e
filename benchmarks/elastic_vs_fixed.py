"""What elastic workers save against fixed ones, in a simulated day: production scaler, other laws, and an oracle.

Six traces of demand (`benchmarks/traces`, described there, or any folder of such files), each lived through by every
policy with the same seeds: `gyre` (the scaler of `gyre_core/elastic` with its defaults, 4 to 24 workers),
`gyre-without-hysteresis` (no dead band, no stabilisation, no second decision, no cooling), `fixed:N`, `hpa` (the law of
Kubernetes' autoscaler on fill) and `oracle` (each minute the fewest workers that meet its demand). Figures are means
over the seeds; `over_oracle` is the average number of workers over the oracle's. The last line is one JSON object.

    python benchmarks/elastic_vs_fixed.py [--traces DIR] [--seeds 30] [--policy NAME ...] [--picture FILE --trace NAME]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from elastic.picture import draw
from elastic.policies import fill_band, make_policy
from elastic.world import DAY, REVERSAL_SECONDS, OracleWorld, Trace, World, read_trace

POLICIES = ("gyre", "fixed:16", "fixed:9", "hpa", "gyre-without-hysteresis", "oracle")
COLUMNS = (
    "average_workers",
    "peak_workers",
    "throughput",
    "stall",
    "over_oracle",
    "actions_per_day",
    "reversals_per_day",
)
LEAST_THROUGHPUT, MOST_STALL, MOST_OVER_ORACLE, MOST_REVERSALS = 0.99, 0.005, 1.15, 12.0

Figures = dict[str, float]


def reversals(actions: Sequence[tuple[int, int]]) -> int:
    """Actions against the one before, within `REVERSAL_SECONDS` of it."""
    return sum(was != now and later - sooner <= REVERSAL_SECONDS for (sooner, was), (later, now) in pairwise(actions))


def figures(world: World, lanes: slice) -> Figures:
    """What a policy came to, the mean over its lanes."""
    trace, meters = world.trace, world.meters
    seconds = 60 * len(trace.demand)
    average = meters.total_held[lanes].mean() / seconds
    per_day = DAY / seconds
    actions = world.actions[lanes]
    values = (
        average,
        meters.peak[lanes].mean(),
        meters.total_consumed[lanes].mean() / (60 * trace.demand.sum()),
        meters.total_stall[lanes].mean() / seconds,
        average / trace.oracle.mean(),
        np.mean([len(lane) for lane in actions]) * per_day,
        np.mean([reversals(lane) for lane in actions]) * per_day,
    )
    return {name: round(float(value), 4) for name, value in zip(COLUMNS, values, strict=True)}


def live_through(trace: Trace, names: Sequence[str], seeds: int) -> dict[str, Figures]:
    """The figures of each policy on a trace."""
    asked = [name for name in names if name != "oracle"]
    policies = [make() for make in map(make_policy, asked) for _ in range(seeds)]
    world = World(trace, policies, [seed for _ in asked for seed in range(seeds)])
    world.run()
    found = {name: figures(world, slice(k * seeds, (k + 1) * seeds)) for k, name in enumerate(asked)}
    if "oracle" in names:
        oracle = OracleWorld(trace)
        oracle.run()
        found["oracle"] = figures(oracle, slice(None))
    return {name: found[name] for name in names}


def missed_bars(traces: dict[str, dict[str, Figures]]) -> list[str]:
    """What `gyre` was to reach and did not."""
    missed = [
        f"{name}: {column} {values[column]:g}"
        for name, policies in traces.items()
        if (values := policies.get("gyre"))
        for column, holds in (
            ("throughput", values["throughput"] >= LEAST_THROUGHPUT),
            ("stall", values["stall"] <= MOST_STALL),
            ("over_oracle", values["over_oracle"] <= MOST_OVER_ORACLE),
        )
        if not holds
    ]
    mean = np.mean([policies["gyre"]["reversals_per_day"] for policies in traces.values() if "gyre" in policies] or [0])
    return missed + ([f"mean: reversals_per_day {mean:g}"] if mean > MOST_REVERSALS else [])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path(__file__).parent / "traces", help="folder of CSV files")
    parser.add_argument("--seeds", type=int, default=30, help="worlds of each trace and policy")
    parser.add_argument("--policy", nargs="+", default=POLICIES, help="policies; fixed:N for any N")
    parser.add_argument("--picture", type=Path, help="draw gyre's first world of one trace into this file, and stop")
    parser.add_argument("--trace", help="the trace to draw")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds} leaves nothing to measure; give 1 or more.")
    for name in arguments.policy:
        if name != "oracle":
            try:
                make_policy(name)
            except ValueError as error:
                parser.error(str(error))
    if (arguments.picture is None) != (arguments.trace is None):
        parser.error("--picture and --trace go together; give both, or none.")
    return arguments


def main() -> None:
    """Measure and print, or draw."""
    arguments = parse_arguments()
    files = sorted(arguments.traces.glob(f"{arguments.trace or '*'}.csv"))
    if not files:
        raise SystemExit(f"--traces {arguments.traces} holds no {arguments.trace or '*'}.csv; name a folder that does.")
    if arguments.picture is not None:
        world = World(read_trace(files[0]), [make_policy("gyre")()], [0])
        world.run()
        draw(world, arguments.picture, fill_band())
        return
    print(f"{'trace':18}{'policy':25}" + "".join(f"{name:>19}" for name in COLUMNS))
    traces: dict[str, dict[str, Figures]] = {}
    for file in files:
        traces[file.stem] = live_through(read_trace(file), arguments.policy, arguments.seeds)
        for policy, values in traces[file.stem].items():
            print(f"{file.stem:18}{policy:25}" + "".join(f"{value:19.4f}" for value in values.values()), flush=True)
    for sentence in missed_bars(traces):
        print(f"missed: {sentence}")
    print(json.dumps({"traces": traces}))


if __name__ == "__main__":
    main()
