"""What the control plane calls its things in Prefect: pools, deployments, keys and events."""

from uuid import UUID

ROLLOUT_POOL = "gyre-rollout"
"""Work pool of the rollout workers; the fleet moves its concurrency limit."""
LEARNER_POOL = "gyre-learner"
"""Work pool of training runs, one at a time."""
CONTROL_POOL = "gyre-control"
"""Work pool of what is short: resizes, evaluations, recurring jobs."""

DEPLOYMENT = "gyre"
"""Name of every deployment, after the name of its flow: `train/gyre`."""
ROLLOUT_DEPLOYMENT = f"rollout_worker/{DEPLOYMENT}"
"""A rollout worker."""
RESIZE_DEPLOYMENT = f"resize/{DEPLOYMENT}"
"""One pass of the reconciler."""
TRAIN_DEPLOYMENT = f"train/{DEPLOYMENT}"
"""A training run."""
RECOVER_DEPLOYMENT = f"recover/{DEPLOYMENT}"
"""Starts a crashed training run again."""
RECURRING_FLOW = "recurring"
"""Flow of a recurring job; each series has a deployment of its own, named like it."""

SCALE_REQUESTED = "gyre.scale.requested"
"""Event of a scaling decision; its payload holds `run`, `storage` and `decision`, the parameters of `resize`."""
LEARNER_IS_LIMIT = "gyre.learner.limit"
"""Event of a pool that overflows with the fewest workers that are allowed; its payload holds `run` and `reasons`."""
RUN_GIVEN_UP = "gyre.run.given_up"
"""Event of a run that crashed too often at one step; its payload holds `run`, `flow_run`, `crashes` and `step`."""


def successor_key(dead_flow_run: UUID) -> str:
    """The idempotency key of the flow run that goes on for one that crashed, which is therefore started once."""
    return f"recover/{dead_flow_run}"
