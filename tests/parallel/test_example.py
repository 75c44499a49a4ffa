"""The losses of the example's ranks under torchrun are those of one device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attngraph.passes.shard_heads.parts import HOLDS_RUNS

ROOT = Path(__file__).parent.parent.parent
SMALL = ["--steps", "3", "--width", "32", "--tokens", "16"]
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--context", "2"]], ids=["heads", "heads and tokens"])
def test_under_torchrun_training_has_the_losses_of_one_device(more: list[str]) -> None:
    ranks = 4 if more else 2
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        str(ROOT / "examples" / "train_on_ranks.py"), *SMALL, *more,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("of other ranks' tokens it receives" in done.stdout) == bool(more)
    losses = re.findall(rf"loss ([\d.]+) on {ranks} ranks, ([\d.]+) on one device", done.stdout)
    assert len(losses) == 3 and all(abs(float(a) - float(b)) < 1e-4 for a, b in losses)
    held, everything = re.findall(r"a rank holds ([\d,]+) of ([\d,]+)", done.stdout)[0]
    assert int(held.replace(",", "")) < (0.55 if HOLDS_RUNS else 0.8) * int(everything.replace(",", ""))
