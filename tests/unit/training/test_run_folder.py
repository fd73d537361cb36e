"""Run folders: made once, found by name, and owned by one live process."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from training_configs import tiny_config

from gyre_core.cluster.epochs import SupersededError
from gyre_core.training.run_folder import RunFolder, RunFolderError, replacing, run_storage

OWNER = """
import sys, time
from pathlib import Path
from gyre_core.training.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.acquire()
print("owned", flush=True)
time.sleep(60)
"""


@pytest.fixture
def owner():
    """Starts a process that owns a run."""
    processes = []

    def start(folder):
        process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder.path)], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "owned\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def create(folder, run_id=None):
    return RunFolder.create(tiny_config(folder), run_id)


def test_a_new_folder_holds_its_configuration(tmp_path):
    folder = create(tmp_path)
    assert folder.path.parent == tmp_path / "runs" / "trial"
    assert folder.key == f"trial/{folder.path.name}"
    assert folder.config() == tiny_config(tmp_path)
    assert folder.summary() == {}


def test_a_resumed_run_has_its_new_configuration_and_its_old_place(tmp_path):
    first, second = create(tmp_path, "first"), create(tmp_path, "second")
    changed = tiny_config(tmp_path, experiment={"steps": 7})
    first.update_config(changed)
    assert first.config() == changed
    assert RunFolder.find("trial", tmp_path / "runs").key == second.key
    assert [file.name for file in first.path.iterdir()] == ["config.yaml"]


def test_a_run_id_is_taken_once(tmp_path):
    create(tmp_path, "first")
    with pytest.raises(RunFolderError, match="--resume"):
        create(tmp_path, "first")


@pytest.mark.parametrize("run_id", ["", "a/b", "../a", "/a", ".a", "-a", "a b", "a\n"])
def test_a_run_id_is_the_name_of_one_folder(tmp_path, run_id):
    with pytest.raises(RunFolderError, match=r"--run-id .* is not a name"):
        create(tmp_path, run_id)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("output", ["file", "file/runs", "/proc/runs"])
def test_an_output_that_cannot_be_written_is_named(tmp_path, output):
    (tmp_path / "file").touch()
    config = tiny_config(tmp_path)
    experiment = config.experiment.model_copy(update={"output": str(tmp_path / output)})
    with pytest.raises(RunFolderError, match=r"cannot be made.*experiment\.output"):
        RunFolder.create(config.model_copy(update={"experiment": experiment}), None)


def test_a_run_is_found_by_name_key_and_path(tmp_path):
    """NAME is the newest run, whatever ids the user chose."""
    runs = [create(tmp_path, run_id) for run_id in ("zebra", None, "apple")]
    output = tmp_path / "runs"
    assert RunFolder.find("trial", output).key == "trial/apple"
    for folder in runs:
        assert RunFolder.find(folder.key, output).path == folder.path
        assert RunFolder.find(str(folder.path), "elsewhere").path == folder.path


def test_an_unknown_run_is_answered_with_those_that_are_there(tmp_path):
    with pytest.raises(RunFolderError, match="there are no runs"):
        RunFolder.find("trial", tmp_path / "runs")
    create(tmp_path)
    with pytest.raises(RunFolderError, match=r"no run 'other'.*there are: trial"):
        RunFolder.find("other", tmp_path / "runs")


def test_a_run_has_one_live_owner(tmp_path, owner):
    folder = create(tmp_path)
    assert not folder.owned()
    process = owner(folder)
    content = (folder.path / "owner.lock").read_text()
    assert folder.owned()
    with pytest.raises(RunFolderError, match=f"by process {process.pid};"):
        folder.acquire()
    assert (folder.path / "owner.lock").read_text() == content == str(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not folder.owned()
    folder.acquire()
    assert folder.owned()
    assert (folder.path / "owner.lock").read_text() == str(os.getpid())
    folder.release()
    assert not folder.owned()


def test_whoever_opens_a_run_waits_for_who_holds_it_for_a_moment(tmp_path, owner):
    folder = create(tmp_path)
    process = owner(folder)
    threading.Timer(0.3, process.kill).start()
    folder.acquire(patience=30.0)
    assert process.poll() is not None or process.wait() == -signal.SIGKILL
    folder.release()


def test_asking_for_the_owner_changes_nothing(tmp_path):
    folder = create(tmp_path)
    before = sorted(folder.path.iterdir())
    assert not folder.owned()
    assert sorted(folder.path.iterdir()) == before


def test_the_data_lies_in_the_run_folder_or_below_the_url(tmp_path):
    folder = create(tmp_path)
    assert run_storage(tiny_config(tmp_path), folder).url == str(folder.path)
    elsewhere = tiny_config(tmp_path, storage={"url": str(tmp_path / "data")})
    assert run_storage(elsewhere, folder).url == str(tmp_path / "data" / folder.key)


def contents(folder):
    return {path.name: (path / "weights").read_text() for path in folder.iterdir()}


def replace_folder(path, text, meanwhile=lambda: None, require_owned=lambda: None):
    with replacing(path, require_owned) as unfinished:
        (unfinished / "weights").write_text(text)
        meanwhile()


def fail():
    raise ZeroDivisionError


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    for text in ("first", "second"):
        replace_folder(tmp_path / "export", text)
        assert contents(tmp_path) == {"export": text}
    with pytest.raises(ZeroDivisionError):
        replace_folder(tmp_path / "export", "third", fail)
    assert contents(tmp_path) == {"export": "second"}


def test_what_a_killed_process_left_of_a_folder_goes_with_the_next_one(tmp_path):
    (tmp_path / ".export.0123.unfinished").mkdir()
    replace_folder(tmp_path / "export", "whole")
    assert contents(tmp_path) == {"export": "whole"}


def test_who_was_superseded_while_it_wrote_a_folder_leaves_that_of_the_next_owner(tmp_path):
    owned = [True]

    def taken_over():
        owned[0] = False
        replace_folder(tmp_path / "export", "of the next owner")

    def require_owned():
        if not owned[0]:
            raise SupersededError

    with pytest.raises((SupersededError, FileNotFoundError)):
        replace_folder(tmp_path / "export", "of the frozen one", taken_over, require_owned)
    assert contents(tmp_path) == {"export": "of the next owner"}


def test_who_is_superseded_does_not_touch_what_the_next_owner_writes(tmp_path):
    def frozen_one_comes():
        with pytest.raises(SupersededError):
            replace_folder(tmp_path / "export", "of the frozen one", require_owned=superseded)

    def superseded():
        raise SupersededError

    replace_folder(tmp_path / "export", "of the next owner", frozen_one_comes)
    assert contents(tmp_path) == {"export": "of the next owner"}
