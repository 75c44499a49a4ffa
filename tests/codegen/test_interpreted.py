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
FILES = sorted(
    f"{folder}/{path.stem}"
    for folder in ("interpreted", "conformance")
    for path in HERE.glob(f"{folder}/test_*.py")
)
MODULES = [name for name in FILES if not name.endswith("test_conformance")]
SHARES = {
    "some": (MODULES[0::2], ""),
    "others": (MODULES[1::2], ""),
    "results": (["conformance/test_conformance"], "not gradients"),
    "gradients": (["conformance/test_conformance"], "gradients"),
}
"""A process for each: it takes some seconds before its first test."""


def run_interpreted(share: str, marks: str, **environment: str) -> None:
    names, chosen = SHARES[share]
    options = ["-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-m", marks, "-k", chosen]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(HERE / f"{name}.py") for name in names)],
        env={**os.environ, "TRITON_INTERPRET": "1", **environment},
        capture_output=True, text=True, cwd=HERE.parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize("share", SHARES)
def test_kernels_agree_with_the_reference_in_the_interpreter(share: str) -> None:
    """Those of which no interpreted source is known to be right (`known_good.py`)."""
    run_interpreted(share, "not slow and not gpu")


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
def test_kernels_agree_with_the_reference_in_the_interpreter_in_all_their_combinations(share: str) -> None:
    run_interpreted(share, "not gpu", ATTNGRAPH_INTERPRET="all")
