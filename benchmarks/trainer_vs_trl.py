"""Samples per second of Gyre against TRL: same start, prompts, reward, samples and updates a step, in turn.

Each side is a process of its own that stays warm and takes a block of steps at a command; the blocks alternate, so
that a busy machine hits both. TRL lives in an environment of its own, which `make trl` creates. The cases:

- `core`: a policy of 77 thousand parameters on sums of five tokens, one thread; Gyre in memory, without Prefect;
- `disk`: the same with Gyre's data on disk, durable at every stage as in training;
- `product`: 0.85 million parameters, prompts of 128 tokens, completions of 24 in the mean and 64 at the most, two
  threads; Gyre as `gyre train` runs it, on disk and with Prefect.

The last line is one JSON object; `ratio` is the quotient of the medians over the blocks, `cpu_ratio` that of the
CPU's time, which a busy machine changes less.

    python benchmarks/trainer_vs_trl.py [--cases core disk product] [--blocks 8]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from gyre_core.config.sections import DataConfig, ModelsConfig, TinyModelConfig, WarmStartConfig
from gyre_core.data.prompts import PromptRow, load_prompts
from gyre_core.policy.models import load_policy, save_policy
from gyre_core.policy.warm_start import warm_start

HERE = Path(__file__).parent
TRL_PYTHON = HERE.parent / ".venv-trl" / "bin" / "python"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT_TOKENS, LONGEST_ANSWER, MEAN_ANSWER = 128, 63, 28

Block = dict[str, Any]
"""What a side says of a block of steps: its seconds, and figures of each step."""


@dataclass(frozen=True)
class Case:
    """How a case is made and measured; both sides read it as JSON, with the folder of its policy and prompts."""

    start: str
    steps: int
    """Steps in a block."""
    threads: int
    updates: int
    max_tokens: int
    lr: float
    trl_rows: int
    """Rows of TRL's micro-batches: of 16, 32 and all rows of an update those with which it is fastest."""
    storage: str | None = None
    prefect: bool = False
    prompts: int = 32
    samples: int = 8
    seed: int = 1


SUMS = Case("sums", steps=10, threads=1, updates=2, max_tokens=5, lr=1e-3, trl_rows=128)
CASES = {
    "core": replace(SUMS, storage="memory://trainer-vs-trl"),
    "disk": SUMS,
    "product": Case("series", steps=1, threads=2, updates=2, max_tokens=64, lr=3e-4, trl_rows=32, prefect=True),
}


class Side:
    """A process that takes steps at a command."""

    def __init__(self, name: str, python: Path | str, case: Case, folder: Path) -> None:
        self.name = name
        self.blocks: list[Block] = []
        self.log = folder / f"{name}.log"
        settings = json.dumps({"folder": str(folder), **asdict(case)})
        threads = str(case.threads)
        self._process = subprocess.Popen(
            [str(python), str(HERE / "sides" / f"{name}_side.py"), settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"},
        )

    def __enter__(self) -> Side:
        self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def take(self, steps: int) -> Block:
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        self.blocks.append(self._read())
        return self.blocks[-1]

    def _read(self) -> Block:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the side {self.name} ended; its log:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)


def series_rows(count: int, seed: int, filler: Sequence[int]) -> list[PromptRow]:
    """Letters to be continued through the alphabet, as many as the prompt says: `...;d05=` is `efghi`.

    Before that stand random letters, as many as one of `filler`, drawn evenly. Lengths of answers are geometric, with
    the mean `MEAN_ANSWER` up to what is cut off above `LONGEST_ANSWER`.
    """
    rng = np.random.default_rng(seed)
    rows: list[PromptRow] = []
    for number in range(count):
        noise = "".join(rng.choice(list(LETTERS), rng.choice(filler)))
        start, length = int(rng.integers(26)), min(int(rng.geometric(1 / MEAN_ANSWER)), LONGEST_ANSWER)
        answer = "".join(LETTERS[(start + place) % 26] for place in range(1, length + 1))
        rows.append(PromptRow(str(number), f"{noise};{LETTERS[start]}{length:02d}=", {"answer": answer}, "series"))
    return rows


def prepare(start: str, folder: Path) -> None:
    """Write the warm-started policy and the prompts that both sides load."""
    if start == "sums":
        splits = load_prompts(DataConfig(size=3008, evaluation_size=0), seed=1)
        rows, shape = splits.training, TinyModelConfig()
        stages = [(splits.warm_start, WarmStartConfig())]
    else:
        full = [PROMPT_TOKENS - 6]
        rows, shape = series_rows(1024, seed=1, filler=full), TinyModelConfig(hidden_size=176, layers=3)
        # Short prompts first, which cost a third, then a few of the full length.
        stages = [
            (series_rows(20000, seed=2, filler=range(24)), WarmStartConfig(max_steps=300, lr=2e-3, batch_size=64)),
            (series_rows(2000, seed=3, filler=full), WarmStartConfig(max_steps=60, lr=1e-3, batch_size=32)),
        ]
    policy = load_policy(ModelsConfig(tiny=shape, device="cpu"), seed=1)
    for solved, training in stages:
        result = warm_start(policy, solved, training, seed=1)
        print(f"{start}: {result.accuracy:.0%} of the answers exact after {result.steps} steps", flush=True)
    save_policy(folder / "policy", policy.model, policy.tokenizer)
    lines = [json.dumps({"prompt": row.prompt, **row.columns}) for row in rows]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def measure(case: Case, folder: Path, blocks: int) -> tuple[Side, Side]:
    """Alternate blocks of both sides; the first of each is for warming up, and only its learning counts."""
    with ExitStack() as stack:
        gyre = stack.enter_context(Side("gyre", sys.executable, case, folder))
        trl = stack.enter_context(Side("trl", TRL_PYTHON, case, folder))
        for block in range(blocks + 1):
            pair = gyre.take(case.steps), trl.take(case.steps)
            print(
                f"block {block}: "
                + "; ".join(
                    f"{1000 * item['seconds'] / case.steps:.0f} ms a step, "
                    f"{1000 * item['cpu_seconds'] / case.steps:.0f} of a CPU"
                    for item in pair
                ),
                flush=True,
            )
    return gyre, trl


def summarise(side: Side, case: Case) -> dict[str, float]:
    """Medians and means over the blocks but the first; padding is its share of the update's token slots."""
    samples = case.prompts * case.samples * case.steps
    measured = side.blocks[1:]
    summary = {
        "samples_per_second": statistics.median(samples / block["seconds"] for block in measured),
        "tokens_per_second": statistics.median(
            samples * statistics.fmean(block["lengths"]) / block["seconds"] for block in measured
        ),
        "cpu_seconds_per_step": statistics.median(block["cpu_seconds"] / case.steps for block in measured),
        "mean_length": statistics.fmean(_joined(measured, "lengths")),
        "padding_share": statistics.fmean(_joined(measured, "padding")),
        "peak_memory_mib": side.blocks[-1]["peak_memory_bytes"] / 2**20,
    }
    return {name: round(value, 3) for name, value in summary.items()}


def curve(side: Side) -> list[float]:
    """Mean reward over each of eight equal parts of the steps, or of fewer where there are not as many."""
    rewards = _joined(side.blocks, "rewards")
    return [round(float(part.mean()), 3) for part in np.array_split(rewards, min(8, len(rewards)))]


def _joined(blocks: Iterable[Block], name: str) -> list[float]:
    return [value for block in blocks for value in block[name]]


def report(name: str, gyre: Side, trl: Side, case: Case) -> Mapping[str, Any]:
    result: dict[str, Any] = {side.name: summarise(side, case) | {"rewards": curve(side)} for side in (gyre, trl)}
    gyre_summary, trl_summary = result["gyre"], result["trl"]
    result["ratio"] = round(gyre_summary["samples_per_second"] / trl_summary["samples_per_second"], 2)
    result["cpu_ratio"] = round(trl_summary["cpu_seconds_per_step"] / gyre_summary["cpu_seconds_per_step"], 2)
    for side in ("gyre", "trl"):
        print(f"{name} {side}: {result[side]}", flush=True)
    return result


def main() -> None:
    """Measure the cases one after the other and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="keeps policies, runs and logs; policies found there are taken")
    arguments = parser.parse_args()
    if not TRL_PYTHON.exists():
        raise SystemExit(f"TRL's environment {TRL_PYTHON.parent.parent} is missing; create it by: make trl")
    torch.set_num_threads(2)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.cases:
            case = CASES[name]
            folder = (arguments.folder or Path(temporary)) / name
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "policy").exists():
                prepare(case.start, folder)
            results[name] = report(name, *measure(case, folder, arguments.blocks), case)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
