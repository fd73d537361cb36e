"""Tiny training runs: their configuration, faults inside them, and what two equal runs have in common."""

import inspect
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import flows.train
from gyre_core.config import GyreConfig
from gyre_core.experience.consumption import read_consumption
from gyre_core.monitor.metrics import read_metrics
from gyre_core.monitor.names import UNREPEATABLE
from gyre_core.training import stages
from gyre_core.training.build import open_run

REWARDS = Path(__file__).with_name("reward_functions.py")
STAGES = (stages.rollout, stages.reward, stages.sample, stages.update)
STORAGE_METHODS = ("read", "create", "replace", "create_file", "list", "folders", "exists", "size", "delete")

TINY = {
    "experiment": {"name": "tiny", "seed": 3, "steps": 3, "threads": 1},
    "models": {"tiny": {"hidden_size": 16, "layers": 1}, "warm_start": {"max_steps": 0}},
    "data": {"size": 64, "evaluation_size": 0},
    "rollout": {"batch_size": 8, "samples_per_prompt": 4, "groups_per_request": 4, "max_tokens": 4},
    "reward": {"functions": [{"path": f"{REWARDS}:even_digits"}]},
    "learning": {"lr": 1e-2, "update_steps": 4, "kl_coef": 0.01},
    "evaluation": {"every": 0, "prompts": 4},
    "monitor": {"tensorboard": False},
}
"""Three steps of 8 prompts x 4 completions with 4 updates each; one checkpoint, at the end."""
EVERY_STEP = {"interval": 1e-6}
"""Settings of `checkpoint` for one after every step."""


def tiny_config(output: Path, **changes: dict) -> GyreConfig:
    """`TINY` with its output in a folder, and some sections' settings changed."""
    sections = {name: TINY.get(name, {}) | changes.get(name, {}) for name in TINY | changes}
    sections["experiment"] = {"output": str(output), **sections["experiment"]}
    return GyreConfig.model_validate(sections)


class InjectedError(Exception):
    """A fault that a test put into a run."""


@dataclass
class Fault:
    """Raises at the `call`-th call (counted from 0) of a method in the given step, before or after its effect.

    `target` finds the object in a run, and `argument` is what the call's first argument must contain. `times` calls
    fail in a row.
    """

    target: str
    method: str
    argument: str = ""
    after: bool = False
    call: int = 0
    times: int = 1
    step: int = 2
    raised: int = field(default=0, init=False)

    def __str__(self) -> str:
        called = f"{self.target}.{self.method}({self.argument})"
        return f"{'after' if self.after else 'before'} {called} {self.call}"

    def inject(self, run) -> None:
        """Put the fault in front of the real method."""
        target = run
        for name in self.target.split("."):
            target = getattr(target, name)
        real, calls = getattr(target, self.method), 0

        def call(*arguments, **options):
            nonlocal calls
            matches = run.step == self.step - 1 and self.argument in str(arguments[:1])
            calls += matches
            due = matches and calls > self.call and self.raised < self.times
            if due and not self.after:
                self._raise()
            result = real(*arguments, **options)
            return self._raise_behind(result) if due else result

        setattr(target, self.method, call)

    def _raise_behind(self, result):
        if not inspect.iscoroutine(result):
            self._raise()

        async def wait_and_raise():
            await result
            self._raise()

        return wait_and_raise()

    def _raise(self) -> None:
        self.raised += 1
        raise InjectedError(str(self))


def fail_everywhere(run, step: int) -> set[str]:
    """Make every storage operation of a step fail twice: once before it takes effect, and once after.

    Returns the faults that were raised, which grow as the run goes.
    """
    raised: set[str] = set()

    def fail_once(point: str) -> None:
        if run.step == step - 1 and point not in raised:
            raised.add(point)
            raise InjectedError(point)

    def wrap(method: str):
        real = getattr(run.storage, method)

        def call(*arguments):
            fail_once(f"before {method} {arguments[:1]}")
            result = real(*arguments)
            fail_once(f"after {method} {arguments[:1]}")
            return result

        return call

    for method in STORAGE_METHODS:
        setattr(run.storage, method, wrap(method))
    return raised


@contextmanager
def optimizer_fault(run, call: int):
    """Raise once in step 2, when the `call`-th minibatch has moved the weights and the optimiser not yet returned."""
    calls = []

    def hook(*_):
        if run.step == 1:
            calls.append(1)
            if len(calls) == call + 1:
                raise InjectedError("inside the optimiser step")

    handle = register_optimizer_step_post_hook(hook)
    try:
        yield calls
    finally:
        handle.remove()


async def take_steps(run, attempts: int = 2, last: int | None = None) -> None:
    """The steps of a run up to `last` (default: all) in a plain loop, each tried up to `attempts` times."""
    for step in range(run.step + 1, (last or run.config.experiment.steps) + 1):
        for attempt in range(1, attempts + 1):
            try:
                for stage in STAGES:
                    await stage(run, step)
                await run.finish(step)
                break
            except InjectedError:
                if attempt == attempts:
                    raise
    await run.publisher.settled()


@dataclass(frozen=True)
class Outcome:
    """What a run learned, from what, and what it said of it."""

    tensors: dict[str, torch.Tensor]
    counters: dict[str, int]
    consumed: dict[int, list]
    metrics: dict[int, dict[str, str]]

    def assert_equals(self, other: "Outcome") -> None:
        """Equal bit for bit."""
        assert self.tensors.keys() == other.tensors.keys()
        for name, tensor in self.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), f"{name} differs"
        assert self.counters == other.counters
        assert self.consumed == other.consumed
        assert self.metrics == other.metrics


def outcome(run) -> Outcome:
    """What a run has come to; steps that several epochs drew count as the newest drew them."""
    tensors, counters = run.learner.state()
    consumed = {}
    for epoch in range(1, run.epoch + 1):
        for step in range(1, run.step + 1):
            record = read_consumption(run.storage, epoch, step)
            if record is not None:
                consumed[step] = [
                    (number, minibatch.lr, minibatch.kl_coef, group.group_id, group.weight, group.advantages.tobytes())
                    for number, minibatch in enumerate(record.minibatches)
                    for group in minibatch.groups
                ]
    rows = read_metrics(run.folder.path)
    # Steps that overlap: how much of the next is there when the learner becomes free depends on the clock.
    left_out = (*UNREPEATABLE, "experience/fill")
    metrics = {
        row.step: {name: repr(value) for name, value in row.metrics.items() if not name.startswith(left_out)}
        for row in rows
    }
    assert len(metrics) == len(rows), "a step has two lines"
    learned = {name: tensor.clone() for name, tensor in tensors.items()}
    return Outcome(learned, counters, consumed, metrics)


async def loop_outcome(config: GyreConfig) -> Outcome:
    """The outcome of an undisturbed run in a plain loop."""
    run = await open_run(config)
    try:
        await take_steps(run, attempts=1)
        return outcome(run)
    finally:
        await run.close()


@contextmanager
def opened_runs(monkeypatch, *prepare):
    """Collects the runs that the train flow opens, each handed to the functions `prepare` first."""
    runs = []

    async def open_and_prepare(config, **options):
        run = await open_run(config, **options)
        for function in prepare:
            function(run)
        runs.append(run)
        return run

    with monkeypatch.context() as patch:
        patch.setattr(flows.train, "open_run", open_and_prepare)
        yield runs
