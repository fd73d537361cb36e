"""Rows committed a second, and groups drawn, against what the hardware and raw pyarrow allow.

    python benchmarks/pool.py [--rows 1024] [--tokens 256] [--repeats 7] [--folder DIR]

Commits are measured side by side with their limits, in turn, on the same rows: `write_segment` (rows to durable
segment), the bare `pyarrow.parquet.write_table` of the same table with the same settings and no sync, and a copy of
the same bytes in memory. Draws of 256 groups run on pools of 4 thousand, 100 thousand and 1 million groups: `sample`
is the weighted draw alone, `draw` is `Pool.draw` with decay, fresh share, prompt cap and dealing. Figures are medians;
the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gyre_core.config.sections import ExperienceConfig
from gyre_core.experience.contents import SegmentState
from gyre_core.experience.index import INDEX_COLUMNS, GroupIndex
from gyre_core.experience.pool import Pool
from gyre_core.experience.priority import sample_without_replacement
from gyre_core.experience.schema import groups_to_table
from gyre_core.experience.segments import write_segment
from gyre_core.experience.snapshot import PoolState, Snapshot
from gyre_core.storage import open_storage
from gyre_core.types import Completion, PolicyVersion, Prompt, Rollout, RolloutGroup, Score

SAMPLES = 8
VERSION = PolicyVersion(1, 0)


def make_groups(rows: int, tokens: int) -> list[RolloutGroup]:
    """Groups of eight completions, `tokens` tokens each, with reference log-probabilities."""
    rng = np.random.default_rng(0)
    groups: list[RolloutGroup] = []
    for number in range(rows // SAMPLES):
        prompt = Prompt(
            f"p{number}", "question " * 20, "question " * 20, np.arange(100, dtype=np.int32), {"answer": "7"}
        )
        rollouts: list[Rollout] = []
        for index in range(SAMPLES):
            ids = rng.integers(0, 150_000, tokens).astype(np.int32)
            logs = -rng.exponential(size=tokens).astype(np.float32)
            completion = Completion(f"g{number}", index, ids, logs, "word " * tokens, "stop", VERSION, 0.0, 1.0)
            rollouts.append(Rollout(completion, Score({"exact": 1.0}, rng.random(), "scored"), logs - 0.1))
        groups.append(RolloutGroup(f"g{number}", prompt, 1, VERSION, tuple(rollouts)))
    return groups


def centred(groups: Sequence[RolloutGroup]) -> list[NDArray[np.float32]]:
    return [(group.rewards - group.rewards.mean()).astype(np.float32) for group in groups]


def medians(repeats: int, *functions: Callable[[int], object]) -> list[float]:
    """Median seconds of each function, called in turn with the number of the repeat; the first call warms up."""
    seconds: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 1):
        for function, taken in zip(functions, seconds, strict=True):
            started = time.perf_counter()
            function(repeat)
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken[1:]) for taken in seconds]


def measure_commits(rows: int, tokens: int, repeats: int, folder: Path) -> dict[str, float]:
    """Rows per second of a segment's commit, of the bare Parquet write and of the copy in memory."""
    groups = make_groups(rows, tokens)
    storage = open_storage(folder / "storage")
    table = groups_to_table("00000001-0000", groups)
    buffers = np.frombuffer(np.random.default_rng(0).bytes(table.nbytes), dtype=np.uint8)

    def commit(repeat: int) -> None:
        write_segment(storage, f"00000001-{repeat:04d}", groups)

    def raw_write(repeat: int) -> None:
        pq.write_table(
            table, folder / f"raw-{repeat}.parquet", compression="zstd", use_dictionary=False, write_page_checksum=True
        )

    def read(repeat: int) -> None:
        pool = Pool(storage, ExperienceConfig(buffer_size=10 * rows), epoch=repeat + 1)
        pool.admit(f"00000001-{repeat:04d}", 1, centred, 0.0,
                   skip_dead_groups=True)  # fmt: skip

    names = ("commit", "raw_parquet_write", "memory_copy", "admit")
    taken = medians(repeats, commit, raw_write, lambda _: buffers.copy(), read)
    return {f"{name}_rows_per_second": rows / seconds for name, seconds in zip(names, taken, strict=True)}


def make_pool(groups: int, folder: Path) -> Pool:
    """A pool of live groups, as a snapshot gives it back: 32 groups a segment, every other one used once."""
    rng = np.random.default_rng(0)
    segments = -(-groups // 32)
    columns = {name: np.zeros(groups, kind) for name, kind in INDEX_COLUMNS.items()}
    columns |= {
        "segment": np.arange(groups) // 32,
        "position": np.arange(groups) % 32,
        "prompt": rng.integers(0, groups, groups).astype(np.uint64),
        "samples": np.full(groups, SAMPLES),
        "admitted_at": np.sort(rng.random(groups) * 3600),
        "mean_reward": rng.random(groups),
        "spread": rng.random(groups),
        "uses": np.arange(groups) % 2,
    }
    index = GroupIndex()
    index.append([f"g{number}" for number in range(groups)], columns)
    advantages = [np.ones(SAMPLES, np.float32)] * 32
    states = {number: SegmentState(f"{number:08d}-0000", 1, advantages) for number in range(segments)}
    snapshot: pa.Table = Snapshot.take(index, states, PoolState(0, 0, [], 0, 0)).to_table()
    config = ExperienceConfig(buffer_size=groups * SAMPLES, max_prompt_share=0.25)
    return Pool.restore(open_storage(folder), config, 1, snapshot)


def measure_draws(groups: int, repeats: int, folder: Path) -> dict[str, float]:
    """Milliseconds to draw 256 of the groups."""
    pool = make_pool(groups, folder)
    priorities = np.random.default_rng(1).random(groups)

    def draw(repeat: int) -> None:
        pool.draw(
            np.random.default_rng(repeat),
            minibatches=8,
            groups_per_minibatch=32,
            now=3600.0,
            current=VERSION,
            on_policy=False,
        )

    taken = medians(
        repeats,
        lambda repeat: sample_without_replacement(priorities, 256, np.random.default_rng(repeat)),
        draw,
        lambda _: priorities.copy(),
    )
    return {f"{name}_ms": 1e3 * seconds for name, seconds in zip(("sample", "draw", "memory_copy"), taken, strict=True)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4_000, 100_000, 1_000_000])
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder without it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        result: dict[str, object] = {"rows": arguments.rows, "tokens": arguments.tokens}
        result |= measure_commits(arguments.rows, arguments.tokens, arguments.repeats, folder)
        for key, value in result.items():
            print(f"{key:32} {value:>16,.0f}")
        for groups in arguments.sizes:
            draws = measure_draws(groups, arguments.repeats, folder / "empty")
            print(f"256 of {groups:>9,} groups: " + ", ".join(f"{key} {value:.2f}" for key, value in draws.items()))
            result[f"256_of_{groups}"] = {key: round(value, 3) for key, value in draws.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
