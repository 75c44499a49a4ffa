"""`cpu.decode`: a few new tokens of each row over a cache in pages, by the C of the score program.

Serves what `cpu.compiled` serves, as long as rows bring few tokens; long prompts are computed row by row
by the kernels for whole sequences. Nothing is gathered: the C walks through the pages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from attngraph.codegen.cpu import source, team
from attngraph.codegen.cpu.compiled import BLOCK_Q, Library, Run, library
from attngraph.codegen.cpu.source import Plan
from attngraph.ir.cache import Rows
from attngraph.ir.score import ScoreProgram

FEW = 16
"""Queries of a row, on average, up to which their keys are walked through one by one."""
WIDEST = 1024


class Decode:
    """`cpu.decode`."""

    name = "cpu.decode"

    def attend(
        self, program: ScoreProgram, q: Tensor, new: tuple[Tensor, Tensor], pages: tuple[Tensor, Tensor],
        reads: Sequence[Tensor], sizes: Sequence[int], rows: Rows,
    ) -> Tensor | None:  # fmt: skip
        count = rows.table.shape[0]
        few = 0 < q.shape[2] <= FEW * count
        if not few or q.device.type != "cpu" or q.dtype not in source.ELEMENTS or program.changes_weights:
            return None
        if max(q.shape[3], pages[1].shape[3]) > WIDEST or not pages[0].dtype == pages[1].dtype == q.dtype:
            return None
        found = library(Plan(program.without_scale, q.dtype, tuple(r.dtype for r in reads)))
        if not isinstance(found, Library):
            return None
        return _Step(found, program, (q, *pages), reads, tuple(sizes)).attend(new, rows)


class _Step(Run):
    """One call."""

    def attend(self, new: tuple[Tensor, Tensor], rows: Rows) -> Tensor | None:
        if not (self.set_numbers() and self.set_reads()):
            return None
        (q, k, v), call = (self.q, self.k, self.v), self.call
        _, h, tokens, d = q.shape
        dv = v.shape[3]
        out = v.new_empty_strided((1, h, tokens, dv), (tokens * h * dv, dv, h * dv, 1))
        for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
            setattr(call, name, tensor.data_ptr())
            setattr(call, f"{name}_stride", (ctypes.c_int64 * 3)(*tensor.stride()[:3]))
        if new[0].shape[2] > 0:
            k_new, v_new = (t if t.stride(-1) == 1 else t.contiguous() for t in new)
            self.held += [k_new, v_new]
            call.k_new, call.v_new = k_new.data_ptr(), v_new.data_ptr()
            call.k_new_stride[:] = k_new.stride()[1:3]
            call.v_new_stride[:] = v_new.stride()[1:3]
        for name, index in zip(Rows._fields, rows, strict=True):
            index = index.contiguous()
            self.held.append(index)
            setattr(call, name, index.data_ptr())
        call.columns, call.page, call.window = rows.table.shape[1], k.shape[2], self.window()
        call.B, call.H, call.Hkv, call.D, call.Dv = rows.table.shape[0], h, k.shape[1], d, dv
        call.wide = -(-dv // self.made.lanes) * self.made.lanes
        call.scale = self.scale
        group = h // k.shape[1]
        call.step = max(1, BLOCK_Q // min(group, BLOCK_Q))
        members = max(1, min(torch.get_num_threads(), call.B * call.Hkv))
        call.scratch_size = BLOCK_Q * (d + call.wide) + 64
        call.scratch = self.floats(members * call.scratch_size)
        self.held.append(torch.zeros(4, dtype=torch.int64))
        call.rounds = self.held[-1].data_ptr()
        team.run(self.made.code.attngraph_decode, call, members)
        return None if call.bad else out
