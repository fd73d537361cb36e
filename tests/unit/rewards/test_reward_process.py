"""The life and death of the process that reward functions run in."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gyre_core.rewards.process import RewardProcess, RewardProcessError

PARENT = """
import signal, sys
from pathlib import Path
from gyre_core.rewards.process import RewardProcess
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background jobs inherit that it is ignored.
process = RewardProcess({"hang": "hang.py:hang"}, Path(sys.argv[1]))
process.start()
process.call("hang", {"completions": ["a"]}, 1, 1000.0)
"""
HANG = """
import os, pathlib, subprocess
def hang(completions):
    child = subprocess.Popen(["sleep", "1000"])
    names = pathlib.Path(__file__).with_name("started")
    names.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
    names.with_suffix(".new").rename(names)
    9 ** 9 ** 9 ** 9
"""


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_process_and_its_children_die_with_the_parent_even_in_native_code(tmp_path, death):
    (tmp_path / "hang.py").write_text(HANG)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "started").exists)
        pids = [int(pid) for pid in (tmp_path / "started").read_text().split()]
        assert all(is_alive(pid) for pid in pids)
    finally:
        parent.send_signal(death)
        parent.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_the_process_starts_light(tmp_path):
    (tmp_path / "modules.py").write_text(
        "import sys\ndef heavy(completions): return [float(m in sys.modules) for m in completions]"
    )
    process = RewardProcess({"heavy": "modules.py:heavy"}, tmp_path)
    try:
        heavy = ["torch", "transformers", "numpy", "pydantic", "prefect", "pyarrow"]
        assert process.call("heavy", {"completions": heavy}, len(heavy), 60.0) == [0.0] * len(heavy)
    finally:
        process.close()


def test_modules_are_found_beside_the_configuration_and_where_the_parent_finds_them(tmp_path, monkeypatch):
    installed, project = tmp_path / "installed", tmp_path / "project"
    for folder, name in [(installed, "installed_rewards"), (project, "project_rewards")]:
        folder.mkdir()
        (folder / f"{name}.py").write_text("def good(completions): return [1.0 for _ in completions]")
    monkeypatch.syspath_prepend(str(installed))
    process = RewardProcess({"a": "installed_rewards:good", "b": "project_rewards:good"}, project)
    try:
        assert [process.call(name, {"completions": ["x"]}, 1, 60.0) for name in "ab"] == [[1.0], [1.0]]
    finally:
        process.close()


def test_a_restart_loads_the_functions_anew_and_leaks_nothing(tmp_path):
    (tmp_path / "fragile.py").write_text(
        "import os\nstate = []\n"
        "def fragile(completions):\n"
        "    state.append(1)\n"
        "    return [os._exit(1) if c == 'die' else float(len(state)) for c in completions]\n"
    )
    process = RewardProcess({"fragile": "fragile.py:fragile"}, tmp_path)
    try:
        descriptors = None
        for _ in range(5):
            with pytest.raises(RewardProcessError, match="exit code 1"):
                process.call("fragile", {"completions": ["die"]}, 1, 60.0)
            assert process.call("fragile", {"completions": ["live"]}, 1, 60.0) == [1.0]
            assert process.call("fragile", {"completions": ["live"]}, 1, 60.0) == [2.0]
            descriptors = descriptors or open_descriptors()
        assert open_descriptors() == descriptors
    finally:
        process.close()


def test_large_calls_pass_whole(tmp_path):
    (tmp_path / "sizes.py").write_text("def size(completions): return [float(len(c)) for c in completions]")
    process = RewardProcess({"size": "sizes.py:size"}, tmp_path)
    try:
        texts = ["é" * (number * 1000) for number in range(100)]
        assert process.call("size", {"completions": texts}, 100, 60.0) == [1000.0 * number for number in range(100)]
    finally:
        process.close()
