"""Parquet files give the rows that JSON Lines of the same content give."""

import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gyre_core.config.sections import DataConfig
from gyre_core.data.parquet import read_parquet
from gyre_core.data.prompts import load_prompts
from gyre_core.data.readers import read_rows
from gyre_core.data.rows import check_column_types
from gyre_core.rewards.loader import check_columns

CALL = {"role": "assistant", "content": "let me see", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
ROWS = [
    {"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2", "extra": {"index": 0}, "tags": ["a"]},
    {"prompt": [{"role": "user", "content": "1+2?"}, CALL], "answer": None, "extra": {"hint": "x"}, "tags": []},
    {"prompt": [{"role": "user", "content": "1+3?"}], "answer": "4", "extra": None, "tags": None},
]


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_rows_are_plain_values_and_named_by_number(tmp_path):
    file = write(tmp_path / "data.parquet", ROWS)
    rows = list(read_parquet(file))
    assert [row.source for row in rows] == [f"{file}:1", f"{file}:2", f"{file}:3"]
    assert rows[0].values["extra"] == {"index": 0, "hint": None}
    assert rows[1].values["tags"] == []
    assert rows[2].values["tags"] is None
    assert json.loads(json.dumps(rows[1].values)) == rows[1].values


def test_null_filled_keys_never_reach_a_prompt_and_ids_are_those_of_json_lines(tmp_path):
    write(tmp_path / "data.parquet", ROWS)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    loaded = [
        load_prompts(DataConfig(path=str(tmp_path / name), evaluation_size=0), seed=0).training
        for name in ("data.parquet", "data.jsonl")
    ]
    assert [row.prompt for row in loaded[0]] == [row["prompt"] for row in ROWS]
    assert [row.prompt_id for row in loaded[0]] == [row.prompt_id for row in loaded[1]]


def test_many_row_groups_and_other_encodings(tmp_path):
    rows = [{"prompt": f"{n}+1=", "kind": ["even", "odd"][n % 2]} for n in range(1000)]
    table = pa.Table.from_pylist(rows)
    table = table.set_column(1, "kind", table["kind"].dictionary_encode()).cast(
        pa.schema([("prompt", pa.large_string()), ("kind", pa.dictionary(pa.int32(), pa.string()))])
    )
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=64, compression="zstd")
    read = list(read_parquet(tmp_path / "data.parquet"))
    assert [row.values for row in read] == rows
    assert read[-1].source.endswith("data.parquet:1000")


def test_values_without_a_form_in_json_become_text_or_are_refused(tmp_path):
    day, price = datetime.date(2025, 4, 3), decimal.Decimal("1.50")
    moment = datetime.datetime(2025, 4, 3, 12, 0, 1)
    table = pa.Table.from_pylist([{"day": day, "price": price, "moment": moment}])
    pq.write_table(
        table.append_column("map", pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))), tmp_path / "data.parquet"
    )
    (row,) = read_parquet(tmp_path / "data.parquet")
    assert row.values == {"day": "2025-04-03", "price": "1.50", "moment": "2025-04-03 12:00:01", "map": {"k": 1}}
    image = write(tmp_path / "image.parquet", [{"images": None}, {"images": [{"bytes": b"\x89PNG"}]}])
    with pytest.raises(ValueError, match=r"image\.parquet:2: column 'images' holds bytes"):
        list(read_parquet(image))


def test_files_share_one_schema(tmp_path):
    """The type of the first file, where the column is null throughout, binds nobody."""
    write(tmp_path / "1.parquet", [{"prompt": "a", "answer": None}])
    write(tmp_path / "2.parquet", [{"prompt": "b", "answer": "two", "level": 1}])
    (tmp_path / "3.jsonl").write_text('{"prompt": "c", "level": 2}\n')
    rows = read_rows(tmp_path, "data.path")
    assert [row.values for row in rows] == [
        {"prompt": "a", "answer": None, "level": None},
        {"prompt": "b", "answer": "two", "level": 1},
        {"prompt": "c", "answer": None, "level": 2},
    ]
    check_column_types(rows, ["answer", "level"])
    write(tmp_path / "4.parquet", [{"prompt": "d", "answer": 4}])
    with pytest.raises(ValueError, match=r"4\.parquet:1: column 'answer' holds a number, but text at .*2\.parquet:1"):
        check_column_types(read_rows(tmp_path, "data.path"), ["answer"])


@pytest.mark.parametrize("content", [b"", b"PAR1", b"prompt\nhello\n"])
def test_a_file_that_is_no_parquet_is_named(tmp_path, content):
    file = tmp_path / "data.parquet"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.parquet: not a Parquet file"):
        read_rows(file, "data.path")


def test_a_damaged_page_is_an_error(tmp_path):
    file = write(tmp_path / "data.parquet", [{"prompt": f"{n}" * 50} for n in range(500)])
    content = bytearray(file.read_bytes())
    content[10:2000] = bytes(1990)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.parquet: not a Parquet file"):
        list(read_parquet(file))


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(ValueError, match=r"data\.parquet: two columns have one name"):
        list(read_parquet(tmp_path / "data.parquet"))


def test_a_folder_of_several_splits_is_refused(tmp_path):
    for name in ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet"):
        write(tmp_path / name, [{"prompt": name}])
    assert len(read_rows(tmp_path, "data.path")) == 2
    write(tmp_path / "trains.parquet", [{"prompt": "about trains"}])
    assert len(read_rows(tmp_path, "data.path")) == 3
    write(tmp_path / "test.parquet", [{"prompt": "held out"}])
    with pytest.raises(ValueError, match=r"data\.path: .* files of the splits test, train; name one file"):
        read_rows(tmp_path, "data.path")


def test_verls_columns_are_ordinary_ones(tmp_path):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n}+1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(3)
    ]
    path = str(write(tmp_path / "train.parquet", rows))
    splits = load_prompts(DataConfig(path=path, evaluation_size=1), seed=0)
    assert splits.columns == ("data_source", "ability", "reward_model", "extra_info")
    for row in splits.training + splits.evaluation:
        original = rows[row.columns["extra_info"]["index"]]
        assert {"prompt": row.prompt, **row.columns} == original
    check_columns({}, splits.columns)  # None of them hides an argument of a reward function.
