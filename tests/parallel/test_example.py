"""The example runs under torchrun, and its losses are those of one device."""

import os
import re
import subprocess
import sys
from pathlib import Path

from attngraph.passes.shard_heads.storage import HOLDS_RUNS

ROOT = Path(__file__).parent.parent.parent


def test_training_on_two_ranks_has_the_losses_of_one_device() -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(ROOT / "examples" / "train_on_ranks.py"), "--steps", "3", "--width", "32", "--tokens", "16",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = re.findall(r"loss ([\d.]+) on 2 ranks, ([\d.]+) on one device", done.stdout)
    assert len(losses) == 3 and all(abs(float(a) - float(b)) < 1e-4 for a, b in losses)
    held, everything = re.findall(r"a rank holds ([\d,]+) of ([\d,]+)", done.stdout)[0]
    assert int(held.replace(",", "")) < (0.55 if HOLDS_RUNS else 0.8) * int(everything.replace(",", ""))
