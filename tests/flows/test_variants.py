"""Every algorithm and form of a run: tried again or interrupted, it ends like an undisturbed one, bit for bit."""

import pytest
from tiny_runs import EVERY_STEP, fail_everywhere, loop_outcome, outcome, take_steps, tiny_config

from gyre_core.training.build import open_run
from gyre_core.training.resume import RESUME

SHAPING = {"normalize": "standardize", "clip_deviations": 2.0, "spread_target": 0.5, "length_penalty": 0.1}
VARIANTS = {
    "ppo": {"experiment": {"algorithm": "ppo"}, "critic": {"warmup_steps": 1, "truncation": "bootstrap"}},
    "ppo-shared": {
        "experiment": {"algorithm": "ppo"},
        "critic": {"trunk": "shared"},
        "learning": {"kl_in": "reward", "entropy_coef": 0.01},
        "reward": {"shaping": SHAPING},
    },
    "dapo": {
        "rollout": {"max_refills": 3},
        "reward": {"shaping": {"overlong_buffer": 2}},
        "learning": {"mask_truncated": True, "kl_coef": 0.0},
    },
    "gspo": {"learning": {"policy_ratio": "sequence", "loss_aggregation": "sequence", "clip_low": 3e-4}},
    "rloo": {"learning": {"advantage": "leave_one_out", "kl_in": "reward"}, "reward": {"shaping": SHAPING}},
    "lora": {"models": {"lora": {"rank": 2}}},
    "bfloat16": {"models": {"dtype": "bfloat16"}, "learning": {"importance_mode": "mask"}},
    "one-sample": {"experiment": {"algorithm": "ppo"}, "rollout": {"samples_per_prompt": 1}},
    "lagging": {"rollout": {"max_lag": 1, "top_p": 0.9}, "experiment": {"algorithm": "ppo"}},
}


def variant(name, output, **checkpoint):
    return tiny_config(output, checkpoint=EVERY_STEP | checkpoint, **VARIANTS[name])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The outcome of a variant's undisturbed run, made once."""
    known = {}

    async def outcome_of(name):
        if name not in known:
            known[name] = await loop_outcome(variant(name, tmp_path_factory.mktemp(name)))
        return known[name]

    return outcome_of


@pytest.mark.parametrize("name", VARIANTS)
async def test_a_step_in_which_every_storage_operation_fails_leaves_no_trace(tmp_path, undisturbed, name):
    run = await open_run(variant(name, tmp_path))
    try:
        raised = fail_everywhere(run, step=2)
        await take_steps(run, attempts=300)
        assert len(raised) > 60
        outcome(run).assert_equals(await undisturbed(name))
    finally:
        await run.close()


INCREMENTS = {
    "full": {},
    "replay": {"incremental": True, "exact": "replay", "replay_budget": 1e9},
    "always": {"incremental": True, "exact": "always"},
}


async def resumed_outcome(config, steps=2):
    """The outcome of a run that ends after some steps, as a killed one does, and goes on from its checkpoint."""
    first = await open_run(config)
    try:
        await take_steps(first, last=steps)
    finally:
        await first.close()
    resumed = await open_run(config, origin=RESUME)
    try:
        assert resumed.step == steps
        await take_steps(resumed)
        return outcome(resumed)
    finally:
        await resumed.close()


@pytest.mark.parametrize("increments", INCREMENTS)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "lagging"])
async def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path, undisturbed, name, increments):
    (await resumed_outcome(variant(name, tmp_path, **INCREMENTS[increments]))).assert_equals(await undisturbed(name))


@pytest.mark.parametrize("increments", ["replay", "always"])
async def test_with_overlap_an_increment_leads_where_a_full_checkpoint_does(tmp_path, increments):
    full = await resumed_outcome(variant("lagging", tmp_path / "full"))
    (await resumed_outcome(variant("lagging", tmp_path, **INCREMENTS[increments]))).assert_equals(full)
