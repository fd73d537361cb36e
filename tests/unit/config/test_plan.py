"""The plan in plain units."""

import itertools
from pathlib import Path

import pytest

from gyre_core.config import GyreConfig
from gyre_core.config.fields import list_fields
from gyre_core.config.plan import expected_dead_share, make_plan
from gyre_core.config.reference import renew, settings_reference

ROOT = Path(__file__).parents[3]


def plan_of(**sections):
    return make_plan(GyreConfig.model_validate(sections))


def test_one_prompt_of_eight_completions():
    plan = plan_of(rollout={"batch_size": 1, "samples_per_prompt": 8, "max_tokens": 10})
    assert (plan.prompts_per_step, plan.samples_per_step, plan.tokens_per_step) == (1, 8, 80)
    assert "1 prompt x 8 = 8 completions, at most 80 tokens" in plan.describe()


def test_totals_are_steps_times_amounts():
    text = plan_of(
        experiment={"steps": 10},
        rollout={"batch_size": 100, "samples_per_prompt": 4, "max_tokens": 50},
        learning={"update_steps": 8},
    ).describe()
    assert "100 prompts x 4 = 400 completions, at most 20,000 tokens" in text
    assert "8 a step, 12 to 13 groups each" in text
    assert "10 steps, 1,000 prompts, 4,000 completions, at most 200,000 tokens, 80 updates" in text


@pytest.mark.parametrize(
    ("batch", "groups", "per_request", "requests"),
    [(128, 32, 32, 4), (100, 32, 32, 4), (8, 32, 8, 1), (33, 32, 32, 2), (5, 1, 1, 5)],
)
def test_requests_cover_the_step(batch, groups, per_request, requests):
    plan = plan_of(rollout={"batch_size": batch, "groups_per_request": groups})
    assert (plan.groups_per_request, plan.requests_per_step) == (per_request, requests)


@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
def test_the_loss_aggregation_is_told(mode):
    words = {"token": "over all tokens", "sequence": "of their means", "constant": "completions x max_tokens"}
    text = plan_of(learning={"loss_aggregation": mode}).describe()
    assert [name for name, fragment in words.items() if fragment in text] == [mode]


@pytest.mark.parametrize(("samples", "share"), [(2, 0.70), (4, 0.45), (8, 0.20)])
def test_dead_share_at_a_pass_rate_of_18_percent(samples, share):
    assert expected_dead_share(0.18, samples) == pytest.approx(share, abs=0.006)


@pytest.mark.parametrize(("rate", "samples"), [(0.5, 3), (0.25, 4), (0.0, 5), (1.0, 5)])
def test_dead_share_equals_the_sum_over_all_outcomes(rate, samples):
    """Independent reference: enumerate every pattern of right and wrong completions."""
    total = 0.0
    for outcome in itertools.product([0, 1], repeat=samples):
        if len(set(outcome)) == 1:
            total += rate ** sum(outcome) * (1 - rate) ** (samples - sum(outcome))
    assert expected_dead_share(rate, samples) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_pass_rate_is_a_share(rate):
    with pytest.raises(ValueError, match="within 0 and 1"):
        expected_dead_share(rate, 4)


NOTES = [
    ({"models": {"ref": "/r"}}, "models.ref is not loaded"),
    ({"learning": {"kl_coef": 0.1, "kl_estimator": "k1"}}, "gradient is 0 in expectation"),
    ({"learning": {"kl_coef": 0.1, "kl_in": "reward"}, "rollout": {"top_p": 0.9}}, "divergence is overestimated"),
    ({"data": {"evaluation_size": 0}}, "no prompt is held out"),
]


@pytest.mark.parametrize(("values", "fragment"), NOTES)
def test_settings_that_do_less_than_they_seem_are_noted(values, fragment):
    (note,) = plan_of(**values).notes
    assert fragment in note


def test_plain_settings_have_no_notes():
    assert plan_of().notes == ()
    assert plan_of(models={"ref": "/r"}, learning={"kl_coef": 0.1}).notes == ()


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"rollout": {"min_worker": 2, "worker_count": 4}}, ["rollout.min_worker, rollout.worker_count: ", "inline"]),
        (
            {"experience": {"max_uses": 2, "priority_alpha": 0.5}},
            ["priority_alpha, experience.max_uses: ", "max_lag 0"],
        ),
        ({"elastic": {"scale_interval": 5}}, ["elastic.scale_interval: ", "elastic.enabled is false"]),
        ({"learning": {"kl_in": "reward"}}, ["learning.kl_in: ", "kl_coef is 0"]),
        ({"learning": {"advantage": "leave_one_out", "scale_advantages": False}}, ["scale_advantages: ", "leave_one"]),
        ({"data": {"path": "p.jsonl", "size": 9}}, ["data.size: ", "a file of prompts"]),
    ],
)
def test_settings_without_effect_beside_the_others_are_noted(sections, named):
    (note,) = plan_of(**sections).notes
    assert all(part in note for part in named)
    assert plan_of(rollout={"max_lag": 1}, experience={"max_uses": 2}).notes == ()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"path": "data.jsonl", "size": 7}, "data.size: without effect for a file"),
        ({"path": "data.jsonl", "parameters": {"digits": 3}}, "data.parameters: without effect without a task"),
        ({"path": "data.jsonl", "evaluation_path": "reasoning_gym:gcd", "parameters": {"digits": 3}}, None),
        ({"path": "reasoning_gym:gcd", "parameters": {"digits": 3}, "size": 7}, None),
    ],
)
def test_settings_of_data_without_effect_are_noted(data, named):
    notes = plan_of(data=data).notes
    assert [note[: len(named)] for note in notes] == [named] if named else notes == ()


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"learning": {"importance_floor": 0.1}}, "learning.importance_floor: without effect while"),
        (
            {"learning": {"kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k1"}},
            "learning.kl_estimator: without effect on",
        ),
        ({"models": {"critic": "/c"}}, "models.critic: without effect without a critic of its own"),
        ({"reward": {"model_weight": 2.0}}, "reward.model_weight: without effect without models.reward"),
        ({"reward": {"shaping": {"overlong_penalty": 2.0}}}, "reward.shaping.overlong_penalty: without effect while"),
        ({"learning": {"importance_mode": "mask", "importance_floor": 0.1}}, None),
        ({"experiment": {"algorithm": "ppo"}, "models": {"critic": "/c"}}, None),
    ],
)
def test_settings_of_parts_that_are_switched_off_are_noted(sections, named):
    notes = plan_of(**sections).notes
    assert [note[: len(named)] for note in notes] == [named] if named else notes == ()


def test_adapters_that_are_not_trained_are_noted():
    (note,) = plan_of(models={"lora": {"alpha": 3.0}}).notes
    assert note == "models.lora.alpha: without effect while models.lora.rank is 0"
    assert plan_of(models={"lora": {"rank": 2, "alpha": 3.0}}).notes == ()


def test_every_setting_has_a_description_and_a_place_in_the_documentation():
    for field in list_fields():
        assert field.description.endswith("."), field.name
        assert f"| `{field.name.rpartition('.')[2]}` |" in settings_reference()


def test_the_documentation_is_current():
    """`python -m gyre_core.config.reference` renews it."""
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert renew(text) == text


def test_a_document_without_the_marker_is_refused():
    with pytest.raises(ValueError, match="no line"):
        renew("# Configuration\n")
