"""Whole models on a device that says it is a GPU and computes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_tests_on_the_stand_in_device_pass() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "workshop.standin.plugin", "-p", "no:xdist"]
    found = subprocess.run(
        [*command, "tests/standin"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
