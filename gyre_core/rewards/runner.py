"""Where reward functions run: behind one protocol, in processes beside this one by default."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from gyre_core.config.sections import RewardConfig
from gyre_core.rewards.calls import CallResult, FunctionCall, joined, make_call
from gyre_core.rewards.loader import Signature
from gyre_core.rewards.process import RewardProcess
from gyre_core.rewards.values import RewardError


class FunctionRunner(Protocol):
    """Runs the reward functions of one scorer, which starts it and closes it."""

    async def start(self) -> Mapping[str, Signature]:
        """Load the functions; returns what each asks for, by name.

        Raises ValueError for a function that cannot be loaded and for what else is the user's mistake.
        """
        ...

    async def run(self, calls: Sequence[FunctionCall]) -> list[CallResult]:
        """What comes of each call, after retries; all are of the same rows, and there is one row at least.

        May be called concurrently. Raises RewardError when a function breaks its contract. Cancelled, it leaves
        nothing running.
        """
        ...

    def close(self) -> None:
        """End the functions wherever they run; calls under way raise RewardError."""
        ...


@dataclass(frozen=True, slots=True)
class FunctionSet:
    """The reward functions of a configuration, as a process loads them: `name → path`, and which verl calls."""

    functions: Mapping[str, str]
    verl: tuple[str, ...]
    base_folder: Path

    @classmethod
    def of(cls, config: RewardConfig, base_folder: Path) -> FunctionSet:
        """The configured functions; files are relative to `base_folder`."""
        names = function_names(config)
        entries = zip(names, config.functions, strict=True)
        return cls(names, tuple(name for name, entry in entries if entry.signature == "verl"), base_folder.resolve())

    def process(self) -> RewardProcess:
        """A process for them, which starts when it is first needed."""
        return RewardProcess(self.functions, self.base_folder, self.verl)

    def to_json(self) -> str:
        """The set as text, the same for the same set."""
        return json.dumps([dict(self.functions), self.verl, str(self.base_folder)])

    @classmethod
    def from_json(cls, text: str) -> FunctionSet:
        """The set that `to_json` wrote."""
        functions, verl, base_folder = json.loads(text)
        return cls(functions, tuple(verl), Path(base_folder))


class ProcessRunner:
    """Runs the functions in `reward.processes` processes beside this one, a call's rows shared out between them.

    Calls wait for a free process.
    """

    def __init__(self, config: RewardConfig, base_folder: Path) -> None:
        self._config = config
        functions = FunctionSet.of(config, base_folder)
        self._processes = [functions.process() for _ in range(config.processes if functions.functions else 0)]
        self._free: SimpleQueue[RewardProcess] = SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        # As many threads as processes, so that a thread always finds a free one.
        self._threads = ThreadPoolExecutor(max(len(self._processes), 1), thread_name_prefix="reward")
        self._closed = False

    async def start(self) -> Mapping[str, Signature]:
        """Start the processes and load the functions; raises ValueError for one that cannot be loaded."""
        starts = [asyncio.wrap_future(self._threads.submit(process.start)) for process in self._processes]
        every = await asyncio.gather(*starts)
        return every[0] if every else {}

    async def run(self, calls: Sequence[FunctionCall]) -> list[CallResult]:
        """The calls' results, one function after another."""
        return [await self._run(call) for call in calls]

    def close(self) -> None:
        """Kill the processes; unfinished calls raise RewardError. Returns within about a second."""
        self._closed = True
        for process in self._processes:
            process.close()
        self._threads.shutdown()

    async def _run(self, call: FunctionCall) -> CallResult:
        if self._closed:
            raise RewardError("the processes of the reward functions are closed")
        parts = [self._threads.submit(self._run_part, part) for part in call.split(len(self._processes))]
        return joined(await asyncio.gather(*map(asyncio.wrap_future, parts)))

    def _run_part(self, call: FunctionCall) -> CallResult:
        process = self._free.get()
        try:
            return make_call(process, call, self._config.timeout, self._config.retries)
        finally:
            self._free.put(process)


def function_names(config: RewardConfig) -> dict[str, str]:
    """Each function's name → its path, in order: what follows the colon, or the whole path where two share that.

    Metrics, score parts and errors use the name, so that a path's slashes become dots. Raises ValueError for a path
    that is given twice.
    """
    paths = [function.path for function in config.functions]
    short = [path.rpartition(":")[2] for path in paths]
    shared = {name for name, count in Counter(short).items() if count > 1}
    whole = [path.strip("/").replace("/", ".") for path in paths]
    names = {long if name in shared else name: path for name, long, path in zip(short, whole, paths, strict=True)}
    if len(names) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise ValueError(f"reward.functions: '{twice}' is given twice; give it once, with the sum of the weights")
    return names
