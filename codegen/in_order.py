"""Attention of whole sequences in one order of sums: the keys and values of a row are its one page, so it is
attention over a cache for tokens that all are new."""

import dataclasses

import torch
from torch import Tensor

from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops import kernels
from attngraph.ir.ops.cached_attention import CachedKernel, Rows
from attngraph.ir.ops.declare import require_no_order
from attngraph.ir.ops.kernels import Operands, Reads, Results, Sizes


class InOrder(kernels.Kernel):
    """Attention of whole sequences by a kernel of attention over a cache; gradients by another one."""

    in_order = True

    def __init__(self, name: str, decode: CachedKernel) -> None:
        self.name, self.decode = name, decode

    def refuse(self, program: ScoreProgram, operands: Operands) -> str | None:
        q, k, v = operands
        most = max(program.reads, default=-1) + 1
        if not self.decode.source(program, q, (k, v), [q.new_empty(0, dtype=torch.float32)] * most):
            return "there is no code that computes it in order"
        return None

    def forward(self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes) -> Results:
        q, k, v = operands
        batch, heads, tokens, _ = q.shape
        if 0 in (*q.shape, *k.shape):
            return kernels.KERNELS["reference"].forward(program, operands, reads, sizes)
        out = kernels.empty_result(q, (batch, heads, tokens, v.shape[3]))
        rows = Rows(
            torch.arange(batch, device=q.device)[:, None], torch.arange(batch + 1, device=q.device) * tokens,
            torch.zeros(batch, dtype=torch.int64, device=q.device),
            torch.full((batch,), k.shape[2], device=q.device),
        )  # fmt: skip
        lse = q.new_empty((1, heads, batch * tokens), dtype=torch.float32)
        packed = q.transpose(1, 2).reshape(1, batch * tokens, heads, -1).transpose(1, 2)
        none = k.new_empty((1, k.shape[1], 0, k.shape[3])), v.new_empty((1, k.shape[1], 0, v.shape[3]))
        found = self.decode.attend(program, packed, none, (k, v), reads, sizes, rows, lse=lse)
        if found is None:
            require_no_order(True, q, "attention")
        assert found is not None
        out.copy_(found[0].view(heads, batch, tokens, -1).transpose(0, 1))
        return out, lse[0].view(heads, batch, tokens).transpose(0, 1)

    def backward(
        self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes,
        results: Results, grads: Results,
    ) -> list[Tensor | None]:  # fmt: skip
        plain = dataclasses.replace(program, in_order=False)
        return kernels.choose(plain, operands).backward(plain, operands, reads, sizes, results, grads)

    def source(self, program: ScoreProgram, operands: Operands, reads: Reads) -> str:
        q, k, v = operands
        return self.decode.source(program, q, (k, v), reads)
