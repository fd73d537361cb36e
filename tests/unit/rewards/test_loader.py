"""Finding reward functions, and reading what they ask for."""

import sys

import pytest

from gyre_core.rewards.functions import partial_match
from gyre_core.rewards.loader import (
    BUILT_IN,
    OWN_ARGUMENTS,
    Signature,
    check_columns,
    load_function,
    read_signature,
)

SOURCE = """
import neighbour_of_rewards

class Judges:
    @staticmethod
    def strict(completions, **columns):
        return [1.0 for _ in completions]

def length(completions, **columns):
    return [float(len(completion)) for completion in completions]

constant = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "judge_file.py").write_text(SOURCE)
    (tmp_path / "neighbour_of_rewards.py").write_text("")
    (tmp_path / "judge_module_fails.py").write_text("raise RuntimeError('no key in the environment')")
    (tmp_path / "judge_module_exits.py").write_text("import sys; sys.exit('bye')")
    (tmp_path / "judge_module_lacks.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_every_kind_of_path_is_found(folder):
    assert load_function("partial_match", folder) is partial_match
    assert load_function("gyre_core.rewards.functions:partial_match", folder) is partial_match
    assert load_function("judge_file.py:length", folder)(completions=["abc"]) == [3.0]
    assert load_function(f"{folder}/judge_file.py:length", folder / "elsewhere")(completions=["ab"]) == [2.0]
    assert load_function("judge_file:Judges.strict", folder)(completions=["ab"]) == [1.0]


def test_a_file_is_imported_once(folder):
    first, second = load_function("judge_file.py:length", folder), load_function("judge_file.py:length", folder)
    assert first is second


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("partial_mach", "write package.module:function, FILE.py:function, or a built-in"),
        ("judge_file.length", "write package.module:function"),
        (":length", "write package.module:function"),
        ("judge_file:", "write package.module:function"),
        ("no_such_package.rewards:f", "there is no module 'no_such_package'"),
        ("gyre_core.no_such_module:f", "there is no module 'gyre_core.no_such_module'"),
        ("no_such_file.py:f", "there is no file .*/no_such_file.py"),
        ("judge_file.py:width", "judge_file.py has no 'width'"),
        ("judge_file:Judges.loose", "judge_file has no 'Judges.loose'"),
        ("judge_file.py:constant", "it is of type int, not a function"),
        ("judge_module_fails:f", "(?s)cannot be imported:.*Traceback.*RuntimeError: no key in the environment"),
        ("judge_module_fails.py:f", "(?s)cannot be imported:.*RuntimeError: no key in the environment"),
        ("judge_module_exits:f", "(?s)cannot be imported:.*SystemExit: bye"),
        ("judge_module_lacks:f", "(?s)cannot be imported:.*No module named 'a_module_that_is_not_there'"),
        ("judge_module_lacks.py:f", "(?s)cannot be imported:.*No module named 'a_module_that_is_not_there'"),
    ],
)
def test_a_bad_path_is_explained(folder, path, message):
    with pytest.raises(ValueError, match=message) as error:
        load_function(path, folder)
    assert f"'{path}'" in str(error.value)


def test_signatures():
    def named(completions, answer, *, tolerance=0.1):
        return completions, answer, tolerance

    def everything(completions, **columns):
        return completions, columns

    assert read_signature("f", named) == Signature(("completions", "answer"), ("tolerance",), takes_all=False)
    assert read_signature("f", everything) == Signature(("completions",), (), takes_all=True)
    assert read_signature("f", everything).wants("answer")
    assert not read_signature("f", everything).names("finish_reasons")
    assert read_signature("f", named).wants("tolerance")
    assert not read_signature("f", named).wants("prompts")
    assert read_signature("partial_match", partial_match).names("finish_reasons")


def test_functions_that_take_no_keywords_are_refused():
    def positional(completions, /, answer):
        return completions, answer

    with pytest.raises(ValueError, match=r"'m:f': its argument 'completions' is positional only"):
        read_signature("m:f", positional)
    with pytest.raises(ValueError, match="its signature cannot be read"):
        read_signature("builtins:max", max)


def test_a_missing_column_is_named_beside_those_present():
    signatures = {"f": Signature(("completions", "answer"), ("level",), takes_all=True)}
    check_columns(signatures, ["answer"])
    with pytest.raises(ValueError, match=r"'f' needs the column 'answer'.* its columns: 'solution', 'id'"):
        check_columns(signatures, ["solution", "id"])
    with pytest.raises(ValueError, match="its columns: none"):
        check_columns(signatures, [])


@pytest.mark.parametrize("column", ["prompts", "completions", "completion_ids"])
def test_a_column_must_not_hide_an_argument(column):
    with pytest.raises(ValueError, match=f"column '{column}' has the name of an argument"):
        check_columns({}, ["answer", column])


@pytest.mark.parametrize("column", OWN_ARGUMENTS)
def test_a_column_must_not_hide_an_argument_that_a_function_asks_for(column):
    asking = Signature(("completions", column), (), takes_all=False)
    others = Signature(("completions",), (), takes_all=True)
    check_columns({"f": others}, ["answer", column])
    with pytest.raises(ValueError, match=f"column '{column}' has the name of an argument"):
        check_columns({"f": others, "g": asking}, ["answer", column])


@pytest.mark.parametrize(("path", "module"), [("math_answer", "math_verify"), ("reasoning_gym", "reasoning_gym")])
def test_a_built_in_function_without_its_library_names_the_extra(tmp_path, monkeypatch, path, module):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"{module}.factory", raising=False)
    monkeypatch.delitem(sys.modules, BUILT_IN[path].partition(":")[0], raising=False)
    with pytest.raises(ValueError, match=rf"'{path}' needs the module {module}.*pip install 'gyre\[rewards\]'"):
        load_function(path, tmp_path)
