"""The C of attention is right on aarch64, with NEON: the conformance list again, with a cross compiler and an
emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEEDED = ("aarch64-linux-gnu-gcc", "qemu-aarch64")
missing = [name for name in NEEDED if shutil.which(name) is None]


@pytest.mark.skipif(
    bool(missing), reason=f"{missing} not found: Debian's gcc-aarch64-linux-gnu and qemu-user"
)
@pytest.mark.parametrize(
    "chosen", ["strides and reversed and compiled", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_on_arm(chosen: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "on_arm",
        "-k",
        chosen,
    ]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [*command, str(HERE / "conformance")], cwd=HERE.parent.parent,
        env={**os.environ, "PYTHONPATH": path, "ATTNGRAPH_CACHE": str(tmp_path)},
        capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-2000:]
    assert "\n0 calls ran on aarch64" not in found.stdout and "calls ran on aarch64" in found.stdout
