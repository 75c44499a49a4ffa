"""Whole models on a device that says it is a GPU and computes on the CPU."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("c++") is None, reason="needs Linux and c++")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_tests_on_the_stand_in_device_pass() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "workshop.standin.plugin", "-p", "no:xdist"]
    found = subprocess.run(
        [*command, "tests/standin"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
