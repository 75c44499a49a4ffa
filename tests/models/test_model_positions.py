"""Sinusoids, learned tables and rotations equal their formulas, and rotations are rotations."""

import cmath
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attngraph.models.positions import (
    LearnedPositions,
    SinusoidalEmbedding,
    rotary_angles,
    rotate_half,
    rotate_interleaved,
    sinusoidal_table,
)
from attngraph.models.text import byte_batch

ROTATIONS = [rotate_interleaved, rotate_half]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def positions(start: float, count: int) -> Tensor:
    return start + torch.arange(count, dtype=torch.float64)


def test_the_sinusoidal_table_equals_the_formula() -> None:
    table = sinusoidal_table(20, 6)
    for position in range(20):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)


def test_moving_by_a_fixed_distance_turns_each_pair_of_sinusoids_by_a_fixed_angle() -> None:
    table = sinusoidal_table(40, 8).double()
    pairs = torch.complex(table[:, 1::2], table[:, 0::2])  # e^(i angle), [40, 4]
    turn = torch.tensor([cmath.exp(7j * 10000 ** (-2 * i / 8)) for i in range(4)])
    assert_close(pairs[:33] * turn, pairs[7:], rtol=0, atol=1e-5, check_dtype=False)


def test_embeddings_are_scaled_by_the_root_of_the_width_before_positions_are_added() -> None:
    module, ids = SinusoidalEmbedding(256, 16, max_tokens=32), byte_batch(2, 7)
    assert_close(module(ids) - sinusoidal_table(7, 16), 4.0 * module.embedding.weight[ids])
    assert set(module.state_dict()) == {"embedding.weight"}


def test_learned_positions_add_the_row_of_each_position() -> None:
    module, x = LearnedPositions(9, 4).double(), rand(2, 7, 4)
    output = module(x)
    for t in range(7):
        assert torch.equal(output[:, t], x[:, t] + module.table[t])
    output.sum().backward()
    assert module.table.grad is not None
    assert_close(module.table.grad[:7], torch.full((7, 4), 2.0, dtype=torch.float64))
    assert not module.table.grad[7:].any()


def test_rotating_is_multiplying_pairs_by_unit_complex_numbers() -> None:
    x = rand(5, 6)
    angles = rotary_angles(positions(0, 5), 6)
    interleaved, half = rotate_interleaved(x, angles), rotate_half(x, angles)
    for p in range(5):
        for i in range(3):
            turn = cmath.exp(1j * p * 10000 ** (-2 * i / 6))
            paper = complex(x[p, 2 * i], x[p, 2 * i + 1]) * turn
            assert complex(interleaved[p, 2 * i], interleaved[p, 2 * i + 1]) == pytest.approx(paper)
            checkpoint = complex(x[p, i], x[p, i + 3]) * turn
            assert complex(half[p, i], half[p, i + 3]) == pytest.approx(checkpoint)


@pytest.mark.parametrize("rotate", ROTATIONS)
def test_rotary_scores_depend_on_position_differences_only(
    rotate: Callable[[Tensor, Tensor], Tensor],
) -> None:
    query, key = rand(7, 6), rand(7, 6)

    def scores(start: float) -> Tensor:
        angles = rotary_angles(positions(start, 7), 6)
        return rotate(query, angles) @ rotate(key, angles).T

    assert_close(scores(1000.0), scores(0.0), rtol=0, atol=1e-11)
    assert not torch.allclose(scores(0.0), query @ key.T)


@pytest.mark.parametrize("rotate", ROTATIONS)
def test_rotation_keeps_lengths(rotate: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = rand(2, 3, 7, 6)
    assert_close(rotate(x, rotary_angles(positions(3, 7), 6)).norm(dim=-1), x.norm(dim=-1))
