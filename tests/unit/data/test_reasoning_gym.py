"""Rows of reasoning-gym's tasks."""

import json
import sys

import pytest

from gyre_core.data.reasoning_gym import read_reasoning_gym

pytest.importorskip("reasoning_gym")


def test_rows_hold_question_answer_and_where_they_come_from():
    rows = read_reasoning_gym("chain_sum", {"min_terms": 2, "max_terms": 2, "max_digits": 1}, 20, seed=3)
    assert len(rows) == 20
    assert rows[4].source == "reasoning_gym:chain_sum:4"
    for row in rows:
        assert sorted(row.values) == ["answer", "metadata", "prompt"]
        expression = row.values["metadata"]["expression"]
        assert row.values["answer"] == str(eval(expression))
        assert expression in row.values["prompt"]
        assert row.values["metadata"]["source_dataset"] == "chain_sum"
        assert row.values["metadata"]["parameters"] == {"min_terms": 2, "max_terms": 2, "max_digits": 1}


def test_rows_are_a_function_of_seed_and_place_and_survive_json():
    first = [row.values for row in read_reasoning_gym("rearc", {}, 4, seed=1)]
    assert first == [row.values for row in read_reasoning_gym("rearc", {}, 6, seed=1)][:4]
    assert first != [row.values for row in read_reasoning_gym("rearc", {}, 4, seed=2)]
    assert json.loads(json.dumps(first)) == first


@pytest.mark.parametrize(
    ("task", "parameters", "message"),
    [
        ("chain_some", {}, r"no task 'chain_some'; did you mean chain_sum"),
        ("qqq", {}, r"no task 'qqq'$"),
        ("chain_sum", {"min_term": 3}, r"has no parameter 'min_term'; did you mean min_terms.*; its own: "),
        ("chain_sum", {"seed": 3}, r"has no parameter 'seed'.*size and seed are data.size and experiment.seed"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "the task 'chain_sum' refuses them: "),
        ("chain_sum", {"min_terms": "many"}, "the task 'chain_sum' refuses them: "),
        ("composite", {}, "the task 'composite' refuses them: "),
    ],
)
def test_mistakes_are_told(task, parameters, message):
    with pytest.raises(ValueError, match=message):
        read_reasoning_gym(task, parameters, 3, seed=0)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "reasoning_gym.factory", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'gyre\[rewards\]'"):
        read_reasoning_gym("chain_sum", {}, 3, seed=0)
