"""Processes on this machine that are ranks, by gloo (`ranks/run.py`): training, checkpoints, decoders,
disagreement, and a rank that dies."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attngraph.passes.shard_heads.parts import HOLDS_RUNS

Ranks = Callable[..., list[str]]
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("task", "count", "models", "most"),
    [
        ("train", 2, 1, 0.55 if HOLDS_RUNS else 0.8),
        slow("train_whole", 2, 1, None),  # parameters may stay whole on every rank
        slow("train_on_both", 4, 1, 0.55 if HOLDS_RUNS else 0.8),  # 2 x 2: each holds its part of the heads
        slow("train_grouped", 2, 2, 1),  # projections that ranks need overlapping parts of are held whole
        slow("on_meta", 2, 3, 0.55 if HOLDS_RUNS else 0.8),
        slow("decode", 2, 1, 0.8),
    ],
)
def test_ranks_answer_as_one_device_and_hold_the_part_that_is_reported(
    task: str, count: int, models: int, most: float | None, tmp_path: Path, ranks: Ranks
) -> None:
    """Losses, norms of gradients, parameters after SGD with momentum, and evaluation, also of weights that
    are loaded part by part, from safetensors and from torch's checkpoints; or tokens."""
    for said in ranks(task, tmp_path, count):
        found = re.findall(r"held (\d+) reported \((\d+), (\d+)\)", said)
        assert len(found) == models
        for held, whole, part in (map(int, numbers) for numbers in found):
            assert held == (whole if most is None else part)
            assert most is None or part < most * whole
        if task == "on_meta":
            assert said.endswith("; the files have no weight.")
        if task == "decode":  # 4 heads of 8 values: 256 bytes a token on one device
            assert said.startswith("bytes [128, 32]")


@pytest.mark.parametrize(
    ("task", "count", "wanted"),
    [
        # Attention of DTensors is divided by rows and heads where that is right.
        ("dtensor", 2, "equal"),
        ("disagree", 2, r"(?=.*\[2, 4\]).*disagree about the call.*\[2, 5\].* \| "
         r".*rank 0: tensor 0: int64.*rank 1: tensor 0: float32.*"),
        # What tokens hold may decide what is fetched: ranks that differ would wait for each other.
        ("disagree_in_tokens", 2, ".*disagree about the call.*with contents.*"),
        slow("disagree_in_code", 2, ".*disagree about the graph.*"),
        slow("disagree_in_numbers", 2, ".*random numbers.*"),
        slow("disagree_in_prompts", 2, r".*disagree.*contents.* \| .*disagree.* \| .*disagree.*temperature.*"
             r" \| .*disagree.* \| .*disagree.*state of.*"),
        slow("with_fully_shard", 2, r".*as fully_shard makes them.* \| .*as fully_shard makes them.*"),
        slow("checkpoint", 2, "loaded"),
        slow("decode_whole", 2, r"bytes \[128, 32\].*"),
        # Each of two ranks keeps half of the tokens of one key head: a quarter of what one device keeps.
        slow("decode_shared", 4, r"\[128, 32, 32\]"),
        # 12 numbers a token; the second cache keeps them in bfloat16.
        slow("decode_latent", 2, r"\[\[48, 24\], \[24, 12\]\]"),
        # Three rows with the last 4 tokens of a key and a value of 8 numbers; a rank has 2 of them.
        slow("decode_window", 2, r"\[768, 384\]"),
    ],
)  # fmt: skip
def test_all_ranks_say_the_same(task: str, count: int, wanted: str, tmp_path: Path, ranks: Ranks) -> None:
    for said in ranks(task, tmp_path, count):
        assert re.fullmatch(wanted, said), said


def test_ranks_of_two_axes_all_say_who_differs(tmp_path: Path, ranks: Ranks) -> None:
    for said in ranks("disagree_on_both", tmp_path, 4):
        lines = [said.split(f"rank {r}: ")[1].split("rank ")[0].strip() for r in range(4)]
        assert lines[0] == lines[1] == lines[2] != lines[3], said


@pytest.mark.slow
def test_ranks_that_divide_tokens_receive_what_the_report_says(tmp_path: Path, ranks: Ranks) -> None:
    """Values and gradients are those of one device; with documents, no more than the report's bound."""
    for said in ranks("tokens", tmp_path):
        (exact, told), (less, most) = (map(int, part.split(" reported ")) for part in said.split("; "))
        assert 0 < exact == told and 0 < less < most


@pytest.mark.slow
def test_a_rank_that_is_gone_is_an_error_of_the_others(tmp_path: Path, ranks: Ranks) -> None:
    alive, gone = ranks("die", tmp_path)
    assert gone == "gone" and alive.endswith("within the time-out: True")
