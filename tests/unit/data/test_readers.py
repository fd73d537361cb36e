"""Reading rows: every fault is named by file and line, and files share one schema."""

import json
from pathlib import Path

import pytest

from gyre_core.data.jsonl import read_jsonl
from gyre_core.data.readers import read_rows
from gyre_core.data.rows import check_column_types


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_lines_are_rows_and_blank_lines_are_skipped_but_counted(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a\\u2028b"}\r\n\n{"prompt": "c"}')
    rows = list(read_jsonl(file))
    assert [(row.source, row.values) for row in rows] == [
        (f"{file}:1", {"prompt": "a\u2028b"}),
        (f"{file}:3", {"prompt": "c"}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', "not a line of JSON"),
        (b"{'prompt': 'a'}", "not a line of JSON"),
        (b'{"prompt": "\xff"}', "not a line of JSON"),
        (b'["a"]', "holds a list"),
        (b'"a"', "holds text"),
        (b"3", "holds a number"),
        (b"null", "holds null"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message) as error:
        list(read_jsonl(file))
    assert str(error.value).startswith(f"{file}:2: ")


def test_files_of_a_folder_are_read_by_name_and_share_one_schema(tmp_path):
    write(tmp_path / "2.jsonl", {"prompt": "b", "answer": "two"})
    write(tmp_path / "1.jsonl", {"prompt": "a", "answer": None}, {"prompt": "c"})
    (tmp_path / "notes.txt").write_text("not data")
    rows = read_rows(tmp_path, "data.path")
    assert [row.values for row in rows] == [
        {"prompt": "a", "answer": None},
        {"prompt": "c", "answer": None},
        {"prompt": "b", "answer": "two"},
    ]
    check_column_types(rows, ["answer"])


@pytest.mark.parametrize("other", [4, True, ["4"], {"value": "4"}])
def test_a_column_that_changes_its_type_is_refused_naming_both_rows(tmp_path, other):
    first = write(tmp_path / "1.jsonl", {"answer": None}, {"answer": "4"})
    second = write(tmp_path / "2.jsonl", {"answer": other})
    rows = read_rows(tmp_path, "data.path")
    with pytest.raises(ValueError, match="column 'answer'") as error:
        check_column_types(rows, ["answer"])
    assert f"{first}:2" in str(error.value)
    assert f"{second}:1" in str(error.value)


def test_nothing_to_read_is_an_error(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    other = tmp_path / "data.csv"
    other.write_text("prompt\n")
    for path, message in [
        (empty, "holds no rows"),
        (folder, "holds no data file"),
        (tmp_path / "absent.jsonl", "there is no file or folder"),
        (other, r"must end in \.jsonl"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            read_rows(path, "data.path")
        assert str(error.value).startswith("data.path: ")
        assert str(path) in str(error.value)
