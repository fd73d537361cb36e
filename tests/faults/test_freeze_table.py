"""The freeze table in small: an owner frozen at each point, and thawed while or after another one has its run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "freeze_table.py"


@pytest.mark.timeout(300)  # About a minute on two quiet cores.
def test_wherever_an_owner_is_frozen_the_run_ends_like_an_undisturbed_one():
    command = [sys.executable, str(BENCHMARK), "--freezes", "1", "--seed", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    table = json.loads(result.stdout.splitlines()[-1])
    # Three configurations meet 15 kinds, and two of them three more.
    assert table["freezes"] == 3 * 15 + 2 * 3
    assert len(table["points"]) == 18
    assert table["while_both_lived"] > 0
    assert table["unequal"] == 0
