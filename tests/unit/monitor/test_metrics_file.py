import json
import math
from pathlib import Path

import pytest
from full_disk import give_space, leave_free
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gyre_core.cluster.epochs import SupersededError
from gyre_core.monitor.metrics import MetricsWriter, StepMetrics, read_metrics
from gyre_core.storage import OutOfSpaceError


def lines(folder: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder: Path, steps: range, tensorboard: bool = False) -> None:
    writer = MetricsWriter(folder, tensorboard=tensorboard)
    for step in steps:
        writer.write(step, {"reward": step / 2}, now=100.0 + step)
    writer.close()


def test_a_step_is_one_flat_line(tmp_path: Path):
    write(tmp_path, range(2))
    assert lines(tmp_path) == [
        {"step": 0, "time": 100.0, "reward": 0.0, "health/non_finite": 0},
        {"step": 1, "time": 101.0, "reward": 0.5, "health/non_finite": 0},
    ]


@given(st.lists(st.dictionaries(st.sampled_from(["reward", "kl", "loss"]), st.floats(width=64)), max_size=5))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, steps: list[dict[str, float]]):
    folder = tmp_path_factory.mktemp("run")
    writer = MetricsWriter(folder, tensorboard=False)
    for step, metrics in enumerate(steps):
        writer.write(step, metrics, now=float(step))
    rows = read_metrics(folder)
    assert [row.step for row in rows] == list(range(len(steps)))
    for row, metrics in zip(rows, steps, strict=True):
        assert row.metrics["health/non_finite"] == sum(not math.isfinite(value) for value in metrics.values())
        assert row.metrics.keys() == metrics.keys() | {"health/non_finite"}
        for name, value in metrics.items():
            assert row.metrics[name] == value or (math.isnan(row.metrics[name]) and not math.isfinite(value))
    writer.close()


def test_a_value_that_is_not_finite_is_null_and_counted(tmp_path: Path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(0, {"loss": math.nan, "kl": math.inf, "reward": 1.0}, now=0.0)
    [line] = lines(tmp_path)
    assert line == {"step": 0, "time": 0.0, "loss": None, "kl": None, "reward": 1.0, "health/non_finite": 2}
    writer.write(0, {"loss": 0.25}, now=1.0)
    [line] = lines(tmp_path)
    assert line == {"step": 0, "time": 0.0, "loss": 0.25, "kl": None, "reward": 1.0, "health/non_finite": 1}
    writer.close()


def test_an_unregistered_name_writes_nothing(tmp_path: Path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    with pytest.raises(ValueError, match="'rewrad' is not registered"):
        writer.write(0, {"reward": 1.0, "rewrad": 1.0}, now=0.0)
    assert read_metrics(tmp_path) == []
    writer.close()


def test_a_step_written_again_joins_its_line(tmp_path: Path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {"reward": 0.5, "time/step": 3.0}, now=10.0)
    writer.write(2, {"reward": 0.6}, now=20.0)
    writer.write(2, {"reward": 0.6}, now=21.0)
    writer.write(1, {"eval/heldout/reward": 0.75, "time/step": 4.0}, now=30.0)
    writer.write(0, {"eval/heldout/reward": 0.25}, now=40.0)
    assert [(row.step, row.time) for row in read_metrics(tmp_path)] == [(0, 40.0), (1, 10.0), (2, 20.0)]
    assert read_metrics(tmp_path)[1].metrics == {
        "reward": 0.5,
        "time/step": 4.0,
        "eval/heldout/reward": 0.75,
        "health/non_finite": 0,
    }
    writer.close()


def test_every_torn_last_line_is_passed_over_and_repaired(tmp_path: Path):
    write(tmp_path, range(2))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        assert [row.step for row in read_metrics(tmp_path)] == [0]
        writer = MetricsWriter(tmp_path, tensorboard=False)
        writer.write(1, {"reward": 0.5}, now=101.0)
        assert path.read_bytes() == whole
        writer.close()


@pytest.mark.parametrize(
    "line", ["{", "[]", "7", "{}", '{"step": null, "time": 1}', '{"step": 1, "time": 1, "kl": []}']
)
def test_a_foreign_line_is_named(tmp_path: Path, line: str):
    write(tmp_path, range(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_metrics(tmp_path)


def test_a_folder_without_metrics_is_empty(tmp_path: Path):
    assert read_metrics(tmp_path) == []


def test_resuming_equals_never_having_stopped(tmp_path: Path):
    write(tmp_path / "whole", range(9))
    write(tmp_path / "resumed", range(7))
    writer = MetricsWriter(tmp_path / "resumed", tensorboard=False)
    assert writer.truncate_after(4) == 2
    assert writer.truncate_after(4) == 0
    for step in range(5, 9):
        writer.write(step, {"reward": step / 2}, now=100.0 + step)
    assert read_metrics(tmp_path / "resumed") == read_metrics(tmp_path / "whole")
    writer.close()


def test_tensorboard_shows_each_value_once_after_retry_evaluation_and_resume(tmp_path: Path):
    write(tmp_path, range(7), tensorboard=True)
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.truncate_after(4)
    for step in range(5, 8):
        writer.write(step, {"reward": 10.0 + step}, now=200.0 + step)
    writer.write(7, {"reward": 17.0}, now=208.0)
    writer.write(6, {"eval/heldout/reward": 0.5}, now=209.0)
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [
        *((step, step / 2) for step in range(5)),
        *((step, 10.0 + step) for step in range(5, 8)),
    ]
    assert [(event.step, event.value) for event in events.Scalars("eval/heldout/reward")] == [(6, 0.5)]


def test_what_was_synced_is_in_tensorboard_though_the_writer_never_closes(tmp_path: Path):
    """A checkpoint syncs, so that a run that is killed and resumed has no gap before it."""
    writer = MetricsWriter(tmp_path, tensorboard=True)
    for step in range(5):
        writer.write(step, {"reward": step / 2}, now=100.0 + step)
    writer.sync()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == list(range(5))
    writer.close()


def test_rows_are_values(tmp_path: Path):
    write(tmp_path, range(1))
    assert read_metrics(tmp_path) == [StepMetrics(0, 100.0, {"reward": 0.0, "health/non_finite": 0.0})]


def test_a_line_that_does_not_fit_leaves_the_lines_before_it_whole(small_volume):
    """A page is free; a line of several is cut, and taken back."""
    folder = small_volume(64)
    writer = MetricsWriter(folder, tensorboard=False)
    writer.write(0, {"reward": 0.5}, now=0.0)
    long = {f"rewards/{number:03d}{'x' * 100}/mean": 1.0 for number in range(100)}
    leave_free(folder, 4096)
    with pytest.raises(OutOfSpaceError, match=rf"^no space left in {folder} for metrics.jsonl of 1\d{{4}} bytes; free"):
        writer.write(1, long, now=1.0)
    assert [row.step for row in read_metrics(folder)] == [0]
    give_space(folder)
    writer.write(1, long, now=2.0)
    writer.write(2, {"reward": 0.75}, now=3.0)
    assert [row.step for row in read_metrics(folder)] == [0, 1, 2]
    assert read_metrics(folder)[1].metrics == {**long, "health/non_finite": 0.0}
    writer.close()


def test_what_does_not_fit_beside_the_lines_before_it_can_be_joined_later(small_volume):
    folder = small_volume(64)
    writer = MetricsWriter(folder, tensorboard=False)
    for step in range(3):
        writer.write(step, {"reward": 0.5}, now=0.0)
    leave_free(folder, 0)
    for _ in range(2):
        with pytest.raises(OutOfSpaceError, match=r"for metrics\.jsonl"):
            writer.write(1, {f"rewards/{'x' * 5000}/mean": 1.0}, now=1.0)
        with pytest.raises(OutOfSpaceError, match=r"for metrics\.jsonl"):
            writer.truncate_after(1)
    give_space(folder)
    writer.write(1, {"eval/heldout/reward": 0.75}, now=2.0)
    writer.write(3, {"reward": 1.0}, now=3.0)
    writer.close()
    assert [(row.step, row.metrics.get("eval/heldout/reward")) for row in read_metrics(folder)] == [
        (0, None),
        (1, 0.75),
        (2, None),
        (3, None),
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_events_that_tensorboard_cannot_write_are_told_and_do_no_harm(small_volume, caplog):
    """A line of 37 KB and as large an event, with space for one of them."""
    folder = small_volume(256)
    writer = MetricsWriter(folder, tensorboard=True)
    writer.write(0, {"reward": 0.0}, now=0.0)
    writer.sync()
    leave_free(folder, 44 << 10)
    writer.write(1, {f"rewards/{'x' * 50}{number:03d}/mean": 1.0 for number in range(500)}, now=1.0)
    writer.sync()
    assert "TensorBoard's events of the last seconds are lost, metrics.jsonl has all" in caplog.text
    give_space(folder)
    writer.write(2, {"reward": 1.0}, now=2.0)
    writer.close()
    assert [row.step for row in read_metrics(folder)] == [0, 1, 2]
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")][-1] == 2


def superseded() -> None:
    raise SupersededError("epoch 1 was superseded")


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_writer_that_another_one_has_followed_changes_nothing(tmp_path: Path, step: int):
    """Whether its write is a new line or joins an old one."""
    owned = [True]
    first = MetricsWriter(tmp_path, tensorboard=False, require_owned=lambda: None if owned[0] else superseded())
    first.write(2, {"reward": 0.5}, now=0.0)
    owned[0] = False
    second = MetricsWriter(tmp_path, tensorboard=False)
    second.write(3, {"reward": 0.75}, now=1.0)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(SupersededError):
        first.write(step, {"reward": 0.25}, now=2.0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    first.close()
    second.close()


def test_a_writer_that_was_overtaken_while_it_wrote_its_copy_leaves_the_file_of_the_other(tmp_path: Path):
    write(tmp_path, range(3))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(SupersededError):
        MetricsWriter(tmp_path, tensorboard=False, require_owned=superseded)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"metrics.jsonl": before}


def test_what_is_put_in_place_of_the_file_by_hand_is_gone_on_with(tmp_path: Path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in range(3):
        writer.write(step, {"reward": 0.5}, now=0.0)
    path = tmp_path / "metrics.jsonl"
    edited = b"".join(path.read_bytes().splitlines(keepends=True)[:2])
    path.unlink()
    path.write_bytes(edited)
    writer.write(3, {"reward": 0.75}, now=1.0)
    assert [row.step for row in read_metrics(tmp_path)] == [0, 1, 3]
    path.unlink()
    writer.write(4, {"reward": 1.0}, now=1.0)
    assert [row.step for row in read_metrics(tmp_path)] == [4]
    writer.close()
