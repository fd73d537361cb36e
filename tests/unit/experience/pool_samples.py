"""A pool to test with, and the steps that an owner takes with it."""

import numpy as np
from experience_samples import VERSION, grpo, make_group

from gyre_core.cluster.epochs import claim_epoch
from gyre_core.config.sections import ExperienceConfig
from gyre_core.experience.consumption import ConsumeRecord, DrawnMinibatch
from gyre_core.experience.pool import Pool
from gyre_core.experience.segments import write_segment

REQUEST = "00000001-0000"


def new_pool(storage, **settings):
    return Pool(storage, ExperienceConfig(**settings), epoch=claim_epoch(storage, "test"))


def admit(pool, storage, request_id, groups, step=1, now=0.0, skip=True):
    write_segment(storage, request_id, groups)
    return pool.admit(request_id, step, grpo, now, skip_dead_groups=skip)


def live_groups(names, **changes):
    return [make_group(name, [1.0, 0.0, 0.0, 0.0], **changes) for name in names]


def draw(pool, seed=0, *, minibatches=2, size=4, now=0.0, current=VERSION, on_policy=False):
    return pool.draw(
        np.random.default_rng(seed),
        minibatches=minibatches,
        groups_per_minibatch=size,
        now=now,
        current=current,
        on_policy=on_policy,
    )


def drawn_ids(drawn):
    return [[group.group_id for group in part] for part in drawn]


def all_ids(drawn):
    return [name for part in drawn_ids(drawn) for name in part]


def consume(pool, step, drawn, now=0.0):
    record = ConsumeRecord(step, tuple(DrawnMinibatch(tuple(part), 0.1, 0.0) for part in drawn))
    pool.consume(record, now)
    return record
