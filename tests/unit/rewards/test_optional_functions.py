"""The built-in rewards for mathematics, form and reasoning-gym, by values worked out by hand."""

import json

import pytest

from gyre_core.rewards.functions_format import think_format

MATHEMATICS = [  # completion, answer, value
    ("5", 5, 1.0),
    ("The answer is 5.", "5", 1.0),
    ("2 + 3 = 5", "5", 1.0),
    (r"\boxed{\frac12}", "0.5", 1.0),
    ("x = 1/2", r"$\frac{1}{2}$", 1.0),
    (r"\boxed{1,000}", "1000", 1.0),
    (r"\boxed{2^{10}}", r"\boxed{1024}", 1.0),
    (r"$\boxed{\{1, 2\}}$.", r"\{2, 1\}", 1.0),
    (r"\boxed{\text{Tuesday}}", "Tuesday", 1.0),
    (r"\boxed{5}, that is \boxed{5.0}", "5", 1.0),
    (r"<think>Is it \boxed{4}?</think>\boxed{5}", "5", 1.0),
    ("B", "B", 1.0),
    ("4", "5", 0.0),
    ("-5", "5", 0.0),
    (r"\boxed{(1, 2)}", "(2, 1)", 0.0),
    # Empty.
    ("", "5", 0.0),
    (r"\boxed{}", "5", 0.0),
    (r"\boxed{5", "5", 0.0),
    ("<think>5</think>", "5", 0.0),
    # Hedged.
    ("A or B or C", "B", 0.0),
    ("3 or 4 or 5", "5", 0.0),
    ("3, 4, 5", "5", 0.0),
    ("x = 4 or x = 5", "5", 0.0),
    (r"\boxed{4 \text{ or } 5}", "5", 0.0),
    (r"\boxed{4, 5}", "5", 0.0),
    # Contradictory.
    (r"\boxed{4} or \boxed{5}", "5", 0.0),
    (r"\boxed{5} or \boxed{4}", "5", 0.0),
    ("5", None, None),
]


@pytest.mark.parametrize(("completion", "answer", "value"), MATHEMATICS)
def test_mathematical_answers(completion, answer, value):
    module = pytest.importorskip("gyre_core.rewards.functions_math", exc_type=ModuleNotFoundError)
    messages = [{"role": "assistant", "content": completion}]
    for shape in (completion, messages):
        assert module.math_answer([shape], [answer], ["stop"]) == [value]
    assert module.math_answer([completion], [answer], ["length"]) == [None if value is None else 0.0]


def test_the_right_answer_is_the_first_argument_of_the_comparison(monkeypatch):
    module = pytest.importorskip("gyre_core.rewards.functions_math", exc_type=ModuleNotFoundError)
    compared = []
    monkeypatch.setattr(module, "_are_equal", lambda gold, candidate: bool(compared.append((gold[0], candidate[0]))))
    module.math_answer([r"\boxed{7}"], ["4"], ["stop"])
    assert compared == [(4, 7)]


def test_boxes_are_found_by_their_braces():
    module = pytest.importorskip("gyre_core.rewards.functions_math", exc_type=ModuleNotFoundError)
    assert module.boxes(r"\boxed{a} \boxed {\frac{1}{2}} \boxed{} \boxed{b") == ["a", r"\frac{1}{2}", "", ""]
    assert module.boxes("boxed{a}") == []


FORMS = [  # the prompt's end, the completion, value
    ("ask", "<think>sum</think>4", 1.0),
    ("ask", "  <think>\nsum\n</think>\n\n4", 1.0),
    ("ask", "sum</think>4", 0.0),
    ("ask<think>", "sum</think>4", 1.0),
    ("ask<think>\n", "sum</think>4", 1.0),
    ("ask<think>", "<think>sum</think>4", 0.0),
    ("ask", "well <think>sum</think>4", 0.0),
    ("ask", "<think>sum</think>", 0.0),
    ("ask", "<think>sum</think>  ", 0.0),
    ("ask", "<think> </think>4", 0.0),
    ("ask", "<think></think>4", 0.0),
    ("ask", "<think>sum</think>4</think>5", 0.0),
    ("ask", "<think>a</think><think>b</think>4", 0.0),
    ("ask", "4", 0.0),
    ("ask", "", 0.0),
    ("ask<think>", "", 0.0),
]


@pytest.mark.parametrize(("prompt", "completion", "value"), FORMS)
def test_thoughts_then_an_answer(prompt, completion, value):
    assert think_format([completion], [prompt], ["stop"]) == [value]
    assert think_format([[{"role": "assistant", "content": completion}]], [prompt], ["stop"]) == [value]
    assert think_format([completion], [prompt], ["length"]) == [0.0]


def gym(completion, answer, metadata, prompt="ask", reason="stop"):
    module = pytest.importorskip("gyre_core.rewards.functions_gym", exc_type=ModuleNotFoundError)
    return module.score_entries([completion], [prompt], [answer], [metadata], [reason])[0]


def rows(task, size=3, **parameters):
    pytest.importorskip("reasoning_gym")
    from gyre_core.data.reasoning_gym import read_reasoning_gym

    return [row.values for row in read_reasoning_gym(task, parameters, size, seed=5)]


SUM = {"source_dataset": "chain_sum"}


def test_worked_values_of_a_task():
    assert gym("12", "12", SUM) == 1.0
    assert gym(" 12\n", "12", SUM) == 1.0
    assert gym("13", "12", SUM) == 0.0
    assert gym("", "12", SUM) == 0.0
    assert gym("12", "12", SUM, reason="length") == 0.0
    assert gym("12", "12", None) is None


def test_tags_count_where_the_prompt_asks_for_them():
    asks = "Put it between <answer> and </answer>."
    assert gym("so <answer> 12 </answer>", "12", SUM, asks) == 1.0
    assert gym("<answer>3</answer> no, <answer>12</answer>", "12", SUM, asks) == 1.0
    assert gym("12", "12", SUM, asks) == 0.0
    assert gym("<answer></answer>", "12", SUM, asks) == 0.0
    assert gym("<answer>12</answer>", "12", SUM) < 1.0


def test_an_unknown_task_is_an_error():
    with pytest.raises(ValueError, match="'chain_some', which is no task"):
        gym("12", "12", {"source_dataset": "chain_some"})


def test_parameters_reach_the_scorer_of_the_task():
    # It allows for one unit of the last decimal place.
    metadata = {"source_dataset": "decimal_arithmetic"}
    assert gym("1.05", "1.00", metadata | {"parameters": {"max_num_decimal_places": 2}}) == 0.0
    assert gym("1.05", "1.00", metadata | {"parameters": {"max_num_decimal_places": 1}}) == 1.0


@pytest.mark.parametrize("task", ["chain_sum", "rearc", "graph_color", "puzzle24", "time_intervals", "maze"])
def test_a_task_s_own_answer_earns_1_after_a_way_through_a_data_file(task):
    for row in rows(task):
        stored = json.loads(json.dumps(row))
        answer = stored["answer"]
        if answer is None:
            answer = json.dumps(stored["metadata"]["possible_answer"])
        assert gym(answer, stored["answer"], stored["metadata"]) == 1.0
        assert gym("no idea", stored["answer"], stored["metadata"]) < 0.1


def test_a_scorer_that_breaks_down_on_an_answer_gives_0():
    for row in rows("prime_factorization"):
        assert gym("two times three", row["answer"], row["metadata"]) == 0.0


def test_a_scorer_that_breaks_down_on_the_row_is_a_failure():
    with pytest.raises(ValueError, match="invalid literal"):
        gym("2", "two", {"source_dataset": "prime_factorization"})
