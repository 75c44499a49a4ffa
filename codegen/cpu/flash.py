"""ATen's flash attention for CPUs: one pass over K and V, nothing of size Sq x Skv in memory.

Supports scores that are a multiple of the dot, unmasked or causal. A causal mask with a finite fill is
supported too: the kernel's log-sum-exp shows afterwards whether the masked keys would have had a weight of
zero; if not, the tiled kernel computes the result instead.
"""

import math

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from attngraph.codegen.cpu import soft
from attngraph.codegen.cpu.tiled import Tiled
from attngraph.ir.dtypes import FLOATS
from attngraph.ir.language import Keep, ScoreProgram, parse
from attngraph.ir.ops.kernels import TRUSTED, Kernel, Operands, Reads, Results, Sizes

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CAUSAL = parse("keep k <= q").keeps[0].predicate


class Flash(Kernel):
    """`cpu.flash`. Grouped heads are computed one group member at a time, so that keys and values are
    never repeated in memory."""

    name = "cpu.flash"

    def __init__(self) -> None:
        self._otherwise = Tiled()

    def refuse(self, program: ScoreProgram, operands: Operands) -> str | None:
        q, _, v = operands
        if q.device.type != "cpu":
            return f"runs on the CPU, the tensors are on {q.device.type}"
        if q.dtype not in (*FLOATS, torch.float64):
            return f"no dtype {q.dtype}"
        if isinstance(q, FakeTensor) and q.shape[3] != v.shape[3]:
            return "keys and values differ in width"  # in a traced graph; `_bound` handles such a call
        if program.sink is not None or program.changes_weights:
            return "weights are more than a softmax of the scores"
        if program.scale is None:
            return "scores are more than a multiple of the dot"
        rest = program.without_scale.statements
        if any(not isinstance(s, Keep) or s.predicate is not _CAUSAL for s in rest) or len(rest) > 1:
            return "the mask is not plainly causal"
        return None

    def forward(self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes) -> Results:
        q, k, v = operands
        dot = _bound(q, k, v)
        if math.isinf(dot):
            return self._otherwise.forward(program, operands, reads, sizes)
        q, k, v = (_rows(t) for t in operands)
        causal = bool(program.keeps)
        members = [_forward(member, k, v, 0.0, causal, scale=program.scale) for member in _members(q, k)]
        out = _join([m[0] for m in members])
        lse = _join([m[1] for m in members])
        if not soft.hides(program, lse, k.shape[2], dot, tuple(sizes)):
            return self._otherwise.forward(program, operands, reads, sizes)
        return out, lse

    def backward(
        self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes,
        results: Results, grads: Results,
    ) -> list[Tensor | None]:  # fmt: skip
        q, k, v = operands
        out, lse = results
        dot = _bound(q, k, v)
        served = (
            not math.isinf(dot)
            and not bool(grads[1].any())
            and float(lse.abs().amax()) <= TRUSTED  # the backward pass computes weights from it
            and soft.hides(program, lse, k.shape[2], dot, tuple(sizes))
        )
        if not served:
            return self._otherwise.backward(program, operands, reads, sizes, results, grads)
        q, k, v = (_rows(t) for t in operands)
        causal = bool(program.keeps)
        parts = zip(_members(grads[0], k), _members(q, k), _members(out, k), _members(lse, k), strict=True)
        found = [
            _backward(_rows(g), m, k, v, _rows(o), s.contiguous(), 0.0, causal, scale=program.scale)
            for g, m, o, s in parts
        ]
        grad_k, grad_v = found[0][1], found[0][2]
        for _, more_k, more_v in found[1:]:
            grad_k, grad_v = grad_k + more_k, grad_v + more_v
        of_reads = (torch.zeros_like(r) if r.is_floating_point() else None for r in reads)
        return [_join([f[0] for f in found]), grad_k, grad_v, *of_reads]


def _bound(q: Tensor, k: Tensor, v: Tensor) -> float:
    """A bound of |q . k|; infinite where ATen's kernel must not be used: it fails for empty tensors and for
    values of another width than keys, and does not propagate a NaN or an infinity in q or k."""
    served = min(*q.shape, *k.shape) > 0 and k.shape[3] == v.shape[3]
    return soft.largest_dot(q, k) if served else math.inf


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension contiguous, which the kernel requires but does not check."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _members(tensor: Tensor, k: Tensor) -> list[Tensor]:
    """`[B, Hq, ...]` as one tensor `[B, Hkv, ...]` per member of a head group."""
    group = tensor.shape[1] // k.shape[1]
    return [tensor] if group == 1 else [tensor[:, member::group] for member in range(group)]


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts, 2).flatten(1, 2)
