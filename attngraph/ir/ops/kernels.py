"""The registry of kernels that compute attention nodes, and the reference kernel.

A kernel supports some programs on some devices and gives the reason when it does not support another.
`codegen/` registers the fast kernels; the reference kernel in this file supports everything and defines the
correct result. The op in `ir/ops/attention.py` runs the kernel that it names, or else the first that supports
the call.

Attention to some of the keys (`Part`) is merged with attention to the others by the log-sum-exps of the
scores: together they are the parts weighted by their shares of the sum of all exponentials. So are blocks of
a latent's cache, and the ranks' parts of a divided one.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attngraph.errors import BackendError
from attngraph.ir.language import Environment, ScoreProgram, Tile, evaluate
from attngraph.ir.ops import memory

Operands = tuple[Tensor, Tensor, Tensor]
"""q, k and v."""
Reads = Sequence[Tensor]
Sizes = Sequence[int]
"""What a program reads as `r0`, `r1`, .., and its sizes `n0`, `n1`, .."""
Results = tuple[Tensor, Tensor]
"""The output and the log-sum-exps, or gradients of them."""
SHARED, SHARED_END = ", the same in every kernel", "end of "
"""How comments begin and end a part of a kernel's source that other kernels have too: its name stands before
the first, and after the second."""
TRUSTED = 128.0
"""A log-sum-exp in float32 that is larger than this in magnitude is too imprecise to recover the sum."""


class Kernel(Protocol):
    """One way to compute attention.

    `forward` returns the output `[B, Hq, Sq, Dv]` in v's dtype and the log-sum-exp of each row
    `[B, Hq, Sq]` (sink included) in the accumulation dtype. `backward` returns the gradients of
    q, k, v and of every read, None for a read that is not floating.
    """

    name: str
    in_order: bool = False
    """Whether it computes programs that are `in order`, and no others."""

    def refuse(self, program: ScoreProgram, operands: Operands) -> str | None:
        """Why this kernel does not support the program on such tensors (fake ones are fine), or None."""

    def forward(self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes) -> Results: ...

    def backward(
        self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes,
        results: Results, grads: Results,
    ) -> list[Tensor | None]: ...  # fmt: skip

    def source(self, program: ScoreProgram, operands: Operands, reads: Reads) -> str:
        """The source compiled for such a call (fake tensors are fine); "" if the kernel is not generated from
        source, or delegates this call to other kernels."""
        return ""

    def prepare(self, program: ScoreProgram, operands: Operands, reads: Reads, scores: float) -> None:
        """Begin what a call of about so many scores needs, while other things are done (fake tensors are
        fine)."""
        return

    def remarks(self, program: ScoreProgram) -> tuple[str, ...]:
        """Remarks for the report from running the program: choices of the kernel that failed, and the
        fallback."""
        return ()


KERNELS: dict[str, Kernel] = {}
"""Kernels by name, in order of preference among those for the same devices; "reference" stays last."""
_DEVICES: dict[str, frozenset[str]] = {}


def register(kernel: Kernel, devices: frozenset[str] = frozenset()) -> None:
    """Add a kernel, before the reference and after those registered earlier. `devices`: the device types
    ("cuda", ...) that it is made for. There it is preferred to kernels made for no particular device;
    elsewhere it is used only if requested by name."""
    last = KERNELS.pop("reference", None)
    KERNELS[kernel.name] = kernel
    _DEVICES[kernel.name] = devices
    if last is not None:
        KERNELS["reference"] = last


def candidates(device: str, family: str = "") -> list[Kernel]:
    """The kernels to try for tensors on such a device, the most preferred first."""
    if family:
        return [kernel for name, kernel in KERNELS.items() if name.split(".")[0] == family]
    made_for = [kernel for name, kernel in KERNELS.items() if device in _DEVICES[name]]
    return made_for + [kernel for name, kernel in KERNELS.items() if not _DEVICES[name]]


def choose(program: ScoreProgram, operands: Operands, family: str = "") -> Kernel:
    """The first kernel that supports the program; `family` ("cpu", "triton", ...) restricts the choice to
    kernels whose name starts with it. BackendError, with each one's reason, where none supports it."""
    reasons = []
    is_exact = program.in_order and operands[0].dtype == torch.float64  # in proofs any order will do
    for kernel in candidates(operands[0].device.type, family):
        fits = kernel.in_order == program.in_order or is_exact
        reason = kernel.refuse(program, operands) if fits else "it has another order of sums"
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    found = "; ".join(reasons) or "it has none"
    advice = f" What to do: leave backend={family!r} out, and the best kernel for the device is taken."
    raise BackendError(
        f"no kernel of {family or 'any backend'} serves this attention: {found}.{advice * bool(family)}"
    )


def empty_result(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A new tensor for the result `[B, Hq, Sq, Dv]`, laid out as all kernels do: `[B, Sq, Hq, Dv]` in memory,
    so that joining heads needs no copy. It is not a view, so autograd lets the caller change it in place."""
    b, h, s, d = shape
    return memory.empty_strided((b, h, s, d), (s * h * d, d, h * d, 1), like.dtype, like.device)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums: float32 for 16-bit operands, else the operands' own dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def attend(
    program: ScoreProgram, q: Tensor, parts: Sequence[tuple[Tensor, Tensor, Environment, frozenset[int]]]
) -> Results:
    """Attention of a block of queries, `[B, Hq, S, D]` in the accumulation dtype, to several blocks of keys,
    with all scores in memory at once: the output `[B, Hq, S, Dv]` and the log-sum-exp `[B, Hq, S]`. A part
    has k `[B, Hkv, Sk, D]`, v `[B, Hkv, Sk, Dv]`, the environment of its tile, and the statements that have
    no effect there."""
    products = [dot(q, k) for k, *_ in parts]
    places = zip(products, parts, strict=True)
    blocks = [evaluate.scores(program, product, env, skip) for product, (_, _, env, skip) in places]
    top = torch.stack([b.amax(-1, keepdim=True) for b in blocks]).amax(0)
    sink = evaluate.sink(program, parts[0][2])
    if sink is not None:
        top = torch.maximum(top, sink)
    # Subtracting the maximum affects only rounding, so it needs no gradient.
    top = top.detach()
    weights = [(b - top).exp() for b in blocks]
    total = sum((w.sum(-1, keepdim=True) for w in weights), torch.zeros_like(top))
    if sink is not None:
        total = total + (sink - top).exp()
    has_weights = program.changes_weights
    out = None
    for weight, product, (_, v, env, _) in zip(weights, products, parts, strict=True):
        p = evaluate.weights(program, weight / total, env, product) if has_weights else weight
        part = grouped(p, v)
        out = part if out is None else out + part
    assert out is not None
    if not has_weights:
        out = out / total
    return out, (top + total.log()).squeeze(-1)


def normalised(scores: Tensor, sink: Tensor | None) -> Tensor:
    """The softmax of scores that span all keys; a sink counts as one more key."""
    if sink is None:
        return scores.softmax(-1)
    one_more = sink.expand(*scores.shape[:3], 1)
    return torch.cat([scores, one_more], -1).softmax(-1)[..., : scores.shape[3]]


def dot(q: Tensor, k: Tensor) -> Tensor:
    """`[B, Hq, S, D]` times `[B, Hkv, Sk, D]` as `[B, Hq, S, Sk]`."""
    return grouped(q, k.mT)


def grouped(x: Tensor, y: Tensor) -> Tensor:
    """`[B, Hq, S, M]` times `[B, Hkv, M, N]`; the rows of a group are stacked, so that y is not repeated."""
    b, hq, s, m = x.shape
    hkv = y.shape[1]
    if hq == hkv:
        return x @ y
    return (x.reshape(b, hkv, (hq // hkv) * s, m) @ y).view(b, hq, s, y.shape[3])


def environment(tile: Tile, reads: Reads, sizes: Sizes, like: Tensor) -> Environment:
    return Environment(tile, reads, sizes, accumulation_dtype(like.dtype), like.device)


class Reference(Kernel):
    """Computes the whole score matrix in plain PyTorch: slow, but the definition of the op."""

    name = "reference"

    def refuse(self, program: ScoreProgram, operands: Operands) -> str | None:
        return None

    def forward(self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes) -> Results:
        q, k, v = operands
        dtype = accumulation_dtype(q.dtype)
        b, hq, sq, _ = q.shape
        env = environment(Tile((0, b), (0, hq), (0, sq), (0, k.shape[2])), reads, sizes, q)
        if k.shape[2] == 0:
            return _nothing_to_see(q, v, evaluate.sink(program, env))
        out, lse = attend(program, q.to(dtype), [(k.to(dtype), v.to(dtype), env, frozenset())])
        return out.to(v.dtype), lse

    def backward(
        self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes,
        results: Results, grads: Results,
    ) -> list[Tensor | None]:  # fmt: skip
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in operands]
            sources = [r.detach().requires_grad_() if r.is_floating_point() else r for r in reads]
            outputs = self.forward(program, (inputs[0], inputs[1], inputs[2]), sources, sizes)
            return gradients([*inputs, *sources], outputs, grads)


def gradients(inputs: Sequence[Tensor], outputs: Results, grads: Results) -> list[Tensor | None]:
    """Gradients of the floating inputs (zeros where there is no path), None for the others."""
    wanted = [t for t in inputs if t.requires_grad]
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
    found: Iterator[Tensor] = map(torch.zeros_like, wanted)
    if pairs:
        results, given = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(results, wanted, given, allow_unused=True, materialize_grads=True))
    return [next(found) if t.requires_grad else None for t in inputs]


def _nothing_to_see(q: Tensor, v: Tensor, sink: Tensor | None) -> Results:
    """The result for no keys at all: an empty weighted sum, zeros as PyTorch's matmul gives."""
    # Empty sums: zeros that depend on the inputs, so that their gradients are zeros rather than missing.
    nothing = q[..., :0].sum() + v.sum()
    out = v.new_zeros((*q.shape[:3], v.shape[3])) + nothing
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=accumulation_dtype(q.dtype))
    return out, lse if sink is None else lse.unsqueeze(-1).maximum(sink).squeeze(-1)


register(Reference())


class Part(NamedTuple):
    """Attention of some queries to a part of their keys. `lse` is minus infinity for a query that sees no key
    of the part; `is_clear` is False if a NaN in `lse` may instead come from NaN scores."""

    out: Tensor
    lse: Tensor
    is_clear: bool = True


def cleared(out: Tensor, lse: Tensor, operands: Sequence[Tensor]) -> Part:
    """A kernel's results as a part: where its log-sum-exp is NaN because no key is seen, it is minus
    infinity."""
    hidden = lse.isnan()
    floating = (t for t in operands if t.is_floating_point())
    # Neither a NaN nor +inf makes a score NaN. (Masks contain -inf.)
    if not bool(hidden.any()) or all(bool((t < math.inf).all()) for t in floating):
        return Part(out, lse.masked_fill(hidden, -math.inf))
    return Part(out, lse, False)


def tell_shares(parts: Sequence[Part]) -> bool:
    """Whether the log-sum-exps are precise enough to weight the parts: not for a row whose scores are all
    far from zero, such as one masked everywhere with a finite fill."""
    top = torch.stack([part.lse for part in parts]).amax(0).abs()
    return not bool(((top > TRUSTED) & top.isfinite()).any())


def joined(parts: Sequence[Part]) -> Part:
    """The parts merged, each weighted by its share of the normaliser. A row that sees no key in any part is
    NaN."""
    lse = torch.stack([part.lse for part in parts])
    outs = torch.stack([part.out for part in parts])
    weights = torch.softmax(lse, 0).to(outs.dtype)
    out = torch.where((lse > -math.inf)[..., None], outs, 0.0).mul(weights[..., None]).sum(0)
    return Part(out, lse.logsumexp(0))
