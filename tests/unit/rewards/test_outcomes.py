"""Values, scores and shares: a failure never becomes a number, an abstention never a zero."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from gyre_core.rewards.outcomes import check_failure_share, combine, failure_share
from gyre_core.rewards.values import RewardError, read_values
from gyre_core.types import Score


@pytest.mark.parametrize(
    "returned",
    [
        [1.0, None, 0, 1],
        (True, None, False, True),
        [np.float32(1), None, np.int64(0), np.bool_(True)],
        [torch.tensor(1.0), None, torch.tensor([0]), np.array(1)],
        [Fraction(1), None, -0.0, 1],
    ],
)
def test_numbers_of_any_kind_and_abstentions(returned):
    assert read_values("f", returned, 4) == [1.0, None, 0.0, 1.0]
    assert all(value is None or type(value) is float for value in read_values("f", returned, 4))


def test_arrays_and_tensors_are_lists_of_values():
    assert read_values("f", np.array([0.5, 0.0]), 2) == [0.5, 0.0]
    assert read_values("f", torch.tensor([[0.5], [0.0]]), 2) == [0.5, 0.0]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (np.float32("nan"), "nan"),
        (10**400, "inf"),
        ("1.0", r"'1.0' \(str\)"),
        ("", r"'' \(str\)"),
        ([1.0], r"\[1.0\] \(list\)"),
        ({"score": 1}, r"\(dict\)"),
        (1j, r"1j \(complex\)"),
        (np.zeros(2), r"\(ndarray\)"),
        (torch.zeros(2), r"\(Tensor\)"),
    ],
)
def test_what_is_not_a_finite_number_fails_its_row_alone(value, named):
    outcomes = read_values("judge", [1.0, value, None, 0.0], 4)
    assert [outcomes[0], *outcomes[2:]] == [1.0, None, 0.0]
    assert isinstance(outcomes[1], str)
    assert outcomes[1].startswith("reward function 'judge' returned ")
    assert re.search(named, outcomes[1])


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        ([1.0], "got 1, wanted 4"),
        ([1.0, 1.0, 1.0], "got 3, wanted 4"),
        ([], "got 0, wanted 4"),
        ([1.0] * 5, "got 5, wanted 4"),
        (np.zeros((1, 4)), "got 1, wanted 4"),
        (1.0, "returned a value of type float; wanted a list of 4 values"),
        (None, "of type NoneType"),
        (np.array(1.0), "of type ndarray"),
        ("good", "of type str"),
        ({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, "of type dict"),
        ({1.0, 2.0, 3.0, 4.0}, "of type set"),
        ((value for value in [1.0] * 4), "of type generator"),
    ],
)
def test_one_value_per_row_or_nothing(returned, got):
    with pytest.raises(RewardError, match=got) as error:
        read_values("judge", returned, 4)
    assert "'judge'" in str(error.value)


def test_the_reward_is_the_weighted_sum_of_those_that_did_not_abstain():
    weights = {"a": 1.0, "b": 0.5, "c": -2.0}
    score = combine(weights, {"a": 1.0, "b": None, "c": 0.25})
    assert score == Score({"a": 1.0, "b": None, "c": 0.25}, 0.5, "scored")
    assert combine(weights, {"a": 0.0, "b": 0.0, "c": 0.0}).reward == 0.0
    abstained = combine(weights, {"a": None, "b": None, "c": None})
    assert abstained.status == "abstained"
    assert math.isnan(abstained.reward)


def test_one_failed_function_fails_the_row():
    score = combine({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": "no answer"})
    assert (score.status, score.error, dict(score.parts)) == ("failed", "no answer", {"a": 1.0, "b": None})
    assert math.isnan(score.reward)


def test_the_share_of_failures_stops_the_run_above_its_limit():
    scored, failed = Score({}, 1.0, "scored"), Score({}, math.nan, "failed", "the judge is away")
    abstained = Score({}, math.nan, "abstained")
    rows = [scored, failed, abstained, failed]
    assert failure_share(rows) == 0.5
    assert failure_share([]) == 0.0
    check_failure_share(rows, 0.5, step=3)
    check_failure_share([], 0.0, step=3)
    with pytest.raises(RewardError, match=r"100%.*the judge is away"):
        check_failure_share([failed], 1.0, step=3)
    with pytest.raises(RewardError, match=r"step 3: 50% of 4 completions .* 49%; .* the judge is away"):
        check_failure_share(rows, 0.49, step=3)
