"""What the tables of kills and of freezes share as commands: their settings, and how a table is printed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from faults.points import POINTS, RANDOM
from faults.processes import CONFIGURATIONS

NAMES = (*(point.name for point in POINTS), RANDOM)
"""All points, in the order of the tables."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The settings that both have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    return parser


def print_table(faults: str, counts: Mapping[str, int], equal: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Print how many faults (`kills` or `freezes`) there were at each point and how many runs ended equal after them.

    Returns the same, by point.
    """
    table = {point: {faults: counts[point], "equal": equal[point]} for point in NAMES if counts.get(point)}
    print(f"\n{'point':44}{faults:>9}{'equal':>7}{'not equal':>11}")
    for point, row in table.items():
        print(f"{point:44}{row[faults]:9}{row['equal']:7}{row[faults] - row['equal']:11}")
    return table
