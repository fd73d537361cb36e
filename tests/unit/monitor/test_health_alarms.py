import json
import math
from collections.abc import Iterable

import numpy as np
import pytest

from gyre_core.config.sections import HealthConfig
from gyre_core.monitor.health import RULES, Alarm, Alarms, trend_z

LENGTH = "completions/mean_length"
THROUGHPUT = "perf/generation_throughput"
DRIFT = "sampling/sampling_logp_difference/mean"

Metrics = dict[str, float]


def watch(steps: Iterable[Metrics], config: HealthConfig | None = None) -> list[tuple[str, int]]:
    """Names and steps of the alarms of a run, steps counted from 0."""
    alarms = Alarms(config or HealthConfig())
    return [(alarm.name, alarm.step) for step, metrics in enumerate(steps) for alarm in alarms.observe(step, metrics)]


def one(name: str, values: Iterable[float]) -> list[Metrics]:
    return [{name: value} for value in values]


def healthy_run(seed: int, steps: int = 120) -> list[Metrics]:
    """A policy that learns: the reward rises, the length stays, everything else is noisy about its level."""
    rng = np.random.default_rng(seed)
    progress = 1 - np.exp(-np.arange(steps) / 30)
    noise = rng.standard_normal((7, steps))
    skipped = rng.binomial(8, 0.05, steps).astype(float)
    columns = {
        "reward": 0.4 + 0.5 * progress + 0.02 * noise[0],
        LENGTH: 100 * (1 + 0.05 * noise[1]),
        "kl": 0.05 * progress**2 * np.exp(0.5 * noise[2]),
        "frac_reward_zero_std": np.clip(0.2 + 0.6 * progress + 0.05 * noise[3], 0, 1),
        THROUGHPUT: 9000 * np.exp(0.25 * noise[4]),
        "reward/failure_share": rng.binomial(512, 0.002, steps) / 512,
        DRIFT: 0.01 * np.exp(0.3 * noise[5]),
        "off_policy/max": np.zeros(steps),
        "optim/skipped_updates": skipped,
        "optim/updates": 8 - skipped,
        "loss": noise[6],
    }
    return [{name: float(values[step]) for name, values in columns.items()} for step in range(steps)]


@pytest.mark.parametrize("block", range(8))
def test_a_healthy_run_raises_nothing(block: int):
    for seed in range(block * 10, block * 10 + 10):
        assert watch(healthy_run(seed)) == [], f"seed {seed}"


@pytest.mark.parametrize("block", range(4))
def test_pure_noise_raises_nothing(block: int):
    for seed in range(block * 10, block * 10 + 10):
        noise = np.random.default_rng(seed).standard_normal((4, 150))
        names = ("reward", LENGTH, "kl", THROUGHPUT)
        values = np.stack(
            [noise[0], 100 * np.exp(0.4 * noise[1]), 0.02 * np.exp(0.5 * noise[2]), np.exp(0.3 * noise[3])]
        )
        steps = [dict(zip(names, map(float, column), strict=True)) for column in values.T]
        assert watch(steps) == [], f"seed {seed}"


# KL spike: 10 times the recent median, and out of its scatter.


def test_a_kl_above_ten_times_its_recent_level_is_a_spike():
    level = [0.010, 0.012, 0.009] * 5
    assert watch(one("kl", [*level, 0.11])) == [("kl_spike", 15)]
    assert watch(one("kl", [*level, 0.09])) == []
    assert watch(one("kl", [*level, 0.11]), HealthConfig(kl_spike=20)) == []


def test_without_a_reference_the_change_of_the_policy_is_judged():
    level = [0.010, 0.012, 0.009] * 5
    assert watch(one("policy_kl", [*level, 0.11])) == [("kl_spike", 15)]
    both = [{"kl": 0.01, "policy_kl": value} for value in [*level, 0.11]]
    assert watch(both) == []


def test_a_kl_spike_needs_ten_steps_before_it():
    assert watch(one("kl", [0.01] * 9 + [1.0])) == []
    assert watch(one("kl", [0.01] * 10 + [1.0])) == [("kl_spike", 10)]
    assert watch(one("kl", [0.01] * 3 + [1.0]), HealthConfig(window=3)) == [("kl_spike", 3)]


def test_leaving_the_reference_is_no_spike():
    assert watch(one("kl", [1e-7 * step**3 for step in range(100)])) == []
    assert watch(one("kl", [0.0] * 30 + [0.009])) == []
    assert watch(one("kl", [0.0] * 30 + [0.011])) == [("kl_spike", 30)]


def test_negative_estimates_of_a_small_kl_are_harmless():
    assert watch(one("kl", [1e-4 * (-1) ** step for step in range(40)])) == []


def test_a_spike_within_a_heavy_tail_is_none():
    heavy = np.exp(1.5 * np.random.default_rng(3).standard_normal(40)) * 0.01
    assert watch(one("kl", [*heavy, 0.2])) == []
    assert watch(one("kl", [*np.full(40, 0.01), 0.2])) == [("kl_spike", 40)]


# Reward up with length up.


def rising(reward: tuple[float, float], length: tuple[float, float], steps: int = 80) -> list[Metrics]:
    rng = np.random.default_rng(11)
    rewards = np.linspace(*reward, steps) + 0.02 * rng.standard_normal(steps)
    lengths = np.linspace(*length, steps) * (1 + 0.03 * rng.standard_normal(steps))
    return [{"reward": float(r), LENGTH: float(n)} for r, n in zip(rewards, lengths, strict=True)]


def test_reward_bought_with_length_is_reported_once():
    [(name, step)] = watch(rising((0.3, 0.9), (100, 250)))
    assert name == "reward_up_length_up"
    assert 20 <= step <= 50, "lengths pass 1.5 times their start near step 27"


def test_a_slow_drift_over_hundreds_of_steps_is_seen():
    assert [name for name, _ in watch(rising((0.3, 0.9), (100, 300), steps=500))] == ["reward_up_length_up"]


@pytest.mark.parametrize(
    ("reward", "length"),
    [
        ((0.3, 0.9), (100, 100)),
        ((0.3, 0.9), (100, 135)),
        ((0.3, 0.9), (200, 100)),
        ((0.5, 0.5), (100, 250)),
        ((0.9, 0.3), (100, 250)),
    ],
    ids=["length level", "length a little up", "length down", "reward level", "reward down"],
)
def test_near_misses_of_reward_bought_with_length(reward: tuple[float, float], length: tuple[float, float]):
    assert watch(rising(reward, length)) == []


# Dead signal.


def test_dead_groups_raise_after_the_configured_number_of_steps():
    dead = "frac_reward_zero_std"
    assert watch(one(dead, [0.5] + [1.0] * 10)) == [("dead_signal", 10)]
    assert watch(one(dead, [1.0] * 9 + [0.99] + [1.0] * 9)) == []
    assert watch(one(dead, [1.0] * 3), HealthConfig(dead_steps=3)) == [("dead_signal", 2)]
    assert watch(one(dead, [1.0] * 300), HealthConfig(dead_steps=250)) == [("dead_signal", 249)]


def test_an_alarm_is_raised_once_until_it_clears():
    dead, live = [1.0] * 25, [0.5]
    assert watch(one("frac_reward_zero_std", [*dead, *live, *dead])) == [("dead_signal", 9), ("dead_signal", 35)]


def test_a_step_without_the_metric_neither_counts_nor_clears():
    steps = one("frac_reward_zero_std", [1.0] * 6)
    assert watch([*steps, {}, {}, *steps]) == [("dead_signal", 11)]


# Throughput.


def test_throughput_below_half_for_three_steps_is_a_drop():
    assert watch(one(THROUGHPUT, [1000.0] * 20 + [490.0] * 3)) == [("throughput_drop", 22)]
    assert watch(one(THROUGHPUT, [1000.0] * 20 + [490.0, 490.0, 510.0] * 5)) == []
    assert watch(one(THROUGHPUT, [1000.0] * 20 + [0.0] * 3)) == [("throughput_drop", 22)]


def test_completions_that_grow_slowly_are_no_drop():
    assert watch(one(THROUGHPUT, 1000 * 0.97 ** np.arange(200))) == []


# Failures, drift, skipped updates, values that are not finite.


def test_failures_above_two_percent_of_three_steps_are_reported():
    share = "reward/failure_share"
    assert watch(one(share, [0.0, 0.0, 0.05, 0.0])) == []
    assert watch(one(share, [0.0, 0.0, 0.05, 0.02])) == [("reward_failures", 3)]
    assert watch(one(share, [0.05] * 10)) == [("reward_failures", 0)]


def test_drift_is_judged_on_equal_weights_only():
    equal = [{DRIFT: 0.06, "off_policy/max": 0.0}] * 3
    assert watch(equal) == [("log_probability_drift", 2)]
    assert watch([{DRIFT: 0.06, "off_policy/max": 1.0}] * 9) == []
    assert watch([{DRIFT: 0.04, "off_policy/max": 0.0}] * 9) == []
    assert watch([*equal[:2], {DRIFT: 0.01, "off_policy/max": 0.0}, *equal[:2]]) == []


def test_minibatches_without_tokens_are_reported_when_they_are_half():
    def updates(*pairs: tuple[int, int]) -> list[Metrics]:
        return [{"optim/updates": made, "optim/skipped_updates": skipped} for made, skipped in pairs]

    three = HealthConfig(dead_steps=3)
    assert watch(updates((0, 1), (0, 1), (0, 1)), three) == [("skipped_updates", 2)]
    assert watch(updates((1, 0), (1, 0), (0, 1), (1, 0), (1, 0), (0, 1)), three) == []
    assert watch(updates((8, 0), (3, 5), (3, 5), (5, 3)), three) == [("skipped_updates", 3)]
    assert watch(updates(*[(0, 0)] * 4), three) == []
    assert watch(updates(*[(0, 1)] * 10)) == [("skipped_updates", 9)]


def parts(name: str, *pairs: tuple[float, float]) -> list[Metrics]:
    return [{f"rewards/{name}/mean": mean, f"rewards/{name}/std": std} for mean, std in pairs]


def test_a_reward_function_with_one_value_from_the_start_is_told():
    four = HealthConfig(window=4)
    assert watch(parts("form", *[(0.0, 0.0)] * 6), four) == [("constant_reward", 3)]
    assert watch(parts("form", *[(0.1, 1e-17)] * 6), four) == [("constant_reward", 3)]
    assert watch(parts("form", *[(0.0, 0.0)] * 3, (0.2, 0.4), *[(0.0, 0.0)] * 9), four) == []
    assert watch(parts("form", *[(0.0, 0.0), (1.0, 0.0)] * 5), four) == []
    late = [{"reward": 0.0}, *parts("form", *[(1.0, 0.0)] * 4)]
    assert watch(late, four) == [("constant_reward", 4)]


def test_a_constant_reward_is_named_and_clears_once_it_varies():
    alarms = Alarms(HealthConfig(window=2))
    good = {"rewards/good/mean": 0.5, "rewards/good/std": 0.1}
    form = {"rewards/form/mean": 0.25, "rewards/form/std": 0.0}
    assert alarms.observe(0, good | form) == []
    [alarm] = alarms.observe(1, good | form)
    assert alarm.sentence == "one value for every completion of the first 2 steps: form (0.25)"
    alarms.observe(2, good | {"rewards/form/mean": 0.25, "rewards/form/std": 0.01})
    assert alarms.raised == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_named(value: float):
    [alarm] = Alarms(HealthConfig()).observe(4, {"loss": value, "reward": 1.0, "kl": value})
    assert (alarm.name, alarm.step, alarm.sentence) == ("non_finite", 4, "not finite: kl, loss")
    assert watch([{"loss": value}, {"loss": value}, {"loss": 1.0}, {"loss": value}]) == [
        ("non_finite", 0),
        ("non_finite", 3),
    ]


def test_values_that_are_not_finite_do_not_enter_the_level():
    steps = one("kl", [0.01] * 20 + [math.inf] * 20 + [0.11])
    assert watch(steps) == [("non_finite", 20), ("kl_spike", 40)]


# What an alarm says, and what survives.


def troubled_run() -> list[Metrics]:
    """A run that raises every alarm that can be raised without another's fault."""
    steps = healthy_run(5, 60) + healthy_run(6, 60)
    hacked = rising((0.3, 0.9), (100, 250), steps=120)
    for metrics, other in zip(steps, hacked, strict=True):
        metrics.update(other)
    steps[55]["kl"] = 5.0
    for metrics in steps[30:45]:
        metrics |= {"frac_reward_zero_std": 1.0, THROUGHPUT: 100.0, "reward/failure_share": 0.2, DRIFT: 0.5}
    for metrics in steps[46:60]:
        metrics |= {"optim/updates": 2.0, "optim/skipped_updates": 6.0}
    steps[70]["loss"] = math.nan
    for metrics in steps[:40]:
        metrics |= {"rewards/format/mean": 0.0, "rewards/format/std": 0.0}
    return steps


def test_every_rule_speaks_in_numbers_and_offers_a_remedy():
    alarms = Alarms(HealthConfig())
    raised = [alarm for step, metrics in enumerate(troubled_run()) for alarm in alarms.observe(step, metrics)]
    assert {alarm.name for alarm in raised} == set(RULES)
    for alarm in raised:
        assert alarm.remedy
        assert alarm.name == "non_finite" or any(letter.isdigit() for letter in alarm.sentence)


def test_a_kl_spike_shows_its_evidence():
    alarms = Alarms(HealthConfig())
    for step in range(15):
        alarms.observe(step, {"kl": 0.01})
    [alarm] = alarms.observe(15, {"kl": 0.25})
    assert alarm.sentence == (
        "kl is 0.25 nats a token, 25 times the level of the last 15 steps (0.01); the limit is 10 times"
    )
    assert alarms.raised == [alarm]
    alarms.observe(16, {"kl": 0.01})
    assert alarms.raised == []


def test_a_run_resumed_at_any_step_judges_as_the_undisturbed_one():
    steps = troubled_run()
    undisturbed = Alarms(HealthConfig())
    states, raised = [], []
    for step, metrics in enumerate(steps):
        states.append(json.dumps(undisturbed.state(), allow_nan=False))
        raised.append(undisturbed.observe(step, metrics))
    for start in range(0, len(steps), 7):
        resumed = Alarms(HealthConfig())
        resumed.load_state(json.loads(states[start]))
        again: list[list[Alarm]] = [resumed.observe(step, steps[step]) for step in range(start, len(steps))]
        assert again == raised[start:]
        assert resumed.state() == undisturbed.state()


def test_a_step_observed_again_changes_nothing():
    alarms = Alarms(HealthConfig(dead_steps=2))
    alarms.observe(0, {"frac_reward_zero_std": 1.0})
    state = alarms.state()
    assert alarms.observe(0, {"frac_reward_zero_std": 1.0}) == []
    assert alarms.state() == state


# The trend test.


def test_the_trend_statistic_equals_its_worked_values():
    assert trend_z([1, 2, 3, 4]) == pytest.approx(6 / math.sqrt(4 * 3 * 13 / 18))
    assert trend_z([1, 3, 2, 4]) == pytest.approx(4 / math.sqrt(4 * 3 * 13 / 18))
    assert trend_z([5, 5, 5, 5]) == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_trend_statistic_depends_on_order_alone(seed: int):
    values = np.random.default_rng(seed).standard_normal(30)
    assert trend_z(list(np.exp(values))) == trend_z(list(values))
    assert trend_z(list(values[::-1])) == -trend_z(list(values))


def test_the_trend_statistic_of_noise_is_standard_normal():
    rng = np.random.default_rng(0)
    values = np.array([trend_z(list(rng.standard_normal(40))) for _ in range(2000)])
    assert abs(values.mean()) < 4 / math.sqrt(2000)
    assert abs(values.std() - 1) < 4 / math.sqrt(4000)


def test_a_function_that_is_named_by_its_path_is_watched_too():
    assert watch(parts("home.me.a.py:form", *[(0.0, 0.0)] * 6), HealthConfig(window=4)) == [("constant_reward", 3)]
