"""Attention over a cache equals attention over the whole sequence: any rows, pages, rings, programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attngraph import codegen
from attngraph.codegen.cpu import decode
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import cached_attention as cache
from attngraph.ir.ops.cached_attention import Rows
from attngraph.ir.ops.kernels import KERNELS

PROGRAMS = (
    "keep k <= q",
    "s = 0.25 * dot\nkeep k <= q else s - 3.4028234663852886e+38",
    "s = 0.125 * dot + r0[h] * (k - q)\nkeep k <= q",
    "s = 5.0 * tanh(dot / 5.0)\nkeep k <= q\nsink r0[h]",
    "keep k <= q and r1[b, q] == r1[b, k]",
    "keep k <= q and q - k < 4",
    "keep k <= q\np = 0.5 * p",
    "keep k < q - 2\np = where(isnan(p), 0.0, p)",
    "keep k <= q and r1[b, q] == r1[b, k]\nsink r0[h]\np = p * r0[h]",
    "keep k <= q\np = where(p > 0.1, p, 0.0)",
)
assert codegen


class Case:
    """Whole sequences, cut into what is held and what is new, the held part in shuffled pages."""

    def __init__(
        self, lengths: list[tuple[int, int]], page: int, ring: int, heads: int, kv: int, dtype: torch.dtype
    ):
        g = torch.Generator().manual_seed(len(lengths) * 100 + page)
        self.lengths, self.page = lengths, page
        total = max(h + n for h, n in lengths)
        rows = len(lengths)
        self.q = torch.randn(rows, heads, total, 8, generator=g, dtype=torch.float64).to(dtype)
        self.k, self.v = (
            torch.randn(rows, kv, total, 8, generator=g, dtype=torch.float64).to(dtype) for _ in "kv"
        )
        self.reads = [torch.randn(heads, generator=g), torch.randint(0, 2, (rows, total), generator=g)]
        columns = -(-(ring or total) // page)
        count = rows * columns
        self.table = torch.randperm(count, generator=g).view(rows, columns)
        self.pages = [torch.full((count, kv, page, 8), torch.nan, dtype=dtype) for _ in "kv"]
        for row, (held, _) in enumerate(lengths):
            for p in range(max(0, held - columns * page), held):
                slot = p % (columns * page)
                for store, whole in zip(self.pages, (self.k, self.v), strict=True):
                    store[self.table[row, slot // page], :, slot % page] = whole[row, :, p]
        starts = torch.tensor([0, *[n for _, n in lengths]]).cumsum(0)
        held = torch.tensor([h for h, _ in lengths])
        self.rows = Rows(self.table, starts, held, held)

    def packed(self, whole: Tensor) -> Tensor:
        return torch.cat([whole[r, :, h : h + n] for r, (h, n) in enumerate(self.lengths)], 1).unsqueeze(0)

    def wanted(self, program: str) -> Tensor:
        operands = tuple(t.double() for t in (self.q, self.k, self.v))
        out, _ = KERNELS["reference"].forward(
            parse(program), operands, [r if not r.is_floating_point() else r.double() for r in self.reads], ()
        )
        return self.packed(out)

    def found(self, program: str, kernel: str) -> Tensor:
        new = [self.packed(t) for t in (self.k, self.v)]
        reads = [r if not r.is_floating_point() else r.to(self.q.dtype) for r in self.reads]
        args = (self.packed(self.q), *new, *self.pages, reads, (), program, *self.rows)
        return torch.ops.attngraph.cached_attention(*args, kernel)


@pytest.mark.parametrize("kernel", ["cpu.decode", "reference", ""])
@pytest.mark.parametrize("program", [*PROGRAMS[3:6], *PROGRAMS[7:]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (96, 1)])
def test_new_tokens_see_what_they_see_in_the_whole_sequence(
    program: str, kernel: str, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    ring = 8 if "q - k < 4" in program else 0
    case = Case([(5, 1), (0, 3), (17, 2), (9, 1)], 3, ring, *heads, dtype)
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(
        case.found(program, kernel).double(), case.wanted(program), rtol=tolerance, atol=tolerance
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 20)), min_size=1, max_size=4).filter(
        lambda x: any(n for _, n in x)
    ),
    st.sampled_from([1, 3, 16, 64]),
    st.sampled_from(PROGRAMS),
    st.sampled_from([(2, 2), (4, 2), (6, 1)]),
)
def test_any_rows_and_pages(
    lengths: list[tuple[int, int]], page: int, program: str, heads: tuple[int, int]
) -> None:
    case = Case(lengths, page, 4 if "q - k < 4" in program else 0, *heads, torch.float32)
    torch.testing.assert_close(case.found(program, "").double(), case.wanted(program), rtol=2e-5, atol=2e-5)


def test_fixed_keys_are_seen_by_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 5, 8, generator=g)
    k, v = (torch.randn(2, 2, 7, 8, generator=g) for _ in "kv")
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    rows = Rows(torch.tensor([[0], [1]]), torch.tensor([0, 2, 5]), torch.tensor([9, 3]), torch.tensor([7, 7]))
    none = q.new_empty(1, 2, 0, 8)
    for kernel in ("reference", "cpu.decode"):
        if kernel == "cpu.decode":  # there are more positions than fixed keys, and still it is one call
            monkeypatch.setattr(cache, "row_by_row", lambda *_: pytest.fail("a call for each row"))
        found = torch.ops.attngraph.cached_attention(
            q, none, none, k, v, [mask], (), "keep r0[b, k]", *rows, kernel
        )
        for row, place in enumerate((slice(0, 2), slice(2, 5))):
            wanted, _ = KERNELS["reference"].forward(
                parse("keep r0[b, k]"),
                (q[:, :, place], k[row : row + 1], v[row : row + 1]),
                [mask[row : row + 1]],
                (),
            )
            torch.testing.assert_close(found[:, :, place], wanted)
    assert cache.CACHED


def test_history_puts_pages_and_new_tokens_in_order() -> None:
    pages = torch.arange(12.0).view(4, 3)  # [pages, page]
    new = torch.tensor([[100.0, 200.0, 201.0]])
    table, starts, held = torch.tensor([[2, 0], [1, 3]]), torch.tensor([0, 1, 3]), torch.tensor([4, 2])
    found = torch.ops.attngraph.history(pages, new, table, starts, held, 1)
    assert found.tolist() == [[6, 7, 8, 0, 100], [3, 4, 200, 201, 0]]


UNEQUAL = [(3, 2), (0, 60), (9, 0), (5, 40), (0, 1), (20, 33)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_rows_of_any_lengths_are_one_call(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(UNEQUAL[1:4] + UNEQUAL[5:], 4, 0, 4, 2, torch.float32)
    wanted = case.wanted(program)
    monkeypatch.setattr(cache, "row_by_row", lambda *_: pytest.fail("a call for each row"))
    torch.testing.assert_close(case.found(program, "").double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_only_long_rows_are_left_to_the_kernels_for_whole_sequences(
    program: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [(held * kept, new) for held, new in UNEQUAL]
    case, alone = Case(lengths, 4, 0, 4, 2, torch.float32), []
    row_by_row = cache.row_by_row

    def told(*args: Any) -> Tensor:
        alone.append(cache.counts(args[6]).new)
        return row_by_row(*args)

    monkeypatch.setattr(decode, "LONG", 3000)
    monkeypatch.setattr(decode, "row_by_row", told)
    found = case.found(program, "cpu.decode")
    torch.testing.assert_close(found.double(), case.wanted(program), rtol=1e-4, atol=1e-5)
    assert alone == [[0, 60, 0, 40, 0, 33] if kept else [0, 60, 0, 40, 0, 0]]


def test_whole_prompts_of_equal_length_are_one_call_of_the_kernels_for_whole_sequences() -> None:
    for tokens, long in ((decode.BATCHED, False), (decode.BATCHED + 1, True)):
        rows = Rows(torch.zeros(2, 1).long(), torch.arange(3) * tokens, torch.zeros(2), torch.zeros(2))
        assert decode._Rows(rows).are_long(4) == [long, long]
