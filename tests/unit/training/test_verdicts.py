"""Verdicts: the outcome on either side of every limit, and evidence with the numbers."""

import math

import pytest

from gyre_core.config import GyreConfig
from gyre_core.training.forecast import StepCosts
from gyre_core.training.verdicts import (
    judge_evaluation,
    judge_generation,
    judge_lengths,
    judge_parity,
    judge_prompts,
    judge_reward,
    judge_space,
    judge_threads,
    judge_tokens,
    judge_truncation,
    judge_versions,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("threads", "cores", "load", "outcome"),
    [(2, 2, 0.0, "ok"), (2, 2, 1.0, "ok"), (3, 2, 0.0, "warn"), (2, 2, 1.1, "warn"), (64, 64, 30.0, "ok")],
)
def test_threads(threads, cores, load, outcome):
    assert judge_threads(threads, cores, load).outcome == outcome


@pytest.mark.parametrize("name", ["disk", "memory"])
@pytest.mark.parametrize(
    ("available", "outcome"),
    [(None, "ok"), (5 * GIB, "ok"), (4.9 * GIB, "warn"), (4 * GIB, "warn"), (3.9 * GIB, "fail")],
)
def test_space(name, available, outcome):
    """4 GiB are wanted; 5 GiB are 80% used by them."""
    verdict = judge_space(name, {"weights": 3.0 * GIB, "rest": 1.0 * GIB}, available)
    assert (verdict.name, verdict.outcome) == (name, outcome)
    assert "at most 4 GiB" in verdict.evidence
    assert "weights 3 GiB, rest 1 GiB" in verdict.evidence
    assert bool(verdict.remedy) == (outcome != "ok")


@pytest.mark.parametrize(
    ("dtype", "largest", "outcome"),
    [
        ("float32", 0.0, "ok"),
        ("float32", 1e-3, "ok"),
        ("float32", 1.1e-3, "fail"),
        ("bfloat16", 0.05, "ok"),
        ("bfloat16", 0.06, "warn"),
        ("bfloat16", 0.51, "fail"),
        ("float32", math.nan, "fail"),
        ("bfloat16", math.inf, "fail"),
    ],
)
def test_parity(dtype, largest, outcome):
    assert judge_parity(largest, largest / 10, 0.0, dtype).outcome == outcome


def test_special_tokens_are_printed_and_one_that_ends_completions_is_wanted():
    verdict = judge_tokens(None, (7, 2), 2)
    assert verdict.outcome == "ok"
    assert verdict.evidence == "ids that begin a prompt: none; that end a completion: 7, 2; that fill up tensors: 2"
    assert judge_tokens(1, (), 0).outcome == "warn"


def test_tokens_outside_the_learners_truncation_are_told():
    assert "leave out 0.50% of the tokens" in judge_parity(0.0, 0.0, 0.005, "float32").evidence


def reward_metrics(reward=0.5, std=0.2, dead=0.0, failed=0.0, abstained=0.0):
    return {
        "reward": reward,
        "reward_std": std,
        "frac_reward_zero_std": dead,
        "reward/failure_share": failed,
        "reward/abstained_share": abstained,
    }


@pytest.mark.parametrize(
    ("metrics", "outcome"),
    [
        (reward_metrics(), "ok"),
        (reward_metrics(dead=0.8), "ok"),
        (reward_metrics(dead=0.81), "warn"),
        (reward_metrics(std=0.0, dead=1.0), "warn"),
        (reward_metrics(failed=0.1), "warn"),
        (reward_metrics(failed=0.3), "fail"),
        ({"reward/failure_share": 1.0, "reward/abstained_share": 0.0}, "fail"),
        ({"reward/failure_share": 0.0, "reward/abstained_share": 1.0}, "warn"),
    ],
)
def test_reward(metrics, outcome):
    verdict = judge_reward(metrics, "ValueError: no", 0.2)
    assert verdict.outcome == outcome
    assert ("ValueError: no" in verdict.evidence) == (metrics["reward/failure_share"] > 0)


def test_a_critic_needs_no_spread_of_rewards():
    assert judge_reward(reward_metrics(std=0.0, dead=1.0), "", 0.2, "ppo").outcome == "ok"
    alone = {
        name: value for name, value in reward_metrics().items() if name not in ("reward_std", "frac_reward_zero_std")
    }
    assert judge_reward(alone, "", 0.2, "ppo").outcome == "ok"


def test_rewards_that_all_fail_fail_whatever_the_limit():
    assert judge_reward(reward_metrics(failed=1.0), "error", 1.0).outcome == "fail"


def test_generation():
    """500 tokens in 2 s; a step waits for generation and reward, not for the update."""
    costs = StepCosts(generation_seconds=8.0, reward_seconds=1.0, update_seconds=11.0, sample_bytes=1.0)
    verdict = judge_generation(500, 100, 2.0, costs, timeout=9.0)
    assert verdict.outcome == "ok"
    assert verdict.evidence.startswith("250 tokens/s over 100 completions; a step will take about 20 s")
    assert judge_generation(500, 100, 2.0, costs, timeout=8.9).outcome == "fail"


@pytest.mark.parametrize(("share", "outcome"), [(0.0, "ok"), (0.2, "ok"), (0.21, "warn"), (1.0, "warn")])
def test_truncation(share, outcome):
    assert judge_truncation(share, 4.0, 5).outcome == outcome


@pytest.mark.parametrize(("longest", "outcome"), [(90, "ok"), (91, "fail")])
def test_lengths(longest, outcome):
    verdict = judge_lengths(longest, max_tokens=10, max_positions=100)
    assert verdict.outcome == outcome
    assert ("data.max_prompt_tokens to 90" in verdict.remedy) == (outcome == "fail")


@pytest.mark.parametrize(
    ("counts", "outcome", "evidence"),
    [
        ((128, 0, 0, 0), "ok", "128 prompts to train on"),
        ((127, 0, 0, 0), "warn", "127 prompts to train on; fewer than the 128 of a step"),
        ((200, 3, 0, 0), "warn", "200 prompts to train on; 3 dropped as longer than 1024 tokens"),
        (
            (200, 0, 2, 1),
            "warn",
            "200 prompts to train on; 2 that repeat another; 1 left out, as their prompt is held out",
        ),
    ],
)
def test_prompts(counts, outcome, evidence):
    verdict = judge_prompts(*counts, GyreConfig())
    assert (verdict.outcome, verdict.evidence) == (outcome, evidence)


def test_evaluation():
    assert judge_evaluation(1).outcome == "ok"
    assert judge_evaluation(0).outcome == "warn"


def test_versions():
    assert judge_versions({"torch": "2.9"}, {}).evidence == "torch 2.9"
    verdict = judge_versions({"torch": "2.9"}, {"prefect<4,>=3.9": "nothing"})
    assert verdict.outcome == "fail"
    assert "prefect<4,>=3.9 is required, and nothing is there" in verdict.evidence
