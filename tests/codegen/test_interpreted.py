"""Runs the tests of `interpreted/` in Triton's interpreter: in processes of their own, for which it is chosen
before triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attngraph.codegen.triton import device

HERE = Path(__file__).parent / "interpreted"
pytestmark = pytest.mark.skipif(device.no_triton() is not None, reason="needs triton")
GRADIENTS = ("test_gradients",)
OTHERS = ("test_forward", "test_functions", "test_lists", "test_decode", "test_choices", "test_specialised")
"""About as long as each other, for two processes."""


def run_interpreted(names: tuple[str, ...], marks: str) -> None:
    options = ["-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-m", marks]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(HERE / f"{name}.py") for name in names)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=HERE.parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_every_file_is_run() -> None:
    assert {path.stem for path in HERE.glob("test_*.py")} == {*GRADIENTS, *OTHERS}


@pytest.mark.parametrize("names", [GRADIENTS, OTHERS], ids=["gradients", "others"])
def test_kernels_agree_with_the_reference_in_the_interpreter(names: tuple[str, ...]) -> None:
    run_interpreted(names, "not slow and not gpu")


@pytest.mark.slow
def test_kernels_agree_with_the_reference_in_the_interpreter_in_all_their_combinations() -> None:
    run_interpreted((*GRADIENTS, *OTHERS), "slow")
