"""The fault table in small: one kill of each kind, and that an unequal end is noticed."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONTROL = """
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import fault_table
from faults.processes import Fault

from gyre_core.learner.masters import MasterWeights


def load_without_moments(masters, tensors, counters, real=MasterWeights.load_state):
    real(masters, {name: 0 * tensor if "_moment" in name else tensor for name, tensor in tensors.items()}, counters)


undisturbed = fault_table.measure("full")
kills = [Fault(fault_table.BETWEEN, 3)]
print(len(fault_table.tell_story("full", kills, undisturbed).problems))
MasterWeights.load_state = load_without_moments
print(*fault_table.tell_story("full", kills, undisturbed).problems, sep="\\n")
"""
"""Resumes a killed run as it is, then with the optimiser's moments lost on the way."""


def run(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=280)


@pytest.mark.timeout(300)  # About half a minute on two quiet cores.
def test_whenever_a_run_is_killed_it_ends_like_an_undisturbed_one():
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    result = run(str(BENCHMARKS / "fault_table.py"), "--kills", "1", "--seed", str(seed))
    assert result.returncode == 0, result.stdout + result.stderr
    table = json.loads(result.stdout.splitlines()[-1])
    # Three configurations meet 16 kinds, and two of them three more.
    assert table["kills"] >= 3 * 16 + 2 * 3
    assert len(table["points"]) == 19
    assert all(point["kills"] == point["equal"] for point in table["points"].values())
    assert table["unequal"] == 0


@pytest.mark.timeout(300)
def test_a_run_that_lost_its_moments_on_the_way_is_not_equal():
    result = run("-c", CONTROL, str(BENCHMARKS))
    assert result.returncode == 0, result.stdout + result.stderr
    equal, *unequal = result.stdout.splitlines()
    assert equal == "0"
    assert any(line.startswith("learner: ") for line in unequal)
    assert not any(line.startswith("consumed in step 1:") for line in unequal)
