"""The C is right on processors with narrower vectors than this one's: of 4 numbers, as NEON's, or of 8."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WIDTHS = {"4": ("-mno-avx512f", "-mno-avx"), "8": ("-mno-avx512f",)}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the options are those of x86")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="clang sums vectors in another way")
@pytest.mark.parametrize("width", ["4", pytest.param("8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", ["test_cpu_tokens.py", "conformance", "test_cpu_carried.py"])
def test_with_vectors_of(width: str, file: str, tmp_path: Path) -> None:
    """Runs tests of this folder again, with a compiler that may not use wider vectors."""
    chosen = {"test_cpu_tokens.py": "products", "conformance": "decode", "test_cpu_carried.py": "running"}[
        file
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen]
    found = subprocess.run(
        [*command, str(HERE / file)],
        env={**os.environ, "CC": " ".join(("gcc", *WIDTHS[width])), "ATTNGRAPH_CACHE": str(tmp_path)},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-2000:]
