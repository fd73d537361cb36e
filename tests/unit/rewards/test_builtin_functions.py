"""The built-in rewards, by values worked out by hand."""

import pytest

from gyre_core.rewards.functions import completion_text, exact_match, partial_match

CASES = [  # completion, answer, finish reason, exact, partial
    ("102", "102", "stop", 1.0, 1.0),
    (" 102\n", "102", "stop", 1.0, 1.0),
    ("102", 102, "stop", 1.0, 1.0),
    ("103", "102", "stop", 0.0, 0.5 * 2 / 3),
    ("10", "102", "stop", 0.0, 0.5 * 2 / 3),
    ("1025", "102", "stop", 0.0, 0.5 * 3 / 4),
    ("102 102 102", "102", "stop", 0.0, 0.5 * 3 / 11),
    ("201", "102", "stop", 0.0, 0.5 * 1 / 3),
    ("999", "102", "stop", 0.0, 0.0),
    ("", "102", "stop", 0.0, 0.0),
    ("", "", "stop", 0.0, 0.0),
    ("102", "102", "length", 0.0, 0.0),
    ("102", None, "stop", None, None),
]


@pytest.mark.parametrize(("completion", "answer", "reason", "exact", "partial"), CASES)
def test_values(completion, answer, reason, exact, partial):
    messages = [{"role": "assistant", "content": completion}]
    for shape in (completion, messages):
        assert exact_match([shape], [answer], [reason]) == [exact]
        assert partial_match([shape], [answer], [reason]) == [pytest.approx(partial)]


def test_rows_do_not_touch_each_other():
    completions, answers, reasons, exact, _ = map(list, zip(*CASES, strict=True))
    assert exact_match(completions, answers, reasons) == exact
    assert exact_match(completions[::-1], answers[::-1], reasons[::-1]) == exact[::-1]


def test_the_text_of_messages_is_that_of_the_last():
    assert completion_text("plain") == "plain"
    assert completion_text([{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}]) == "b"
