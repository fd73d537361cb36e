"""Forecasts of disk and memory, against sums done by hand."""

from dataclasses import replace

import pytest

from gyre_core.config import GyreConfig
from gyre_core.policy.models import PolicySummary
from gyre_core.training.forecast import StepCosts, bytes_text, disk_forecast, least_disk_forecast, memory_forecast

MILLION = 1_000_000
POLICY = PolicySummary(
    architecture="Qwen3ForCausalLM",
    parameters=MILLION,
    trained=MILLION,
    dtype="float32",
    vocabulary=1000,
    max_positions=4096,
    layers=4,
    hidden_size=100,
    cache_elements=64,
)
COSTS = StepCosts(generation_seconds=6.0, reward_seconds=1.0, update_seconds=3.0, sample_bytes=100.0)


def config_of(**sections):
    return GyreConfig.model_validate(sections)


def test_disk_of_float32():
    """4 MB a version: 3 kept, differences, one in writing; 12 MB a checkpoint, 2 kept and one in writing."""
    forecast = disk_forecast(config_of(checkpoint={"keep": 2}), POLICY, 3, None)
    assert forecast == {"policy versions": 20 * MILLION, "checkpoints": 36 * MILLION, "export": 4 * MILLION}


def test_disk_of_bfloat16_halves_what_is_published():
    """The masters and moments of a checkpoint stay float32."""
    forecast = disk_forecast(config_of(models={"dtype": "bfloat16"}, checkpoint={"keep": 1}), POLICY, 4, None)
    assert forecast == {"policy versions": 12 * MILLION, "checkpoints": 24 * MILLION, "export": 2 * MILLION}


def test_a_warm_store_beside_the_data_holds_the_checkpoints_once_more_with_their_segments():
    """12 MB a checkpoint, 2 kept and one in writing; 500 samples, and 50 steps of 32, of 100 bytes."""
    settings = {"experiment": {"steps": 50}, "experience": {"buffer_size": 500}}
    settings["rollout"] = {"batch_size": 8, "samples_per_prompt": 4}
    dual = {"keep": 2, "dual_write": True}
    config = config_of(checkpoint=dual, **settings)
    assert disk_forecast(config, POLICY, 3, None)["warm copy"] == 36 * MILLION
    assert disk_forecast(config, POLICY, 3, COSTS)["warm copy"] == 36 * MILLION + 100 * (500 + 32 * 50)
    assert least_disk_forecast(config, POLICY)["warm copy"] == 24 * MILLION
    for elsewhere in ({"checkpoint": {"keep": 2}}, {"checkpoint": dual | {"warm_url": "/fast"}}):
        assert "warm copy" not in disk_forecast(config_of(**elsewhere), POLICY, 3, None)
    assert "warm copy" not in disk_forecast(config_of(checkpoint=dual, storage={"url": "/data"}), POLICY, 3, None)
    apart = disk_forecast(config_of(checkpoint=dual | {"url": "/slow"}), POLICY, 3, None)
    assert (apart["warm copy"], "checkpoints" in apart) == (36 * MILLION, False)


@pytest.mark.parametrize(("steps", "retained"), [(1000, 120), (50, 50)])
def test_the_pool_reaches_back_to_the_oldest_checkpoint(steps, retained):
    """2 checkpoints 600 s apart reach 1200 s back: 120 steps of 10 s, if the run is that long; 32 samples a step."""
    config = config_of(
        experiment={"steps": steps},
        rollout={"batch_size": 8, "samples_per_prompt": 4},
        experience={"buffer_size": 500},
        checkpoint={"keep": 2, "interval": 600.0},
    )
    assert disk_forecast(config, POLICY, 3, COSTS)["pool"] == 100 * (500 + 32 * retained)
    refilled = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_refills": 2})})
    assert disk_forecast(refilled, POLICY, 3, COSTS)["pool"] == 100 * (500 + 3 * 32 * retained)


def test_memory_of_float32():
    """Weights, gradient, two moments; weights and moments again; five versions; two in the engine; 256 rows."""
    config = config_of(
        rollout={"max_tokens": 50, "sequences_in_flight": 256},
        learning={"tokens_per_micro_batch": 1000},
    )
    assert memory_forecast(config, POLICY, None) == {
        "learner": 16 * MILLION,
        "snapshot": 12 * MILLION,
        "versions": 20 * MILLION,
        "engine": 8 * MILLION,
        "key-value cache": 256 * 1074 * 64 * 4,
        "activations": 1000 * 100 * 4 * (17 * 4 + 4) + 5 * 4 * MILLION,
    }


def test_memory_of_bfloat16_with_a_reference():
    config = config_of(
        models={"dtype": "bfloat16"},
        learning={"gradient_checkpointing": True, "tokens_per_micro_batch": 1000, "kl_coef": 0.1},
    )
    forecast = memory_forecast(config, POLICY, POLICY)
    assert forecast["learner"] == (16 + 4) * MILLION
    assert "reward model" not in forecast
    assert memory_forecast(config, POLICY, POLICY, 3 * MILLION)["reward model"] == 6 * MILLION
    assert (forecast["engine"], forecast["reference"]) == (4 * MILLION, 2 * MILLION)
    assert forecast["activations"] == 1000 * 100 * 2 * (17 + 4) + 5 * 4 * MILLION


def test_adapters_are_all_that_is_trained_and_their_base_is_the_reference():
    """10,000 trained weights; the base in bfloat16 once, and once merged."""
    config = config_of(models={"dtype": "bfloat16", "lora": {"rank": 4}}, learning={"kl_coef": 0.1})
    adapted = replace(POLICY, trained=10_000)
    forecast = memory_forecast(config, adapted, adapted)
    assert (forecast["learner"], forecast["snapshot"]) == (200_000, 120_000)
    assert (forecast["base"], forecast["engine"]) == (4 * MILLION, 4 * MILLION)
    assert "reference" not in forecast
    assert memory_forecast(config, adapted, POLICY)["reference"] == 2 * MILLION
    assert disk_forecast(config, adapted, 3, None)["checkpoints"] == 120_000 * (config.checkpoint.keep + 1)


def test_checkpoints_that_are_kept_for_themselves_take_their_space():
    """In 100 steps 3 multiples of 30; 2 newest, 4 best, and a new one while it is written: 10 of 12 bytes a weight."""
    config = config_of(checkpoint={"keep": 2, "keep_best": 4, "keep_every": 30}, experiment={"steps": 100})
    assert disk_forecast(config, POLICY, 3, None)["checkpoints"] == 10 * 12 * MILLION


def test_increments_that_are_differences_hold_the_state_twice():
    settings = {"incremental": True, "exact": "always"}
    assert memory_forecast(config_of(checkpoint=settings), POLICY, None)["increments"] == 24 * MILLION
    for other in ({}, settings | {"exact": "replay"}):
        assert "increments" not in memory_forecast(config_of(checkpoint=other), POLICY, None)


def test_increments_of_a_gpu_are_differences_unless_they_are_to_be_repeated():
    """Its updates are not taken to repeat, so that `auto` holds the state twice there and not on a CPU."""
    auto, replay = ({"incremental": True, "exact": exact} for exact in ("auto", "replay"))
    assert memory_forecast(config_of(checkpoint=auto), POLICY, None, device="cuda")["increments"] == 24 * MILLION
    for settings, device in ((auto, "cpu"), (replay, "cuda"), ({}, "cuda")):
        assert "increments" not in memory_forecast(config_of(checkpoint=settings), POLICY, None, device=device)


def test_few_large_versions_are_held():
    """The newest and the one being published, and as many more as 512 MiB hold; four at the most."""
    for parameters, versions in ((10**6, 5), (60 * 10**6, 3), (10**9, 2)):
        forecast = memory_forecast(config_of(), replace(POLICY, parameters=parameters), None)
        assert forecast["versions"] == 4 * parameters * versions


def test_logits_are_held_in_chunks():
    """However many tokens and words there are, 2^26 logits at once, five times over."""
    config = config_of(learning={"tokens_per_micro_batch": 10**6, "gradient_checkpointing": True})
    activations = 10**6 * 100 * 4 * (17 + 4)
    assert memory_forecast(config, POLICY, None)["activations"] == activations + 5 * 2**26 * 4


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (999.7 * 1024, "0.976 MiB"),
        (3 * 2**30, "3 GiB"),
        (2**41, "2 TiB"),
    ],
)
def test_bytes_for_people(size, text):
    assert bytes_text(size) == text


def test_a_critic_with_a_trunk_of_its_own_is_trained_like_a_second_policy():
    """2 million weights of its own: 16 bytes each in memory, 12 in the snapshot and in each checkpoint."""
    config = config_of(experiment={"algorithm": "ppo"})
    forecast = memory_forecast(config, POLICY, None, critic_parameters=2 * MILLION)
    assert (forecast["critic"], forecast["snapshot"]) == (32 * MILLION, 36 * MILLION)
    checkpoints = disk_forecast(config, POLICY, 3, None, 2 * MILLION)["checkpoints"]
    assert checkpoints == 36 * MILLION * (config.checkpoint.keep + 1)
    assert "critic" not in memory_forecast(config, POLICY, None)
