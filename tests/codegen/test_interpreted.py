"""Runs the tests of `interpreted/` and `conformance/` in Triton's interpreter: in processes of their own, for
which it is chosen before triton is imported."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from attngraph.codegen.triton import device

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(device.no_triton() is not None, reason="needs triton")
FILES = sorted(
    f"{folder}/{path.stem}"
    for folder in ("interpreted", "conformance")
    for path in HERE.glob(f"{folder}/test_*.py")
)
SHARES = tuple(FILES[first::3] for first in range(3))
"""A process for each: it takes some seconds before its first test."""


def run_interpreted(names: Sequence[str], marks: str) -> None:
    options = ["-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-m", marks]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(HERE / f"{name}.py") for name in names)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=HERE.parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize("names", SHARES, ids=["first", "second", "third"])
def test_kernels_agree_with_the_reference_in_the_interpreter(names: Sequence[str]) -> None:
    run_interpreted(names, "not slow and not gpu")


@pytest.mark.slow
@pytest.mark.parametrize("names", SHARES, ids=["first", "second", "third"])
def test_kernels_agree_with_the_reference_in_the_interpreter_in_all_their_combinations(
    names: Sequence[str],
) -> None:
    run_interpreted(names, "slow")
