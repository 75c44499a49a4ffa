"""Two processes on this machine, by gloo: training, checkpoints, disagreement, and a rank that dies."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attngraph.passes.shard_heads.parts import HOLDS_RUNS

Ranks = Callable[..., list[str]]
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")


def test_training_is_that_of_one_device_and_ranks_hold_their_part(tmp_path: Path, ranks: Ranks) -> None:
    """Losses, norms of gradients, parameters after SGD with momentum, and evaluation; held as reported."""
    for said in ranks("train", tmp_path):
        held, reported = said.removeprefix("held ").split(" reported ")
        whole, part = (int(n) for n in reported.strip("()").split(", "))
        assert int(held) == part and part < (0.55 if HOLDS_RUNS else 0.8) * whole


@pytest.mark.slow
def test_parameters_may_stay_whole_on_every_rank(tmp_path: Path, ranks: Ranks) -> None:
    for said in ranks("train_whole", tmp_path):
        held, reported = said.removeprefix("held ").split(" reported ")
        assert int(held) == int(reported.strip("()").split(", ")[0])


@pytest.mark.slow
def test_training_with_heads_and_tokens_divided_is_that_of_one_device(tmp_path: Path, ranks: Ranks) -> None:
    """Four processes, 2 x 2: each holds its part of the heads."""
    for said in ranks("train_on_both", tmp_path, 4):
        held, reported = said.removeprefix("held ").split(" reported ")
        whole, part = (int(n) for n in reported.strip("()").split(", "))
        assert int(held) == part and part < (0.55 if HOLDS_RUNS else 0.8) * whole


def test_ranks_of_two_axes_all_say_who_differs(tmp_path: Path, ranks: Ranks) -> None:
    for said in ranks("disagree_on_both", tmp_path, 4):
        lines = [said.split(f"rank {r}: ")[1].split("rank ")[0].strip() for r in range(4)]
        assert lines[0] == lines[1] == lines[2] != lines[3], said


@pytest.mark.slow
def test_shared_heads_are_held_as_reported(tmp_path: Path, ranks: Ranks) -> None:
    """Projections that ranks need overlapping parts of are held whole; the others are not."""
    for said in (s for line in ranks("train_grouped", tmp_path) for s in line.split("; ")):
        held, reported = said.removeprefix("held ").split(" reported ")
        whole, part = (int(n) for n in reported.strip("()").split(", "))
        assert int(held) == part < whole


@pytest.mark.slow
def test_ranks_that_divide_tokens_receive_what_the_report_says(tmp_path: Path, ranks: Ranks) -> None:
    """Values and gradients are those of one device; with documents, no more than the report's bound."""
    for said in ranks("tokens", tmp_path):
        (exact, told), (less, most) = (map(int, part.split(" reported ")) for part in said.split("; "))
        assert 0 < exact == told and 0 < less < most


@pytest.mark.slow
def test_checkpoints_are_saved_and_loaded_part_by_part(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks("checkpoint", tmp_path) == ["loaded"] * 2


@pytest.mark.slow
def test_a_model_on_meta_is_loaded_part_by_part(tmp_path: Path, ranks: Ranks) -> None:
    """From safetensors, packed projections too, and from torch's checkpoints. A missing weight is named."""
    for said in ranks("on_meta", tmp_path):
        *loaded, problem = said.split("; ")
        assert len(loaded) == 3 and problem == "the files have no weight."
        for held, reported in (line.removeprefix("held ").split(" reported ") for line in loaded):
            whole, part = (int(n) for n in reported.strip("()").split(", "))
            assert int(held) == part and part < (0.55 if HOLDS_RUNS else 0.8) * whole


def test_ranks_that_are_called_differently_all_say_so(tmp_path: Path, ranks: Ranks) -> None:
    for said in ranks("disagree", tmp_path):
        shapes, dtypes = said.split(" | ")
        assert "disagree about the call" in shapes and "[2, 4]" in shapes and "[2, 5]" in shapes
        assert "rank 0: tensor 0: int64" in dtypes and "rank 1: tensor 0: float32" in dtypes


def test_ranks_with_other_tokens_all_say_so(tmp_path: Path, ranks: Ranks) -> None:
    """What they hold may decide what is fetched: ranks that differ would wait for each other."""
    for said in ranks("disagree_in_tokens", tmp_path):
        assert "disagree about the call" in said and "with contents" in said


@pytest.mark.slow
def test_ranks_with_other_code_all_say_so(tmp_path: Path, ranks: Ranks) -> None:
    assert all("disagree about the graph" in said for said in ranks("disagree_in_code", tmp_path))


@pytest.mark.slow
def test_ranks_with_other_random_numbers_all_say_so(tmp_path: Path, ranks: Ranks) -> None:
    assert all("random numbers" in said for said in ranks("disagree_in_numbers", tmp_path))


@pytest.mark.slow
def test_a_rank_that_is_gone_is_an_error_of_the_others(tmp_path: Path, ranks: Ranks) -> None:
    alive, gone = ranks("die", tmp_path)
    assert gone == "gone" and alive.endswith("within the time-out: True")


@pytest.mark.slow
def test_decoders_give_the_tokens_of_one_device_and_a_rank_keeps_its_heads(
    tmp_path: Path, ranks: Ranks
) -> None:
    """4 heads of 8 values: 256 bytes a token on one device. The same with parameters that stay whole."""
    for said in ranks("decode", tmp_path):
        kept, rest = said.split(" held ")
        held, reported = rest.split(" reported ")
        whole, part = (int(n) for n in reported.strip("()").split(", "))
        assert kept == "bytes [128, 32]" and int(held) == part < 0.8 * whole


@pytest.mark.slow
def test_decoders_on_whole_parameters(tmp_path: Path, ranks: Ranks) -> None:
    assert all(said.startswith("bytes [128, 32]") for said in ranks("decode_whole", tmp_path))


@pytest.mark.slow
def test_four_ranks_divide_the_tokens_of_two_key_heads(tmp_path: Path, ranks: Ranks) -> None:
    """Each of two ranks keeps half of the tokens of one of them: a quarter of what one device keeps."""
    assert ranks("decode_shared", tmp_path, 4) == ["[128, 32, 32]"] * 4


@pytest.mark.slow
def test_two_ranks_divide_the_tokens_of_a_latent(tmp_path: Path, ranks: Ranks) -> None:
    """12 numbers a token; the second cache keeps them in bfloat16."""
    assert ranks("decode_latent", tmp_path) == ["[[48, 24], [24, 12]]"] * 2


@pytest.mark.slow
def test_two_ranks_divide_the_ring_of_a_window(tmp_path: Path, ranks: Ranks) -> None:
    """Three rows with the last 4 tokens of a key and a value of 8 numbers; a rank has 2 of them."""
    assert ranks("decode_window", tmp_path) == ["[768, 384]"] * 2


@pytest.mark.slow
def test_ranks_with_other_prompts_all_say_so(tmp_path: Path, ranks: Ranks) -> None:
    for said in ranks("disagree_in_prompts", tmp_path):
        problems = said.split(" | ")
        assert len(problems) == 5 and all("disagree" in problem for problem in problems), said
        assert "contents" in problems[0] and "temperature" in problems[2] and "state of" in problems[4]


def test_attention_of_dtensors_is_divided_by_rows_and_heads_where_that_is_right(
    tmp_path: Path, ranks: Ranks
) -> None:
    assert ranks("dtensor", tmp_path) == ["equal", "equal"]


@pytest.mark.slow
def test_fully_shard_is_refused_before_anything_is_traced(tmp_path: Path, ranks: Ranks) -> None:
    for said in ranks("with_fully_shard", tmp_path):
        assert all("as fully_shard makes them" in problem for problem in said.split(" | ")), said
