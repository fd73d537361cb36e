"""A run in small: an owner and workers that use the real protocol, without models."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gyre_core.algorithms.advantages import group_advantages
from gyre_core.cluster.claims import claim
from gyre_core.cluster.epochs import claim_epoch, require_current
from gyre_core.cluster.requests import announce, announced, latest_attempt, read_request, request_name, request_step
from gyre_core.config.sections import ExperienceConfig
from gyre_core.experience.consumption import ConsumeRecord, DrawnMinibatch, read_consumption, write_consumption
from gyre_core.experience.pool import Pool
from gyre_core.experience.segments import (
    open_requests,
    read_segment,
    segment_exists,
    segment_ids,
    segment_name,
    write_segment,
)
from gyre_core.storage import Storage
from gyre_core.types import (
    Completion,
    GroupRequest,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    RolloutRequest,
    SamplingParameters,
    Score,
)

SHARDS = 2
GROUPS = 2
KEPT_CHECKPOINTS = 2


def group_names(step: int) -> list[str]:
    """All groups that a step asks for."""
    return [f"{request_name(step, shard)}-{index}" for shard in range(SHARDS) for index in range(GROUPS)]


def make_request(step: int, shard: int, version: PolicyVersion) -> RolloutRequest:
    name = request_name(step, shard)
    groups = tuple(
        GroupRequest(f"{name}-{index}", Prompt(f"{name}-{index}", "?", "?", np.array([step, shard], np.int32)))
        for index in range(GROUPS)
    )
    return RolloutRequest(name, step, version, groups, SamplingParameters(2, 4))


def generate(request: RolloutRequest, writer: int) -> list[RolloutGroup]:
    """Groups that name their request (in the prompt's tokens) and their writer (in the completions' tokens)."""
    groups = []
    for wanted in request.groups:
        rollouts = []
        for index in range(2):
            ids, logs = np.array([writer, index], np.int32), np.array([-1.0, -2.0], np.float32)
            completion = Completion(wanted.group_id, index, ids, logs, "t", "stop", request.version, 0.0, 1.0)
            rollouts.append(Rollout(completion, Score({"r": float(index)}, float(index), "scored"), None))
        groups.append(RolloutGroup(wanted.group_id, wanted.prompt, request.step, request.version, tuple(rollouts)))
    return groups


def scaled_advantages(groups: Sequence[RolloutGroup]) -> list[NDArray[np.float32]]:
    return [group_advantages(group.rewards, scale=True) for group in groups]


def check_segment(request_id: str, groups: list[RolloutGroup]) -> None:
    """The segment is this request's, whole, and of one writer."""
    assert [group.group_id for group in groups] == [f"{request_id}-{index}" for index in range(GROUPS)]
    step, shard = (int(part) for part in request_id.split("-"))
    assert all(group.prompt.token_ids.tolist() == [step, shard] for group in groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 2 * GROUPS
    assert len({int(rollout.completion.token_ids[0]) for rollout in rollouts}) == 1


def serve(storage: Storage, writer: int, pick: int) -> None:
    """One request of a worker: take an open attempt, generate, commit."""
    waiting = list(open_requests(storage).items())
    if not waiting:
        return
    request_id, attempt = waiting[pick % len(waiting)]
    if not claim(storage, request_id, attempt, f"worker {writer}"):
        return
    try:
        request = read_request(storage, request_id, attempt)
        write_segment(storage, request_id, generate(request, writer))
    except FileNotFoundError:  # The request was pruned in the meantime: its step is closed.
        return
    except FileExistsError:  # Another attempt committed first.
        return


class Owner:
    """The train process: `open` takes over, `advance` does what the step in progress lacks.

    `history` is the lineage: each trained step with the epoch of its record and the groups that it trained on.
    """

    def __init__(self, config: ExperienceConfig) -> None:
        self.config = config
        self.epoch = 0
        self.step = 0
        self.consumed = 0
        self.history: list[tuple[int, int, list[str]]] = []
        self.checkpoints: list[int] = []
        self.pool: Pool | None = None

    def open(self, storage: Storage, fall_back: bool) -> None:
        """Claim the next epoch and restore the newest checkpoint, or the one before it."""
        self.epoch = claim_epoch(storage, "owner")
        # By epoch first: what a superseded owner wrote late is older than anything of its successor.
        names = sorted(storage.list("checkpoints"))[-KEPT_CHECKPOINTS:]
        if not names:
            self.pool = Pool(storage, self.config, self.epoch)
            return
        name = names[0] if fall_back else names[-1]
        table = pq.read_table(io.BytesIO(storage.read(name)))
        self.step = self.consumed = int(name.rpartition("-")[2])
        self.history = [(epoch, step, groups) for epoch, step, groups in json.loads(table.schema.metadata[b"history"])]
        self.checkpoints = [self.step]
        self.pool = Pool.restore(storage, self.config, self.epoch, table)

    def advance(self, storage: Storage, reissue: bool, ask: bool = True) -> None:
        """Collect what the step in progress asks for, if anything, and once all is there, train."""
        if self.collect(storage, reissue, ask):
            self.train(storage)

    def collect(self, storage: Storage, reissue: bool, ask: bool = True) -> bool:
        """Announce and admit; whether all is there. `reissue` gives up on the attempts under way."""
        self._work_on(storage)
        step = self.step + 1
        if not ask:
            return True
        for request_id in segment_ids(storage):
            if request_step(request_id) < step:  # Late or left over: the pool must know that it had these.
                self.pool.admit(request_id, step, scaled_advantages, step, skip_dead_groups=True)
        missing = [self._missing(storage, step, shard, reissue) for shard in range(SHARDS)]
        return not any(missing)

    def _work_on(self, storage: Storage) -> None:
        assert self.pool is not None
        self.pool._storage = self.pool._ledger._storage = storage

    def _missing(self, storage: Storage, step: int, shard: int, reissue: bool) -> bool:
        request = make_request(step, shard, PolicyVersion(self.epoch, step))
        if not segment_exists(storage, request.request_id):
            attempt = latest_attempt(storage, request.request_id)
            if reissue or attempt == 0:
                announce(storage, request, attempt + 1)
            return True
        admission = self.pool.admit(request.request_id, step, scaled_advantages, step, skip_dead_groups=True)
        if admission.outcome == "corrupt":
            announce(storage, request, latest_attempt(storage, request.request_id) + 1)
            return True
        if admission.outcome == "admitted":  # Otherwise a checkpoint between admission and training has it already.
            check_segment(request.request_id, list(admission.groups))
        return False

    def train(self, storage: Storage) -> None:
        """Draw, train and publish: the next step of the lineage."""
        self._work_on(storage)
        step = self.step + 1
        record = read_consumption(storage, self.epoch, step)
        if record is None:
            drawn = self.pool.draw(
                np.random.default_rng([7, step]),
                minibatches=2,
                groups_per_minibatch=2,
                now=step,
                current=PolicyVersion(self.epoch, step),
                on_policy=False,
            )
            record = ConsumeRecord(step, tuple(DrawnMinibatch(tuple(part), 0.1, 0.0) for part in drawn))
            require_current(storage, self.epoch)
            write_consumption(storage, self.epoch, record)
        for minibatch in self.pool.minibatches(record):
            for group in minibatch.groups:
                assert group.group_id.startswith(request_name(*group.prompt_ids.tolist()))
        self.pool.consume(record, step)
        self.consumed = step
        self.pool.expire(step)
        require_current(storage, self.epoch)
        version = {"epoch": self.epoch, "number": step}
        storage.create(f"policy/{PolicyVersion(self.epoch, step)}", json.dumps(version).encode())
        self.pool.close(before_step=step)
        self.history.append((self.epoch, step, [group.group_id for group in record.groups]))
        self.step = step

    def checkpoint(self, storage: Storage) -> None:
        """Commit the state, then let go of what no kept checkpoint needs."""
        self._work_on(storage)
        if self.consumed > self.step:  # In the middle of a step that is being tried again.
            return
        require_current(storage, self.epoch)
        if self.step not in self.checkpoints:
            table = self.pool.snapshot(self.step).to_table()
            table = table.replace_schema_metadata({**table.schema.metadata, "history": json.dumps(self.history)})
            sink = io.BytesIO()
            pq.write_table(table, sink)
            name = f"checkpoints/{self.epoch:04d}-{self.step:08d}"
            if not storage.exists(name):
                storage.create(name, sink.getvalue())
            self.checkpoints.append(self.step)
        self.pool.pin_from(self.checkpoints[-KEPT_CHECKPOINTS:][0])

    def uses(self) -> Counter[str]:
        """How often each group was trained on, along the lineage."""
        return Counter(group for _, _, groups in self.history for group in groups)


def check_objects(storage: Storage, damaged: set[str], checked: dict[str, bytes]) -> None:
    """Every object that a reader can find is whole and what its name says.

    `damaged` ones were broken on purpose; `checked` remembers what was found right before.
    """

    def is_new(name: str) -> bool:
        data = storage.read(name)
        if checked.get(name) == data:
            return False
        checked[name] = data
        return True

    for request_id in segment_ids(storage):
        name = segment_name(storage, request_id)
        if name not in damaged and is_new(name):
            check_segment(request_id, read_segment(storage, request_id))
    for request_id, attempt in announced(storage).items():
        if is_new(f"requests/{request_id}.{attempt}"):
            assert read_request(storage, request_id, attempt).request_id == request_id
    for name in storage.list("policy"):
        assert str(PolicyVersion(**json.loads(storage.read(name)))) == name.removeprefix("policy/")
