"""YAML with positions: core-schema scalars, duplicates, merge keys, and no tags."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gyre_core.config.yaml_reader import YamlProblem, read_scalar, read_yaml, write_yaml

SCALARS = {
    "1e-5": 1e-05,
    "5e-7": 5e-07,
    "1.0e6": 1000000.0,
    "1E3": 1000.0,
    "-2.5": -2.5,
    ".5": 0.5,
    "5.": 5.0,
    "0": 0,
    "-7": -7,
    "+7": 7,
    "true": True,
    "False": False,
    "null": None,
    "~": None,
    "": None,
    # Text, although YAML 1.1 reads a truth value, octal, base 60, a joined number, a date, hexadecimal, not-a-number.
    "on": "on",
    "off": "off",
    "yes": "yes",
    "n": "n",
    "012": "012",
    "00.5": "00.5",
    "1:30": "1:30",
    "2025_01": "2025_01",
    "1_000": "1_000",
    "2025-01-01": "2025-01-01",
    "0x10": "0x10",
    "0o17": "0o17",
    "0b11": "0b11",
    ".nan": ".nan",
    ".inf": ".inf",
    "1e": "1e",
    "=": "=",
    # Quotes and the tag for text make text of anything.
    "'1e-5'": "1e-5",
    '"on"': "on",
    "!!str 12": "12",
    "[1, two, 3.0]": [1, "two", 3.0],
    "{a: on}": {"a": "on"},
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalars_mean_what_they_look_like(text, value):
    read = read_scalar(text)
    assert read == value
    assert type(read) is type(value)


def test_values_know_their_lines():
    document = read_yaml("a: 1\n\nb:\n  c: [1,\n    2]\n")
    assert document.values == {"a": 1, "b": {"c": [1, 2]}}
    assert document.lines == {(): 1, ("a",): 1, ("b",): 3, ("b", "c"): 4, ("b", "c", 0): 4, ("b", "c", 1): 5}


def test_a_key_given_twice_names_both_lines():
    document = read_yaml("section:\n  max_len: 1\n  other: 2\n  max_len: 3\n")
    (problem,) = document.problems
    assert problem.line == 4
    assert "`max_len` is given twice, on lines 2 and 4" in problem.message


def test_own_keys_prevail_over_merged_ones():
    document = read_yaml("base: &base {max_len: 1, kept: 2}\nsection:\n  <<: *base\n  max_len: 3\n")
    assert document.problems == []
    assert document.values["section"] == {"max_len": 3, "kept": 2}
    assert document.lines["section", "max_len"] == 4
    assert document.lines["section", "kept"] == 1


def test_of_several_merged_sections_the_first_prevails():
    document = read_yaml("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b]}\n")
    assert document.values["c"] == {"x": 1, "y": 2}


def test_a_duplicate_beside_a_merge_is_still_refused():
    document = read_yaml("base: &base {max_len: 1}\nsection:\n  <<: *base\n  max_len: 3\n  max_len: 4\n")
    assert [problem.line for problem in document.problems] == [5]


MISTAKES = {
    "a: [1, 2\nb: 3": (2, "not valid YAML"),
    "a: 1\n\tb: 2": (2, "not valid YAML"),
    "a: 1\n---\nb: 2": (2, "not valid YAML"),
    "a: *missing": (1, "not valid YAML"),
    "- a\n- b": (1, "consists of sections"),
    "just words": (1, "consists of sections"),
    "a: 1\nb: !!python/object/apply:os.getcwd []": (2, "tag `tag:yaml.org,2002:python/object/apply:os.getcwd`"),
    "a: !secret x": (1, "tag `!secret` is not supported"),
    "a: !!int x": (1, "is not of the type"),
    "a: !!timestamp 2025-01-01": (1, "is not supported"),
    "a: &a\n  - *a": (1, "contains itself"),
    "? [a, b]\n: 1": (1, "a key must be a single word"),
    "a: {<<: 3}": (1, "`<<` merges sections"),
}


@pytest.mark.parametrize(("text", "expected"), MISTAKES.items())
def test_mistakes_have_a_line_and_a_sentence(text, expected):
    line, fragment = expected
    (problem,) = read_yaml(text).problems
    assert problem.line == line
    assert fragment.replace("tag:yaml.org,2002:", "!!") in problem.message


def test_a_mistake_in_an_aliased_section_is_told_once():
    document = read_yaml("a: &a {x: !no 1}\nb: *a\nc: {<<: *a}\n")
    assert document.problems == [YamlProblem(1, "the tag `!no` is not supported; write a plain value.")]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n"])
def test_an_empty_document_is_an_empty_mapping(text):
    document = read_yaml(text)
    assert document.values == {}
    assert document.problems == []


@pytest.mark.parametrize("text", ["a: 1", "[1", "x\nb: 1"])
def test_a_scalar_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"\."):
        read_scalar(text)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.dictionaries(st.text(), VALUES))
def test_what_is_written_reads_back_as_the_same(values):
    document = read_yaml(write_yaml(values))
    assert document.problems == []
    assert document.values == values


@given(st.from_regex(r"\A[-+.0-9eE_:xo]{1,8}\Z"))
def test_numbers_are_read_as_python_reads_them_or_stay_text(text):
    """No spelling ever becomes a number other than the one that it shows in decimal notation."""
    try:
        value = read_scalar(f"[{text}]")[0]
    except (ValueError, IndexError, TypeError):
        return
    if isinstance(value, int | float):
        assert value == float(text)


def test_the_surprises_are_those_of_yaml_1_1():
    """The table of spellings above is not made up: PyYAML's own reader gives these values."""
    read = yaml.safe_load("{lr: 1e-5, save: on, seed: 012, wait: 1:30, run: 2025_01}")
    assert read == {"lr": "1e-5", "save": True, "seed": 10, "wait": 90, "run": 202501}
