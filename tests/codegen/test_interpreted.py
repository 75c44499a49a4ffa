"""Runs the tests of `interpreted/` and `conformance/` in Triton's interpreter: in processes of their own, for
which it is chosen before triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attngraph.codegen.triton import device

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(device.no_triton() is not None, reason="needs triton")
PROCESSES = (
    ("conformance/test_conformance", "interpreted/test_fills"),
    (
        "interpreted/test_gradients", "interpreted/test_forward", "interpreted/test_functions",
        "interpreted/test_lists", "interpreted/test_decode", "interpreted/test_choices",
        "interpreted/test_sums",
        "interpreted/test_split",
    ),
)  # fmt: skip
"""About as long as each other, for two processes."""


def run_interpreted(names: tuple[str, ...], marks: str) -> None:
    options = ["-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-m", marks]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(HERE / f"{name}.py") for name in names)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=HERE.parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_every_file_is_run() -> None:
    found = {
        f"{folder}/{p.stem}"
        for folder in ("interpreted", "conformance")
        for p in HERE.glob(f"{folder}/test_*")
    }
    assert found == {name for names in PROCESSES for name in names}


@pytest.mark.parametrize("names", PROCESSES, ids=["conformance", "others"])
def test_kernels_agree_with_the_reference_in_the_interpreter(names: tuple[str, ...]) -> None:
    run_interpreted(names, "not slow and not gpu")


@pytest.mark.slow
@pytest.mark.parametrize("names", PROCESSES, ids=["conformance", "others"])
def test_kernels_agree_with_the_reference_in_the_interpreter_in_all_their_combinations(
    names: tuple[str, ...],
) -> None:
    run_interpreted(names, "slow")
