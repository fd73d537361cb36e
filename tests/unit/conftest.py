"""Fixtures of the unit tests; beside this file lie the helpers that several rooms share."""

import os
import subprocess

import pytest


@pytest.fixture
def small_volume(tmp_path):
    """Mounts a volume of so many KiB and returns its folder; skips where nothing may be mounted."""
    folder = tmp_path / "small-volume"
    folder.mkdir()

    def mount(size):
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small volume needs privileges")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True)
