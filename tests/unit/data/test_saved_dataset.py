"""Folders that the library `datasets` wrote: `fixtures/saved` is one of version 5.2, four rows in two files."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from gyre_core.config.sections import DataConfig
from gyre_core.data.prompts import load_prompts
from gyre_core.data.readers import read_rows

SAVED = Path(__file__).parent / "fixtures" / "saved"
CALL = {
    "role": "assistant",
    "content": "let me see",
    "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 1}}],
}


def test_a_saved_data_set_is_read_in_its_order():
    rows = read_rows(SAVED, "data.path")
    assert [row.source.partition("saved/")[2] for row in rows] == [
        "data-00000-of-00002.arrow:1",
        "data-00000-of-00002.arrow:2",
        "data-00001-of-00002.arrow:1",
        "data-00001-of-00002.arrow:2",
    ]
    assert [row.values["answer"] for row in rows] == ["1", "2", "3", "4"]
    assert [row.values["parity"] for row in rows] == [0, 1, 0, 1]
    assert [row.values["tags"] for row in rows] == [[], ["sum"], ["sum", "small"], []]
    assert [row.values["extra_info"] for row in rows] == [
        {"index": number, "hint": "carry" if number == 2 else None} for number in range(4)
    ]


def test_its_prompts_lose_the_null_keys_that_arrow_fills_in():
    splits = load_prompts(DataConfig(path=str(SAVED), evaluation_size=0), seed=0)
    questions = [[{"role": "user", "content": f"{number}+1?"}] for number in range(4)]
    questions[1].append(CALL)
    assert [row.prompt for row in splits.training] == questions
    assert splits.columns == ("answer", "level", "tags", "extra_info", "parity")


def test_the_splits_of_a_dictionary_are_listed(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        shutil.copytree(SAVED, tmp_path / split)
    with pytest.raises(ValueError, match=rf"holds the splits train, test; name one of them, as {tmp_path}/train"):
        read_rows(tmp_path, "data.path")
    assert len(read_rows(tmp_path / "train", "data.path")) == 4


def test_damage_is_named(tmp_path):
    folder = tmp_path / "saved"
    shutil.copytree(SAVED, folder)
    part = folder / "data-00001-of-00002.arrow"
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"data-00001-of-00002\.arrow: not a part of a saved data set"):
        read_rows(folder, "data.path")
    part.unlink()
    with pytest.raises(ValueError, match=r"data-00001-of-00002\.arrow: not a part of a saved data set"):
        read_rows(folder, "data.path")
    (folder / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"state\.json: not the list of a saved data set"):
        read_rows(folder, "data.path")


def test_rows_behind_an_index_are_refused(tmp_path):
    shutil.copytree(SAVED, tmp_path / "saved")
    state = json.loads((SAVED / "state.json").read_text()) | {"_indices_data_files": [{"filename": "indices.arrow"}]}
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="flatten_indices"):
        read_rows(tmp_path / "saved", "data.path")


def test_an_empty_one_holds_no_rows(tmp_path):
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, pa.schema([("a", "int64")])):
        pass
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    with pytest.raises(ValueError, match="holds no rows"):
        read_rows(tmp_path, "data.path")
