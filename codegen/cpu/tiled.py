"""Attention by blocks of queries in plain PyTorch: any program, memory linear in the tokens.

For each block of queries only the runs of keys that are not fully masked are computed, and the predicate
is evaluated only in partial tiles (`meaning/masks/tiles.py`). All scores of a row are computed
together, so the softmax needs no running maximum. The backward pass recomputes a block's scores and lets
autograd differentiate them, block by block.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.cpu import soft
from attngraph.codegen.scalar.read_gradients import wanted_gradients
from attngraph.codegen.scalar.read_ranges import require_in_range
from attngraph.ir.language import Environment, ScoreProgram, Tile
from attngraph.ir.ops import kernels
from attngraph.ir.ops.kernels import Operands, Reads, Results, Sizes
from attngraph.meaning.masks import tiles
from attngraph.meaning.masks.tiles import Cut, Grid, Run

BLOCK = 64
"""Queries of a block, and keys of a step in which masks are classified."""
SCORES = 1 << 22
"""About how many scores are held at once (4 Mi x 4 bytes): batches are split to stay below."""


class Tiled(kernels.Kernel):
    """`cpu.tiled`. Plain tensor operations, so it runs on any device."""

    name = "cpu.tiled"

    def refuse(self, program: ScoreProgram, operands: Operands) -> str | None:
        return None

    def forward(self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes) -> Results:
        q, _, v = operands
        if _is_empty(operands):
            return kernels.KERNELS["reference"].forward(program, operands, reads, sizes)
        require_in_range(program, operands, reads, sizes)
        work = _Work(program, operands, reads, tuple(sizes))
        out = kernels.empty_result(v, (*q.shape[:3], v.shape[3]))
        lse = torch.empty(q.shape[:3], dtype=work.q.dtype, device=q.device)
        for tile in work.tiles():
            _, part, part_lse = work.attend(tile)
            place = (slice(*tile.b), slice(None), slice(*tile.q))
            out[place], lse[place] = part, part_lse
        return out, lse

    def backward(
        self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes,
        results: Results, grads: Results,
    ) -> list[Tensor | None]:  # fmt: skip
        if _is_empty(operands):
            reference = kernels.KERNELS["reference"]
            return reference.backward(program, operands, reads, sizes, results, grads)
        work = _Work(program, operands, reads, tuple(sizes))
        each, numbers = wanted_gradients(operands, reads)
        needed = [*each, *(n in numbers for n in range(len(reads)))]
        totals = [
            torch.zeros_like(t) if need else None
            for t, need in zip((work.q, work.k, work.v, *reads), needed, strict=True)
        ]
        for tile in work.tiles():
            work.add_gradients(tile, (grads[0], grads[1]), totals)
        return [
            (torch.zeros_like(like) if like.is_floating_point() else None) if total is None
            else total.to(like.dtype) for total, like in zip(totals, (*operands, *reads), strict=True)
        ]  # fmt: skip


def _is_empty(operands: Operands) -> bool:
    q, k, v = operands
    return 0 in (*q.shape, *k.shape, v.shape[3])


class _Work:
    """One call: the operands in the accumulation dtype, and how a block is computed."""

    def __init__(
        self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: tuple[int, ...]
    ) -> None:
        q, k, v = (t.to(kernels.accumulation_dtype(operands[0].dtype)) for t in operands)
        self.scale = 1.0 if program.scale is None else program.scale
        self.program = program.without_scale
        self.q, self.k, self.v, self.reads, self.sizes = q, k, v, reads, sizes
        self.soft = soft.has_finite_fill(self.program)
        self.dot = soft.largest_score(program, self.scale, q, k, reads) if self.soft else 0.0
        (b, h, sq, _), sk = q.shape, k.shape[2]
        here = reads if q.device.type == "cpu" and tiles.reads_data(program) else ()
        cuts = (Cut(0, b, b), Cut(0, h, h), Cut(0, sq, BLOCK), Cut(0, sk, BLOCK))
        find = functools.partial(tiles.runs, self.program, Grid(*cuts, sizes, here))
        self.runs = (find(soft=True) if self.soft else None, find(soft=False))

    def tiles(self) -> Iterator[Tile]:
        b, h, sq, _ = self.q.shape
        keys = self.k.shape[2]
        batches = max(1, min(b, SCORES // (h * BLOCK * keys)))
        for b0 in range(0, b, batches):
            for q0 in range(0, sq, BLOCK):
                yield Tile((b0, min(b0 + batches, b)), (0, h), (q0, min(q0 + BLOCK, sq)), (0, keys))

    def attend(self, tile: Tile) -> tuple[tuple[Run, ...], Tensor, Tensor]:
        """The keys that are computed, the output and the log-sum-exp."""
        q = self.q[slice(*tile.b), :, slice(*tile.q)] * self.scale
        for runs, is_enough in self._choices(tile):
            out, lse = kernels.attend(self.program, q, [self._part(tile, run) for run in runs])
            if is_enough(lse):
                return runs, out, lse
        raise AssertionError("unreachable")

    def _choices(self, tile: Tile) -> Iterator[tuple[tuple[Run, ...], Callable[[Tensor], bool]]]:
        """Sets of keys to compute, the smallest first, each with the condition on the log-sum-exp under which
        it was sufficient. If a row sees no key, or a NaN, all keys are needed."""
        softly, hard = (None if found is None else found[tile.q[0] // BLOCK] for found in self.runs)
        if softly:  # whether keys hidden by a finite fill have a weight of zero in every row of the block
            count = sum(run.stop - run.start for run in softly)
            yield softly, lambda lse: soft.hides(self.program, lse, count, self.dot, self.sizes)
        if hard:
            yield hard, lambda lse: bool(lse.isfinite().all())
        yield (Run(0, tile.k[1], frozenset()),), lambda lse: True

    def _part(
        self, tile: Tile, run: Run, k: Tensor | None = None, v: Tensor | None = None,
        reads: Reads | None = None,
    ) -> tuple[Tensor, Tensor, Environment, frozenset[int]]:  # fmt: skip
        rows = (slice(*tile.b), slice(None), slice(run.start, run.stop))
        here = Tile(tile.b, tile.h, tile.q, (run.start, run.stop))
        sources = self.reads if reads is None else reads
        env = kernels.environment(here, sources, self.sizes, self.q)
        return (self.k[rows] if k is None else k, self.v[rows] if v is None else v, env, run.skip)

    def add_gradients(self, tile: Tile, grads: Results, totals: list[Tensor | None]) -> None:
        """Recompute one block with autograd and add its gradients to `totals` (q, k, v, reads)."""
        with torch.no_grad():
            runs, _, _ = self.attend(tile)
        place = (slice(*tile.b), slice(None), slice(*tile.q))
        with torch.enable_grad():
            q = self.q[place].detach().requires_grad_(totals[0] is not None)
            reads = [
                r.detach().requires_grad_(t is not None) for r, t in zip(self.reads, totals[3:], strict=True)
            ]
            spans = [(slice(*tile.b), slice(None), slice(run.start, run.stop)) for run in runs]
            ks = [self.k[s].detach().requires_grad_(totals[1] is not None) for s in spans]
            vs = [self.v[s].detach().requires_grad_(totals[2] is not None) for s in spans]
            parts = [self._part(tile, run, k, v, reads) for run, k, v in zip(runs, ks, vs, strict=True)]
            outputs = kernels.attend(self.program, q * self.scale, parts)
            wanted = (grads[0][place].to(outputs[0].dtype), grads[1][place])
            found = kernels.gradients([q, *ks, *vs, *reads], outputs, wanted)
        _accumulate(totals[0], place, found[0])
        for number, span in enumerate(spans):
            _accumulate(totals[1], span, found[1 + number])
            _accumulate(totals[2], span, found[1 + len(spans) + number])
        for number, grad in enumerate(found[1 + 2 * len(spans) :]):
            _accumulate(totals[3 + number], (...,), grad)


def _accumulate(total: Tensor | None, place: tuple[Any, ...], grad: Tensor | None) -> None:
    if total is not None and grad is not None:
        total[place] += grad
