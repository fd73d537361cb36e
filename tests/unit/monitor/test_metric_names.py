from pathlib import Path

import pytest

from gyre_core.monitor import names

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.mark.parametrize(
    "name",
    [
        *("reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "num_tokens", "loss", "optim/grad_norm"),
        *("clip_ratio/low_mean", "clip_ratio/high_mean", "completions/mean_length", "completions/clipped_ratio"),
        *("sampling/importance_sampling_ratio/mean", "perf/throughput", "off_policy/mean", "off_policy/max"),
        *("time/step", "time/wait_for_batch", "time/broadcast_weights"),
    ],
)
def test_the_usual_names_of_the_field_are_registered(name: str):
    assert names.find_metric(name).name == name


def test_a_pattern_stands_for_one_part_of_a_name():
    assert names.find_metric("rewards/exact_match/mean").name == "rewards/{function}/mean"
    assert names.find_metric("eval/heldout/reward_se").name == "eval/{set}/reward_se"
    assert names.find_metric("experience/dropped/stale").unit == "samples"


@pytest.mark.parametrize("name", ["rewards", "rewards//mean", "rewards/a/b/mean", "reward/exact_match", "", "Reward"])
def test_an_unknown_name_is_refused_and_named(name: str):
    with pytest.raises(ValueError, match="is not registered") as error:
        names.find_metric(name)
    assert repr(name) in str(error.value)


def test_each_name_is_registered_once_and_has_unit_and_meaning():
    metrics = [metric for section in names.SECTIONS.values() for metric in section]
    assert len({metric.name for metric in metrics}) == len(metrics)
    assert all(metric.unit and metric.meaning.endswith(".") for metric in metrics)


def test_the_documentation_is_current():
    document = DOCUMENT.read_text()
    assert document == names.with_current_tables(document), "run python -m gyre_core.monitor.names docs/metrics.md"


def test_a_document_without_markers_is_refused():
    with pytest.raises(ValueError, match="lacks the line"):
        names.with_current_tables("# Metrics\n")
