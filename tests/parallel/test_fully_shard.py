"""`fully_shard` on a compiled module, along an axis of its own: losses, norms, parameters, checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attngraph.passes.shard_heads.parts import HOLDS_RUNS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
Ranks = Callable[..., list[str]]


def _parts(said: str) -> list[float]:
    """Which part of all elements a rank has."""
    pairs = (part.split(" of ") for part in said.split("; "))
    return [int(held) / int(everything) for held, everything in pairs]


@pytest.mark.slow
def test_rows_and_parameters_divided_train_as_one_device(tmp_path: Path, ranks: Ranks) -> None:
    assert [_parts(said) for said in ranks("data", tmp_path, script="sharded.py")] == [[0.5], [0.5]]


@pytest.mark.slow
def test_parameters_divided_along_two_axes_train_as_on_one_device(tmp_path: Path, ranks: Ranks) -> None:
    """A quarter of each, beside vectors that both ranks of the axis `tensor` have."""
    for said in ranks("data_and_tensor", tmp_path, 4, "sharded.py"):
        (held,) = _parts(said)
        assert 0.25 < held < 0.26


@pytest.mark.slow
def test_parameters_that_stay_whole_along_one_axis_are_divided_along_the_other(
    tmp_path: Path, ranks: Ranks
) -> None:
    """Half of a packed projection, and half of all where all stay whole."""
    for said in ranks("data_and_whole", tmp_path, 4, "sharded.py"):
        even, undivided = _parts(said)
        assert 0.26 < even < 0.35 and undivided == 0.5


@pytest.mark.slow
def test_tokens_and_rows_divided_train_as_on_one_device(tmp_path: Path, ranks: Ranks) -> None:
    assert [_parts(said) for said in ranks("data_and_context", tmp_path, 4, "sharded.py")] == [[0.5]] * 4


def test_what_cannot_be_collected_or_put_together_again_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    for said in ranks("refusals", tmp_path, script="sharded.py"):
        packed, early, blocks, decoder = said.split(" | ")
        if HOLDS_RUNS:
            assert "qkv.0.weight, a packed projection" in packed and 'parameters="even"' in packed
        else:  # it is whole on every rank
            assert packed == "nothing"
        assert "compiled.place(example) before fully_shard" in early
        assert "blocks.0 would not run" in blocks and "fully_shard once, on the compiled module" in blocks
        assert "was not collected" in decoder and "compiled.unshard()" in decoder
