"""A table of rollouts holds them exactly."""

import numpy as np
import pyarrow as pa
import pytest
from experience_samples import make_group, plain, random_groups

from gyre_core.experience.schema import SEGMENT_SCHEMA, groups_to_table, table_to_groups
from gyre_core.experience.tables import list_array, split_lists


@pytest.mark.parametrize("seed", range(20))
def test_groups_come_back_exactly(seed):
    groups = random_groups(np.random.default_rng(seed), count=seed)
    table = groups_to_table("00000001-0000", groups)
    assert table.schema.equals(SEGMENT_SCHEMA)
    assert table.num_rows == sum(len(group.rollouts) for group in groups)
    assert plain(table_to_groups(table)) == plain(groups)


def test_arrays_that_come_back_are_writable():
    [group] = table_to_groups(groups_to_table("00000001-0000", [make_group("a", [1.0, 0.0], reference=True)]))
    for values in (
        group.prompt.token_ids,
        group.rollouts[0].completion.token_ids,
        group.rollouts[0].reference_log_probabilities,
    ):
        assert values.flags.writeable


def test_groups_are_told_apart_by_id_and_not_by_prompt():
    groups = [make_group(name, [1.0, 0.0], prompt_id="same") for name in ("a", "b")]
    assert [group.group_id for group in table_to_groups(groups_to_table("00000001-0000", groups))] == ["a", "b"]


def test_scattered_rows_of_a_group_are_refused():
    table = groups_to_table("00000001-0000", [make_group("a", [1.0, 0.0]), make_group("b", [1.0])])
    with pytest.raises(ValueError, match="do not lie together"):
        table_to_groups(table.take([0, 2, 1]))


def test_a_column_that_json_cannot_hold_is_named():
    group = make_group("a", [1.0, 0.0])
    group.prompt.columns["picture"] = object()
    with pytest.raises(ValueError, match="prompt 'prompt of a' has a column that cannot be stored as JSON"):
        groups_to_table("00000001-0000", [group])


def test_lists_with_nulls_and_empties_come_back():
    arrays = [np.array([1, 2], np.int32), None, np.empty(0, np.int32), np.array([3], np.int32)]
    column = pa.chunked_array([list_array(arrays, pa.list_(pa.int32()))])
    assert column.to_pylist() == [[1, 2], None, [], [3]]
    assert [None if values is None else values.tolist() for values in split_lists(column)] == [[1, 2], None, [], [3]]
