"""The storage protocol as a state machine: errors, crashes and freezes at every operation, zombies thawed at any time;
in memory with many examples, and with some on a disk and on S3.

Nothing is lost, nothing is doubled, and no reader sees a torn or foreign object. The examples are the same in every
run (derandomised); a failure prints the steps that lead to it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from actors import Actor, Fault, InjectedCrash, InjectedError
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model_run import Owner, check_objects, group_names, serve

from gyre_core.cluster.epochs import SupersededError, current_epoch
from gyre_core.config.sections import ExperienceConfig
from gyre_core.experience.consumption import read_consumption
from gyre_core.experience.segments import segment_ids, segment_name
from gyre_core.storage import Storage, open_storage

FAULTS = st.none() | st.builds(
    Fault, st.integers(1, 12) | st.integers(1, 60), st.sampled_from(["error", "crash", "freeze"])
)
KEEPS_ALL = {"max_uses": 2, "time_window": 1e9, "buffer_size": 9999}
FORGETS = {"max_uses": 2, "time_window": 3.5, "buffer_size": 12}
EXPECTED = (InjectedError, InjectedCrash, SupersededError)


def memory_storage() -> Storage:
    """A storage in memory that nobody else has."""
    return open_storage(f"memory://{uuid.uuid4().hex}")


class StorageProtocol(RuleBasedStateMachine):
    """One run with its owner and any number of workers, alive, dead or frozen."""

    def __init__(self, place: Callable[[], Storage] = memory_storage) -> None:
        super().__init__()
        self.place = place

    @initialize(pool=st.sampled_from([KEEPS_ALL, KEEPS_ALL, {**KEEPS_ALL, "max_uses": 1}, FORGETS]))
    def start(self, pool: dict[str, float]) -> None:
        self.storage = self.place()
        self.config = ExperienceConfig(**pool, max_prompt_share=1)
        self.forgets = pool == FORGETS
        self.owner: Owner | None = None
        self.owners: list[Owner] = []
        self.zombies: list[Actor] = []
        self.damaged: set[str] = set()
        self.checked: dict[str, bytes] = {}
        self.writers = 0

    def run_actor(self, work, fault: Fault | None) -> Actor:
        """Run the work; an error that nobody injected is a failure."""
        actor = Actor(self.storage, fault)
        actor.run(work)
        self.settle(actor)
        return actor

    def settle(self, actor: Actor) -> None:
        if actor.frozen:
            self.zombies.append(actor)
        elif actor.error is not None and not isinstance(actor.error, EXPECTED):
            raise actor.error

    def run_owner(self, work, fault: Fault | None) -> None:
        """Run the owner's work: an error leaves it alive, for the next try; a crash or a freeze does not."""
        actor = self.run_actor(work, fault)
        if actor.frozen or isinstance(actor.error, InjectedCrash | SupersededError):
            self.owner = None

    @rule(fall_back=st.booleans(), fault=FAULTS)
    def take_over(self, fall_back: bool, fault: Fault | None) -> None:
        owner = Owner(self.config)
        self.owners.append(owner)
        self.owner = owner
        self.run_owner(lambda storage: owner.open(storage, fall_back), fault)
        if owner.pool is None:
            self.owner = None

    @precondition(lambda self: self.owner is not None)
    @rule(fault=FAULTS)
    def train(self, fault: Fault | None) -> None:
        """The owner's step proper, after the workers answered all that it asked for."""
        owner = self.owner
        for _ in range(10):
            if owner.collect(self.storage, reissue=True):
                return self.run_owner(owner.train, fault)
            self.answer_all()
        raise AssertionError("the owner's requests stay unanswered")

    @precondition(lambda self: self.owner is not None)
    @rule(reissue=st.booleans(), fault=FAULTS)
    def advance(self, reissue: bool, fault: Fault | None) -> None:
        owner = self.owner
        self.run_owner(lambda storage: owner.advance(storage, reissue), fault)

    @precondition(lambda self: self.owner is not None)
    @rule(fault=FAULTS)
    def checkpoint(self, fault: Fault | None) -> None:
        owner = self.owner
        self.run_owner(owner.checkpoint, fault)

    @rule(pick=st.integers(0, 3), fault=FAULTS)
    def work(self, pick: int, fault: Fault | None) -> None:
        self.writers += 1
        writer = self.writers
        self.run_actor(lambda storage: serve(storage, writer, pick), fault)

    @rule(steps=st.integers(1, 3))
    def calm(self, steps: int) -> None:
        """Some steps without faults, so that runs get far enough for deletions."""
        self.ensure_owner()
        self.make_steps(steps)

    @precondition(lambda self: self.zombies)
    @rule(pick=st.integers(0, 9))
    def thaw(self, pick: int) -> None:
        zombie = self.zombies.pop(pick % len(self.zombies))
        zombie.thaw()
        # A superseded owner may find that its successor announced the attempt that it was about to announce, or deleted
        # the segment that it was about to read.
        if not isinstance(zombie.error, FileExistsError | FileNotFoundError):
            self.settle(zombie)

    @rule(pick=st.integers(0, 9))
    def damage(self, pick: int) -> None:
        """Break a segment that no owner has read."""
        names = [
            request_id
            for request_id in segment_ids(self.storage)
            if all(owner.pool is None or not owner.pool._ledger.settled(request_id) for owner in self.owners)
        ]
        if names and not self.zombies:
            name = segment_name(self.storage, names[pick % len(names)])
            self.storage.replace(name, self.storage.read(name)[: 40 * pick])
            self.damaged.add(name)

    @invariant()
    def readers_see_whole_objects(self) -> None:
        if hasattr(self, "storage"):
            check_objects(self.storage, self.damaged, self.checked)

    @invariant()
    def nothing_is_doubled(self) -> None:
        if getattr(self, "owner", None) is not None:
            assert max(self.owner.uses().values(), default=0) <= self.config.max_uses
            assert [step for _, step, _ in self.owner.history] == list(range(1, self.owner.step + 1))

    def ensure_owner(self) -> None:
        """A new owner, unless the present one is alive and not superseded."""
        if self.owner is None or self.owner.epoch != current_epoch(self.storage):
            self.take_over(False, None)

    def make_steps(self, count: int, ask: bool = True) -> None:
        """That many steps of the owner, without faults; a lost attempt is issued anew."""
        target = self.owner.step + count
        for _ in range(20 * count):
            if self.owner.step == target:
                return
            self.owner.advance(self.storage, reissue=True, ask=ask)
            self.answer_all()
        raise AssertionError("the run does not get on, although nothing fails any more")

    def answer_all(self) -> None:
        for pick in range(2):
            self.writers += 1
            serve(self.storage, self.writers, pick)

    def teardown(self) -> None:
        """The run recovers, trains on all that it has, and its books are right; then zombies do their worst."""
        if not hasattr(self, "storage"):
            return
        self.ensure_owner()
        self.make_steps(2)
        self.owner.checkpoint(self.storage)
        self.take_over(False, None)
        for point in range(1, 14):
            self.train(Fault(point, "error"))
        self.make_steps(1)
        asked = self.owner.step
        self.make_steps(3 + asked * self.config.max_uses, ask=False)
        self.check_lineage(asked)
        self.owner.checkpoint(self.storage)
        while self.zombies:
            self.thaw(0)
        self.readers_see_whole_objects()
        for fall_back in (True, False):
            heir = Owner(self.config)
            heir.open(self.storage, fall_back)
            heir.pool.training_groups(heir.pool._index.group_ids)
        assert heir.history == self.owner.history
        for folder in self.storage.folders():
            self.storage.delete_folder(folder)

    def check_lineage(self, asked: int) -> None:
        assert self.owner.epoch == current_epoch(self.storage)
        uses = self.owner.uses()
        expected = [name for step in range(1, asked + 1) for name in group_names(step)]
        assert set(uses) <= set(expected)
        if not self.forgets:
            assert uses == dict.fromkeys(expected, self.config.max_uses)
        for epoch, step, groups in self.owner.history:
            record = read_consumption(self.storage, epoch, step)
            assert [group.group_id for group in record.groups] == groups


PROTOCOL = settings(
    max_examples=20,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
TestStorageProtocol = StorageProtocol.TestCase
TestStorageProtocol.settings = PROTOCOL


def test_storage_protocol_on_a_disk(tmp_path):
    run_state_machine_as_test(
        lambda: StorageProtocol(lambda: open_storage(tmp_path / uuid.uuid4().hex)),
        settings=settings(PROTOCOL, max_examples=3),
    )


@pytest.mark.parametrize("service", ["moto", "seaweedfs"])
def test_storage_protocol_on_s3(service, request):
    server = request.getfixturevalue(service)
    run_state_machine_as_test(
        lambda: StorageProtocol(server.storage),
        settings=settings(PROTOCOL, max_examples=1, stateful_step_count=10),
    )
