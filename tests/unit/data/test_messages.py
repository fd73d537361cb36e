"""Every shape a prompt may lie in."""

import json

import pytest

from gyre_core.data.messages import read_prompt, shape_prompt

MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]


def test_a_list_and_its_json_text_are_the_same_messages():
    assert read_prompt(MESSAGES) == MESSAGES
    assert read_prompt(json.dumps(MESSAGES)) == MESSAGES
    assert read_prompt("  " + json.dumps(MESSAGES, indent=1)) == MESSAGES


@pytest.mark.parametrize("text", ["1+1=", "[3, 1, 2]", "[]", "[x] is {y}", "{not json", " leading space", "3", "null"])
def test_other_text_stays_as_it_is(text):
    assert read_prompt(text) == text


def test_null_keys_are_removed_at_every_depth():
    filled = [
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": None}}]},
        {"role": "user", "content": "go on", "tool_calls": None},
    ]
    assert read_prompt(filled) == [
        {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
        {"role": "user", "content": "go on"},
    ]
    assert read_prompt(json.dumps(filled)) == read_prompt(filled)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (json.dumps(MESSAGES[1]), r"JSON text of an object \(dict\)"),
        (MESSAGES[1], "the prompt is an object"),
        (7, "the prompt is a number"),
        (True, "the prompt is a boolean"),
        (None, "the prompt is null"),
        ("", "empty text"),
        ([], "empty list"),
        (["hello"], "message 1 of the prompt is text"),
        ([MESSAGES[0], "hello"], "message 2 of the prompt is text"),
        (json.dumps([MESSAGES[0], 5]), "message 2 of the prompt is a number"),
        ([{"content": "no role"}], "message 1 of the prompt has no 'role'"),
        ([{"role": None, "content": "no role"}], "message 1 of the prompt has no 'role'"),
    ],
)
def test_other_shapes_are_refused_by_type(value, message):
    with pytest.raises(ValueError, match=message):
        read_prompt(value)


def test_shapes_of_a_chat():
    text, question = "1+1?", [{"role": "user", "content": "1+1?"}]
    system = {"role": "system", "content": "Add."}
    assert shape_prompt(text, system_prompt=None, as_chat=False) == text
    assert shape_prompt(text, system_prompt=None, as_chat=True) == question
    assert shape_prompt(question, system_prompt=None, as_chat=True) == question
    for as_chat in (False, True):
        for prompt in (text, question):
            assert shape_prompt(prompt, system_prompt="Add.", as_chat=as_chat) == [system, *question]
    with pytest.raises(ValueError, match=r"a system message of its own; .* data\.system_prompt"):
        shape_prompt(MESSAGES, system_prompt="Add.", as_chat=False)
    assert shape_prompt(MESSAGES, system_prompt=None, as_chat=True) == MESSAGES
