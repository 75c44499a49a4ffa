"""Attention over a cache whose tokens ranks divide: on simulated ranks, that of one device with all of it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from attngraph.codegen.cpu import decode
from attngraph.ir.ops import cached_attention as cached
from attngraph.ir.ops import nodes
from attngraph.ir.ops.collectives import Team, together

assert nodes.VIEWS  # registers the ops
OPS = torch.ops.attngraph
ROWS = ((7, 1), (0, 3), (1, 1), (12, 2), (2, 0))
"""Of each row, its kept tokens and its new ones: none kept, fewer than ranks, no new ones."""
PAGE = 2
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
PROGRAMS = {
    "causal": ("s = dot * 0.3; keep k <= q", lambda: []),
    "window": ("s = dot * 0.3; keep k <= q and k > q - 4", lambda: []),
    "distances": ("s = dot * 0.3 - 0.2 * (q - k); keep k <= q", lambda: []),
    "sink": ("s = dot * 0.3; keep k <= q; sink r0[0]", lambda: [torch.randn(3)]),
    "documents": (
        "s = dot * 0.3; keep k <= q and r0[b, k] == r0[b, q]",
        lambda: [torch.randint(0, 2, (len(ROWS), 16))],
    ),
    "finite": ("s = dot * 0.3; keep k <= q and k != 1 or k == q else -10000.0", lambda: []),
}


def _rows() -> tuple[Tensor, Tensor]:
    """Where each row's new tokens begin, and how many tokens it has kept."""
    starts = [0, *itertools.accumulate(new for _, new in ROWS)]
    return torch.tensor(starts), torch.tensor([kept for kept, _ in ROWS])


def _paged(values: Tensor, team: int = 1, member: int = 0) -> tuple[Tensor, Tensor]:
    """The pages of what a member keeps of `values`, `[rows, heads, positions, width]`, and their table, in
    another order; memory that holds no token is NaN."""
    rows, heads, positions, width = values.shape
    columns = -(-(positions // team + 1) // PAGE)
    table = torch.randperm(rows * columns).view(rows, columns)
    pages = values.new_full((rows * columns, heads, PAGE, width), torch.nan)
    for row, (kept, _) in enumerate(ROWS):
        for slot, position in enumerate(range(member, kept, team)):
            pages[table[row, slot // PAGE], :, slot % PAGE] = values[row, :, position]
    return pages, table


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("team, ranks", [(2, 2), (3, 3), (2, 4)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_that_divide_tokens_give_what_one_device_gives(
    name: str, team: int, ranks: int, dtype: torch.dtype
) -> None:
    """Each rank has two heads; a team shares one key/value head."""
    torch.manual_seed(0)
    program, make_reads = PROGRAMS[name]
    reads, (starts, held) = make_reads(), _rows()
    kv_heads, total = ranks // team, int(starts[-1])
    q = torch.randn(1, 2 * ranks, total, 5, dtype=dtype)
    k, v = (torch.randn(1, kv_heads, total, n, dtype=dtype) for n in (5, 4))
    old = torch.randn(len(ROWS), kv_heads, 12, 9, dtype=dtype)
    pages, table = _paged(old.double())
    wide = [r.double() if r.is_floating_point() else r for r in reads]
    wanted = OPS.cached_attention(
        q.double(), k.double(), v.double(), pages[..., :5], pages[..., 5:], wide, [], program, table, starts,
        held, held,
    )  # fmt: skip

    def run(rank: int) -> Tensor:
        own = slice(rank // team, rank // team + 1)
        pages, table = _paged(old[:, own], team, rank % team)
        return OPS.divided_attention(
            q[:, 2 * rank : 2 * rank + 2], k[:, own], v[:, own], pages[..., :5], pages[..., 5:], reads, [],
            program, table, starts, held, held, "", None, None, team, ranks, "simulated",
        )  # fmt: skip

    found = torch.cat(together([functools.partial(run, rank) for rank in range(ranks)]), 1)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("absorb", ["always", "never", "auto"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_ranks_that_divide_latents_give_what_one_device_gives(absorb: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ranks, (starts, held) = 3, _rows()
    total, program = int(starts[-1]), "s = dot * 0.3; keep k <= q"
    q = torch.randn(1, 2 * ranks, total, 4 + 2, dtype=dtype)
    key_up, value_up = torch.randn(2 * ranks, 4, 8, dtype=dtype), torch.randn(2 * ranks, 5, 8, dtype=dtype)
    latent, old = torch.randn(1, 1, total, 10, dtype=dtype), torch.randn(len(ROWS), 1, 12, 10, dtype=dtype)
    pages, table = _paged(old.double())
    wanted = OPS.cached_latent_attention(
        q.double(), latent.double(), pages, key_up.double(), value_up.double(), [0, 8], [], [], program,
        table, starts, held, held, "always",
    )  # fmt: skip

    def run(rank: int) -> Tensor:
        pages, table = _paged(old, ranks, rank)
        own = slice(2 * rank, 2 * rank + 2)
        return OPS.divided_latent_attention(
            q[:, own], latent, pages, key_up[own], value_up[own], [0, 8], [], [], program, table, starts,
            held, held, absorb, "", None, ranks, ranks, "simulated",
        )  # fmt: skip

    found = torch.cat(together([functools.partial(run, rank) for rank in range(ranks)]), 1)
    tolerance = 4 * TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_kept_tokens_are_read_by_c_where_it_serves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its log-sum-exps, for scattered positions, and with sums of parts of the keys."""
    plain = cached.row_by_row

    def row_by_row(program: Any, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert q.dtype is torch.float64  # what is compared with
        return plain(program, q, *args, **kwargs)

    monkeypatch.setattr(cached, "row_by_row", row_by_row)
    monkeypatch.setattr(decode, "LEAST_KEYS", 2)
    torch.set_num_threads(8)
    test_ranks_that_divide_tokens_give_what_one_device_gives("window", 2, 2, torch.float32)
    test_ranks_that_divide_tokens_give_what_one_device_gives("documents", 3, 3, torch.bfloat16)


def test_ranks_of_which_only_some_exchange_are_an_error() -> None:
    team = Team(2, 2, "simulated")
    with pytest.raises(RuntimeError, match="some ranks exchange"):
        together([lambda: team.swapped(torch.zeros(2, 1)), lambda: None])
