"""Calls and results as they travel to another process and back, and results that are put together."""

import datetime

import pytest

from gyre_core.config.sections import RewardConfig, RewardFunctionConfig
from gyre_core.rewards.calls import (
    CallResult,
    FunctionCall,
    OutcomeCounts,
    calls_from_json,
    calls_to_json,
    joined,
    results_from_json,
    results_to_json,
)
from gyre_core.rewards.runner import FunctionSet


def test_calls_arrive_as_they_were_sent():
    columns = {"completions": ["a", [{"role": "assistant", "content": "é\n"}]], "answer": [None, 0.1]}
    calls = [FunctionCall("judge", 2, columns, {"step": 3}), FunctionCall("none", 2, {}, {})]
    assert calls_from_json(calls_to_json(calls)) == calls
    with pytest.raises(TypeError, match="date"):
        calls_to_json([FunctionCall("judge", 1, {"day": [datetime.date(2026, 1, 2)]}, {})])


def test_results_arrive_as_they_were_sent_and_add_up_in_their_order():
    first = CallResult([0.1, None], OutcomeCounts(scored=1, abstained=1, retried=2))
    second = CallResult(["no answer"], OutcomeCounts(failed=1, retried=1, timeouts=2))
    assert results_from_json(results_to_json([first, second])) == [first, second]
    whole = joined([first, second])
    assert whole.outcomes == [0.1, None, "no answer"]
    assert whole.counts == OutcomeCounts(scored=1, abstained=1, failed=1, retried=3, timeouts=2)
    assert first.outcomes == [0.1, None]


def test_a_set_of_functions_arrives_as_it_was_sent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = (("a.py:f", "trl"), ("b.py:f", "verl"))
    config = RewardConfig(functions=tuple(RewardFunctionConfig(path=path, signature=kind) for path, kind in paths))
    functions = FunctionSet.of(config, tmp_path / "sub" / "..")
    assert functions == FunctionSet({"a.py:f": "a.py:f", "b.py:f": "b.py:f"}, ("b.py:f",), tmp_path)
    assert FunctionSet.from_json(functions.to_json()) == functions
