"""The losses of the example's ranks are those of one device; the slow test runs it under torchrun."""

import multiprocessing
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attngraph.passes.shard_heads.parts import HOLDS_RUNS

ROOT = Path(__file__).parent.parent.parent
SMALL = ["--steps", "3", "--width", "32", "--tokens", "16"]
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")


def _assert_the_losses_are_those_of_one_device(said: str, ranks: int) -> None:
    losses = re.findall(rf"loss ([\d.]+) on {ranks} ranks, ([\d.]+) on one device", said)
    assert len(losses) == 3 and all(abs(float(a) - float(b)) < 1e-4 for a, b in losses)
    held, everything = re.findall(r"a rank holds ([\d,]+) of ([\d,]+)", said)[0]
    assert int(held.replace(",", "")) < (0.55 if HOLDS_RUNS else 0.8) * int(everything.replace(",", ""))


@pytest.mark.slow
def test_training_on_two_ranks_has_the_losses_of_one_device(tmp_path: Path) -> None:
    """The ranks are forked from a process that has imported attngraph, and told by torchrun's variables who
    they are."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["attngraph.api"])
    files = [tmp_path / f"said by {rank}" for rank in range(2)]
    run = str(Path(__file__).parent / "ranks" / "example.py")
    processes = [
        context.Process(
            target=runpy.run_path, args=(run, {"given": (rank, 2, port, file, SMALL)}, "__main__")
        )
        for rank, file in enumerate(files)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout=240)
    finally:
        for process in processes:
            process.kill()
    said = [file.read_text() for file in files]
    assert [process.exitcode for process in processes] == [0, 0], said
    assert said[1] == "" and "other ranks' tokens" not in said[0]
    _assert_the_losses_are_those_of_one_device(said[0], 2)


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
    _assert_the_losses_are_those_of_one_device(done.stdout, ranks)
