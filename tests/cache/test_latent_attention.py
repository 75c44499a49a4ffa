"""Latent attention, absorbed and expanded, over whole sequences and over a cache: what attention to the keys
and values written out gives, for any rows, pages, rings, blocks and programs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attngraph
from attngraph import codegen
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import cost
from attngraph.ir.ops import latent_attention as latent
from attngraph.ir.ops.cost import LatentSizes, Roofline
from attngraph.ir.ops.kernels import KERNELS
from attngraph.meaning.check import check
from attngraph.models.mla import MLAConfig, MLADecoder

PROGRAMS = (
    "keep k <= q",
    "s = 0.25 * dot\nkeep k <= q else s - 3.4028234663852886e+38",
    "s = 0.125 * dot + r0[h] * (k - q)\nkeep k <= q",
    "s = 5.0 * tanh(dot / 5.0)\nkeep k <= q\nsink r0[h]",
    "keep k <= q and r1[b, q] == r1[b, k]",
    "keep k <= q and q - k < 4",
    "keep k <= q and k >= 9",
    "keep k <= q\np = 0.5 * p",
)
assert codegen


class Case:
    """Whole sequences of latents, cut into what is held and what is new, the held part in shuffled pages."""

    def __init__(
        self, lengths: list[tuple[int, int]], page: int, ring: int, heads: tuple[int, int],
        dtype: torch.dtype, ups: str = "kv",
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(len(lengths) * 100 + page)
        self.lengths = lengths
        (count, groups), total, rows = heads, max(h + n for h, n in lengths), len(lengths)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

        rank, nope, rope, value = 6, 5, 3, 4
        self.key_up = draw(groups, nope, rank) if "k" in ups else None
        self.value_up = draw(groups, value, rank) if "v" in ups else None
        self.values = (0, rank) if "v" in ups else (2, value)
        self.q = draw(rows, count, total, (nope if "k" in ups else rank) + rope)
        self.latent = draw(rows, 1, total, rank + rope)
        self.reads = [draw(count), torch.randint(0, 2, (rows, total), generator=g)]
        columns = -(-(ring or total) // page)
        self.table = torch.randperm(rows * columns, generator=g).view(rows, columns)
        self.pages = torch.full((rows * columns, 1, page, rank + rope), torch.nan, dtype=dtype)
        for row, (held, _) in enumerate(lengths):
            for p in range(max(0, held - columns * page), held):
                slot = p % (columns * page)
                self.pages[self.table[row, slot // page], :, slot % page] = self.latent[row, :, p]
        self.starts = torch.tensor([0, *[n for _, n in lengths]]).cumsum(0)
        self.held = torch.tensor([h for h, _ in lengths])

    def packed(self, whole: Tensor) -> Tensor:
        return torch.cat([whole[r, :, h : h + n] for r, (h, n) in enumerate(self.lengths)], 1).unsqueeze(0)

    def wanted(self, program: str) -> Tensor:
        """By keys and values written out, in float64."""
        shared, (first, count) = self.latent.double(), self.values
        k, v = shared, shared[..., first : first + count]
        groups = max((len(t) for t in (self.key_up, self.value_up) if t is not None), default=1)
        if self.key_up is not None:
            own = torch.einsum("bosr,gpr->bgsp", shared[..., :6], self.key_up.double())
            k = torch.cat([own, shared[..., 6:].expand(-1, groups, -1, -1)], -1)
        if self.value_up is not None:
            v = torch.einsum("bosr,gvr->bgsv", v, self.value_up.double())
        operands = (self.q.double(), *(t.expand(-1, groups, -1, -1) for t in (k, v)))
        reads = [r if not r.is_floating_point() else r.double() for r in self.reads]
        return KERNELS["reference"].forward(parse(program), operands, reads, ())[0]

    def whole(self, program: str, absorb: str, family: str = "") -> Tensor:
        weights = (self.key_up, self.value_up, self.values)
        return torch.ops.attngraph.latent_attention(
            self.q, self.latent, *weights, self.reads, (), program, absorb, family
        )

    def cached(self, program: str, absorb: str, family: str = "") -> Tensor:
        weights = (self.key_up, self.value_up, self.values)
        new = [self.packed(t) for t in (self.q, self.latent)]
        rows = (self.table, self.starts, self.held, self.held)
        return torch.ops.attngraph.cached_latent_attention(
            *new, self.pages, *weights, self.reads, (), program, *rows, absorb, family
        )


@pytest.mark.parametrize("absorb", ["always", "never", "auto"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ups", ["kv", "k", "v"])
def test_both_orders_of_multiplication_give_what_written_out_keys_give(
    program: str, absorb: str, dtype: torch.dtype, ups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "BLOCK", 4)
    ring = 8 if "q - k < 4" in program else 0
    case = Case([(5, 1), (0, 3), (17, 2), (9, 1)], 3, ring, (4, 2), dtype, ups)
    tolerance = {torch.float32: 5e-5, torch.float64: 1e-12, torch.bfloat16: 0.06}[dtype]
    wanted = case.wanted(program)
    for found, want in ((case.whole, wanted), (case.cached, case.packed(wanted))):
        torch.testing.assert_close(
            found(program, absorb).double(), want, rtol=tolerance, atol=tolerance, equal_nan=True
        )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 20)), min_size=1, max_size=4).filter(
        lambda x: any(n for _, n in x)
    ),
    st.sampled_from([1, 3, 16, 64]),
    st.sampled_from(PROGRAMS),
    st.sampled_from([(2, 2), (4, 2), (6, 1)]),
    st.sampled_from(["always", "never", "auto"]),
    st.sampled_from([3, 16, 1024]),
)
def test_any_rows_pages_and_blocks(
    lengths: list[tuple[int, int]], page: int, program: str, heads: tuple[int, int], absorb: str, block: int
) -> None:
    case = Case(lengths, page, 4 if "q - k < 4" in program else 0, heads, torch.float64)
    before, latent.BLOCK = latent.BLOCK, block
    try:
        found = case.cached(program, absorb)
    finally:
        latent.BLOCK = before
    wanted = case.packed(case.wanted(program))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("absorb", ["always", "never"])
def test_rows_whose_scores_are_all_far_from_zero(absorb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There float32 holds too few digits of a log-sum-exp to join blocks of keys of unlike lengths by it."""
    monkeypatch.setattr(latent, "BLOCK", 4)
    case = Case([(5, 1), (0, 3), (17, 2), (9, 1)], 3, 0, (4, 2), torch.float32)
    for program in ("keep k < 0 else -1e9\nkeep k <= q", "keep k < 4 and q < 6 else -3e38\nkeep k <= q"):
        found, wanted = case.cached(program, absorb), case.packed(case.wanted(program))
        torch.testing.assert_close(found.double(), wanted, rtol=5e-5, atol=5e-5)


def test_a_nan_among_the_kept_tokens_is_not_taken_for_a_block_that_shows_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latent, "BLOCK", 4)
    case = Case([(17, 2)], 3, 0, (4, 2), torch.float64)
    case.latent[0, 0, 2] = torch.nan
    case.pages[case.table[0, 0], :, 2] = torch.nan
    for program in ("keep k <= q", "keep k <= q and k >= 9"):
        for absorb in ("always", "never"):
            found = case.cached(program, absorb)
            assert_nan_alike(found, case.packed(case.wanted(program)))


def assert_nan_alike(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found.isnan(), wanted.isnan())
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_expanding_needs_no_memory_that_grows_with_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    expanded = latent.LatentNode.expanded

    def watched(self: latent.LatentNode, shared: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(shared.shape[2])
        return expanded(self, shared)

    monkeypatch.setattr(latent, "BLOCK", 16)
    monkeypatch.setattr(latent.LatentNode, "expanded", watched)
    Case([(150, 7)], 16, 0, (4, 2), torch.float64).cached("keep k <= q", "never")
    assert max(seen) == 16
    assert sum(seen) == 157


V3 = LatentSizes(128, 128, 128, 64, 128, 512, 512, 576)


def test_the_formulas_at_deepseek_v3_sizes() -> None:
    assert (V3.pair_expanded, V3.pair_absorbed) == (81_920, 278_528)
    assert V3.up == V3.query_up == 2 * 128 * 512 * 256
    assert (V3.width, V3.expanded_width) == (576, 40_960)
    assert round(V3.crossover) == 171


def test_where_nothing_but_operations_counts_the_choice_changes_at_the_crossover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(cost.ROOFLINES, "cpu", Roofline(1.0, math.inf))
    cost.crossover.cache_clear()
    found = cost.crossover(V3, "cpu", 2)
    cost.crossover.cache_clear()
    assert found is not None
    assert abs(found - V3.crossover) < 2


def test_a_prompt_is_expanded_and_a_token_is_absorbed() -> None:
    for device in ("cpu", "cuda"):
        assert not cost.absorbing_pays(V3, [(2048, 0)], device, 2)
        assert cost.absorbing_pays(V3, [(1, 4096)] * 8, device, 2)
        assert cost.keeping_pays(V3, device, 2)


def test_absorbing_pays_for_a_device_only_if_its_time_is_less() -> None:
    line = cost.roofline("cpu")
    for new in (1, 10, 100, 1000):
        for held in (0, 10, 1000, 100_000):
            faster = cost.absorbed_seconds(V3, new, held, line, 4) < cost.expanded_seconds(
                V3, new, held, line, 4
            )
            assert cost.absorbing_pays(V3, [(new, held)], "cpu", 4) == faster


def test_a_decoder_is_proved_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MLAConfig(
        layers=1, width=24, heads=4, latent=16, nope=6, rope=4, value=5, query_rank=8, hidden=16
    )  # fmt: skip
    model, ids = MLADecoder(config).eval(), torch.randint(0, 256, (2, 9))
    attngraph.compile(model, cache=True).generate(ids, 1)
    for order in ("absorbed_query", "expanded"):
        with monkeypatch.context() as patch:
            right = getattr(latent.LatentNode, order)

            def wrong(self: latent.LatentNode, x: Tensor, right: Any = right) -> Any:
                found = right(self, x)
                return found * 1.01 if isinstance(found, Tensor) else (found[0], found[1] * 1.01)

            patch.setattr(latent.LatentNode, order, wrong)
            # The check of the pass would refuse it first.
            patch.setattr(check, "same_value", lambda *_: check.Verdict(0.0, ()))
            with pytest.raises(attngraph.NoDecoderError, match="do not give"):
                attngraph.compile(model, cache=True).generate(ids, 1)
