"""Loading, splitting, naming and tokenising prompts."""

import json

import numpy as np
import pytest

from gyre_core.config.sections import DataConfig
from gyre_core.data.prompts import load_prompts, tokenize


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(count):
    return [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(count)]


def render(prompt):
    text = prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
    return text, np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def test_arithmetic_is_right_distinct_and_disjoint():
    splits = load_prompts(DataConfig(), seed=3)
    assert [len(splits.training), len(splits.evaluation), len(splits.warm_start)] == [6000, 256, 3744]
    everything = [*splits.training, *splits.evaluation, *splits.warm_start]
    assert len({row.prompt for row in everything}) == len({row.prompt_id for row in everything}) == 10_000
    for row in everything:
        left, right = row.prompt.removesuffix("=").split("+")
        assert len(left) == len(right) == 2
        assert row.columns == {"answer": str(int(left) + int(right)).rjust(3, "0")}
    assert splits.columns == ("answer",)
    assert (splits.duplicates, splits.overlapping) == (0, 0)


def test_splits_are_a_function_of_the_seed(tmp_path):
    path = write(tmp_path / "data.jsonl", sums(40))
    for config in (DataConfig(), DataConfig(path=path, evaluation_size=10)):
        assert load_prompts(config, seed=1) == load_prompts(config, seed=1)
        first, second = load_prompts(config, seed=1), load_prompts(config, seed=2)
        assert {row.prompt for row in first.evaluation} != {row.prompt for row in second.evaluation}


def test_more_arithmetic_than_there_is_is_refused():
    with pytest.raises(ValueError, match=r"data\.size: 9800 .* only 9744"):
        load_prompts(DataConfig(size=9800), seed=0)
    assert len(load_prompts(DataConfig(size=9744), seed=0).training) == 9744


def test_rows_are_held_out_once_and_none_is_lost(tmp_path):
    path = write(tmp_path / "data.jsonl", sums(100))
    splits = load_prompts(DataConfig(path=path, evaluation_size=30), seed=5)
    training, evaluation = ({row.prompt for row in rows} for rows in (splits.training, splits.evaluation))
    assert len(evaluation) == 30
    assert not training & evaluation
    assert training | evaluation == {row["prompt"] for row in sums(100)}
    assert splits.warm_start == ()


def test_nothing_is_held_out_at_size_zero(tmp_path):
    splits = load_prompts(DataConfig(path=write(tmp_path / "data.jsonl", sums(3)), evaluation_size=0), seed=0)
    assert [row.prompt for row in splits.training] == ["0+1=", "1+1=", "2+1="]
    assert splits.evaluation == ()
    assert splits.columns == ("answer",)


@pytest.mark.parametrize("size", [5, 6])
def test_too_few_rows_to_hold_out(tmp_path, size):
    path = write(tmp_path / "data.jsonl", sums(5))
    with pytest.raises(ValueError, match=rf"data\.evaluation_size: {size} rows .* only 5"):
        load_prompts(DataConfig(path=path, evaluation_size=size), seed=0)


def test_prompts_of_the_evaluation_file_are_never_trained_on(tmp_path):
    path = write(tmp_path / "data.jsonl", sums(10))
    held_out = write(
        tmp_path / "held_out.jsonl", [{"prompt": "3+1=", "answer": "four"}, {"prompt": "x", "answer": "y"}]
    )
    splits = load_prompts(DataConfig(path=path, evaluation_path=held_out), seed=0)
    assert [row.prompt for row in splits.evaluation] == ["3+1=", "x"]
    assert [row.prompt for row in splits.training] == [row["prompt"] for row in sums(10) if row["prompt"] != "3+1="]
    assert splits.overlapping == 1


def test_an_evaluation_file_that_holds_out_everything_is_refused(tmp_path):
    path = write(tmp_path / "data.jsonl", sums(4))
    with pytest.raises(ValueError, match="none is left to train"):
        load_prompts(DataConfig(path=path, evaluation_path=path), seed=0)


def test_columns_are_those_of_both_files(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"prompt": "a", "answer": "1", "level": 2}])
    held_out = write(tmp_path / "held_out.jsonl", [{"prompt": "b", "level": 1, "solution": "2"}])
    assert load_prompts(DataConfig(path=path, evaluation_path=held_out), seed=0).columns == ("level",)


def test_a_missing_prompt_column_lists_the_columns_present(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"question": "1+1?", "answer": "2"}])
    with pytest.raises(ValueError, match=r"no column 'prompt' \(it has 'question', 'answer'\)"):
        load_prompts(DataConfig(path=path, evaluation_size=0), seed=0)
    config = DataConfig(path=path, evaluation_size=0, prompt_column="question")
    (row,) = load_prompts(config, seed=0).training
    assert (row.prompt, row.columns) == ("1+1?", {"answer": "2"})


def test_a_prompt_of_the_wrong_shape_is_named_by_row_and_type(tmp_path):
    rows = [{"prompt": "fine"}, {"prompt": json.dumps({"role": "user", "content": "hello"})}]
    path = write(tmp_path / "data.jsonl", rows)
    with pytest.raises(ValueError, match=r"data\.jsonl:2: the prompt is the JSON text of an object \(dict\)"):
        load_prompts(DataConfig(path=path, evaluation_size=0), seed=0)


def test_shapes_of_one_prompt_give_equal_tokens(tmp_path):
    messages = [{"role": "user", "content": "1+1?"}]
    filled = [{"role": "user", "content": "1+1?", "tool_calls": None}]
    rows = [{"prompt": "1+1?"}, {"prompt": messages}, {"prompt": json.dumps(messages)}, {"prompt": filled}]
    splits = load_prompts(DataConfig(path=write(tmp_path / "data.jsonl", rows), evaluation_size=0), seed=0)
    prompts = tokenize(splits.training, render, max_prompt_tokens=10).prompts
    assert [prompt.token_ids.tolist() for prompt in prompts] == [list(b"1+1?")] * 4
    assert [prompt.prompt for prompt in prompts] == ["1+1?", messages, messages, messages]


def test_equal_texts_with_different_answers_stay_different_prompts(tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}, {"prompt": "a", "answer": "1"}]
    splits = load_prompts(DataConfig(path=write(tmp_path / "data.jsonl", rows), evaluation_size=0), seed=0)
    ids = [row.prompt_id for row in splits.training]
    assert len(set(ids)) == 3
    assert ids[2] == f"{ids[0]}-2"
    assert splits.duplicates == 1


def test_ids_do_not_change_when_rows_move_or_a_column_is_filled_with_null(tmp_path):
    def ids(name, rows):
        config = DataConfig(path=write(tmp_path / name, rows), evaluation_size=0)
        return {row.prompt: row.prompt_id for row in load_prompts(config, seed=0).training}

    rows = sums(5)
    assert ids("a.jsonl", rows) == ids("b.jsonl", rows[::-1])
    more = ids("c.jsonl", [*rows, {"prompt": "new", "hint": "h"}])
    assert {prompt: more[prompt] for prompt in ids("a.jsonl", rows)} == ids("a.jsonl", rows)


def test_an_id_column_names_the_rows(tmp_path):
    rows = [{"prompt": "a", "id": "first"}, {"prompt": "b", "id": "second"}, {"prompt": "c"}]
    path = write(tmp_path / "data.jsonl", rows)
    training = load_prompts(DataConfig(path=path, evaluation_size=0), seed=0).training
    assert [row.prompt_id for row in training[:2]] == ["first", "second"]
    assert training[2].prompt_id not in ("None", "", "first", "second")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["x", "x"], r"data\.jsonl:2: the id 'x' is already taken at .*data\.jsonl:1"),
        ([1.5, 2.5], r"data\.jsonl:1: the column 'id' is a number"),
        (["", "x"], r"data\.jsonl:1: the column 'id' is text"),
        ([[1], [2]], r"data\.jsonl:1: the column 'id' is a list"),
    ],
)
def test_bad_ids_are_refused(tmp_path, ids, message):
    path = write(tmp_path / "data.jsonl", [{"prompt": f"p{place}", "id": value} for place, value in enumerate(ids)])
    with pytest.raises(ValueError, match=message):
        load_prompts(DataConfig(path=path, evaluation_size=0), seed=0)


def test_too_long_prompts_are_dropped_and_counted(tmp_path):
    rows = [{"prompt": "x" * length} for length in (3, 4, 5, 9)]
    training = load_prompts(DataConfig(path=write(tmp_path / "d.jsonl", rows), evaluation_size=0), seed=0).training
    prompts = tokenize(training, render, max_prompt_tokens=4)
    assert [prompt.text for prompt in prompts.prompts] == ["xxx", "xxxx"]
    assert prompts.too_long == 2
    with pytest.raises(ValueError, match="all 4 prompts are longer than 2 tokens"):
        tokenize(training, render, max_prompt_tokens=2)
    assert tokenize([], render, max_prompt_tokens=2).prompts == ()


def test_a_prompt_that_cannot_be_rendered_is_named(tmp_path):
    def fail(prompt):
        raise ValueError("the model has no chat template")

    training = load_prompts(DataConfig(path=write(tmp_path / "d.jsonl", sums(1)), evaluation_size=0), seed=0).training
    with pytest.raises(ValueError, match=r"d\.jsonl:1: the model has no chat template"):
        tokenize(training, fail, max_prompt_tokens=4)


def test_a_system_prompt_goes_before_every_prompt_and_changes_no_id(tmp_path):
    path = write(tmp_path / "data.jsonl", [*sums(3), {"prompt": [{"role": "user", "content": "hello"}]}])
    plain = load_prompts(DataConfig(path=path, evaluation_size=1), seed=0)
    chats = load_prompts(DataConfig(path=path, evaluation_size=1, system_prompt="Be brief."), seed=0)
    system = {"role": "system", "content": "Be brief."}
    for before, after in zip(plain.training + plain.evaluation, chats.training + chats.evaluation, strict=True):
        messages = [{"role": "user", "content": before.prompt}] if isinstance(before.prompt, str) else before.prompt
        assert after.prompt == [system, *messages]
        assert (after.prompt_id, after.columns) == (before.prompt_id, before.columns)
    (tmp_path / "own.jsonl").write_text('{"prompt": [{"role": "system", "content": "Mine."}]}\n')
    config = DataConfig(path=str(tmp_path / "own.jsonl"), evaluation_size=0, system_prompt="Be brief.")
    with pytest.raises(ValueError, match=r"own\.jsonl:1: the prompt has a system message of its own"):
        load_prompts(config, seed=0)


@pytest.fixture
def task():
    pytest.importorskip("reasoning_gym")
    return {"path": "reasoning_gym:chain_sum", "parameters": {"min_terms": 2, "max_terms": 3}}


def test_a_task_gives_training_and_held_out_prompts_of_its_own(task):
    config = DataConfig(**task, size=30, evaluation_size=10)
    splits = load_prompts(config, seed=1)
    assert load_prompts(config, seed=1) == splits
    training, evaluation = ({row.prompt for row in rows} for rows in (splits.training, splits.evaluation))
    assert not training & evaluation
    assert (len(splits.training) + splits.overlapping, len(splits.evaluation)) == (30, 10)
    assert splits.columns == ("answer", "metadata")
    assert {row.columns["metadata"]["source_dataset"] for row in splits.training} == {"chain_sum"}
    other = load_prompts(config, seed=2)
    # Entry i is a function of seed + i, so that neighbouring seeds would share nearly all.
    assert len({row.prompt for row in other.training} & training) < 5
    more = load_prompts(DataConfig(**task, size=60, evaluation_size=10), seed=1)
    assert more.evaluation == splits.evaluation
    assert more.training[: len(splits.training)] == splits.training


def test_a_task_may_hold_out_another_and_the_same(task):
    config = DataConfig(**task, size=20, evaluation_size=7, evaluation_path="reasoning_gym:chain_sum")
    splits = load_prompts(config, seed=1)
    assert len(splits.evaluation) == 7
    assert len(splits.training) + splits.overlapping == 20
    assert splits.overlapping < 5
    with pytest.raises(ValueError, match=r"data\.evaluation_path: .* raise data\.evaluation_size"):
        load_prompts(config.model_copy(update={"evaluation_size": 0}), seed=1)
