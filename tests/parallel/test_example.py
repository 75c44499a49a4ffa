"""The example runs under torchrun, and its losses are those of one device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attngraph.passes.shard_heads.storage import HOLDS_RUNS

ROOT = Path(__file__).parent.parent.parent


def _trained(ranks: int, *more: str) -> str:
    """What the example prints on so many ranks, once its losses are seen to be those of one device."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        str(ROOT / "examples" / "train_on_ranks.py"), "--steps", "3", "--width", "32", "--tokens", "16",
        *more,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = re.findall(rf"loss ([\d.]+) on {ranks} ranks, ([\d.]+) on one device", done.stdout)
    assert len(losses) == 3 and all(abs(float(a) - float(b)) < 1e-4 for a, b in losses)
    held, everything = re.findall(r"a rank holds ([\d,]+) of ([\d,]+)", done.stdout)[0]
    assert int(held.replace(",", "")) < (0.55 if HOLDS_RUNS else 0.8) * int(everything.replace(",", ""))
    return done.stdout


def test_training_on_two_ranks_has_the_losses_of_one_device() -> None:
    assert "other ranks' tokens" not in _trained(2)


@pytest.mark.slow
def test_training_with_heads_and_tokens_divided_has_the_losses_of_one_device() -> None:
    assert "of other ranks' tokens it receives" in _trained(4, "--context", "2")
