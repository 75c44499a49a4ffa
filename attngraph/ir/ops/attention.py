"""The attngraph dialect: the ops that a program graph may hold besides ATen's.

One op for every attention. q is `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`, by any
strides; `Hq % Hkv == 0`. `program` is a score program as text (`ir/language/score.py`); it reads the tensors
`reads` as r0, r1, ... and the integers `sizes` as n0, n1, .... `kernel` names the kernel that computes it
(`ir/ops/kernels.py`); empty: the first that supports it. `out` is `[B, Hq, Sq, Dv]` in v's dtype, with the
heads of a token contiguous in memory. `lse`, `[B, Hq, Sq]`, is the log-sum-exp of each row, for the backward
pass and for merging partial attentions (minus infinity or NaN in a row that keeps no key).

`attngraph::linear_attention` has the scores themselves as its weights: a multiple of the dot, zero where
`keep k <= q` hides them, times the factor of `p = ...`, which may depend on the query but not on the key. k
v^T is summed over keys first, which takes O(T) time and memory; a causal mask is handled in chunks
(Katharopoulos et al. 2020, arXiv 2006.16236). It consists of differentiable ops, so it needs no backward of
its own.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from attngraph.ir.language import E, Environment, ScoreProgram, Tile, evaluate, format_expr, parse
from attngraph.ir.ops import kernels
from attngraph.ir.ops.kernels import KERNELS, Kernel
from attngraph.ir.ops.shardings import tell_dtensor

from attngraph.ir.ops.declare import (  # isort: skip
    Sizes, are_batched, autograd_inside, declare, has_tangent, is_recorded, is_transformed, run_kernel,
)  # fmt: skip

_NOTHING = contextlib.nullcontext()


def _misfit(problem: str, *operands: Tensor) -> ValueError:
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip("qkv", operands, strict=False))
    return ValueError(f"attention: {problem}{shapes and ': '}{shapes}.")


def check_operands(
    q: Tensor, k: Tensor, v: Tensor, reads: Sequence[Tensor], sizes: Sequence[Any], program: ScoreProgram
) -> None:
    """Raise ValueError unless the operands are compatible and everything that the program reads is given.
    In a trace, sizes that only data know are taken to be."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise _misfit(f"{name} must be [batch, heads, tokens, width], found {tuple(tensor.shape)}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise _misfit(f"q, k and v must have one floating dtype, found {q.dtype}, {k.dtype}, {v.dtype}")
    everything, device = (q, k, v, *reads), q.device
    if any(t.device != device for t in everything):
        found = ", ".join(str(t.device) for t in everything)
        raise _misfit(f"all tensors must be on one device, found {found}")
    (rows, heads, queries, width), (k_rows, k_heads, keys, k_width) = q.shape, k.shape
    v_rows, v_heads, values, _ = v.shape
    if _known(rows != k_rows) or _known(k_rows != v_rows):
        raise _misfit("batch sizes differ", q, k, v)
    if _known(width != k_width):
        raise _misfit("q and k differ in width", q, k, v)
    if _known(k_heads != v_heads) or _known(keys != values):
        raise _misfit("k and v differ in heads or tokens", q, k, v)
    if _known(k_heads == 0) or _known(heads % k_heads != 0):
        must = "the first must be a multiple of the second"
        raise _misfit(f"{heads} query heads cannot share {k_heads} key/value heads; {must}", q, k, v)
    for number, rank in program.reads.items():
        if number >= len(reads):
            raise _misfit(f"the program reads r{number}, but only {len(reads)} tensor(s) are given")
        if reads[number].ndim != rank:
            shape = tuple(reads[number].shape)
            raise _misfit(f"the program reads r{number} with {rank} index(es), but it has shape {shape}")
    for node, axis, index in program.places:
        extent = reads[node.value].shape[axis]
        if index.op == "var":
            wanted = {"b": rows, "h": heads, "q": queries, "k": keys}[index.value]
        elif index.op == "const":
            wanted = int(index.value) + 1
        else:
            continue
        if _known(extent < wanted) or (index.op == "const" and index.value < 0):
            shape = tuple(reads[node.value].shape)
            needs = f"{format_expr(node)} needs r{node.value} to have at least {wanted} entries"
            raise _misfit(f"{needs} in dimension {axis}, it has shape {shape}")
    if program.sizes > len(sizes):
        raise _misfit(f"the program names n{program.sizes - 1}, but only {len(sizes)} size(s) are given")


def _known(condition: Any) -> bool:
    return condition if condition.__class__ is bool else guard_or_false(condition)


def _kernel(name: str, program: ScoreProgram, q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    if not name:
        return kernels.choose(program, (q, k, v))
    if name not in KERNELS:
        raise _misfit(f"no kernel is called {name!r}; there are {', '.join(KERNELS)}")
    reason = KERNELS[name].refuse(program, (q, k, v))
    if reason is not None:
        raise _misfit(f"kernel {name} does not serve this: {reason}")
    return KERNELS[name]


def _own_dtypes(like: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Disable autocast inside a kernel: it chooses its accumulation dtype itself."""
    device = like.device.type
    if not torch.is_autocast_enabled(device):
        return _NOTHING
    return torch.autocast(device, enabled=False)


def _attention_fake(a: Any) -> tuple[Tensor, Tensor]:
    check_operands(a.q, a.k, a.v, a.reads, a.sizes, parse(a.program))
    b, h, s, _ = a.q.shape
    out = a.v.new_empty((b, s, h, a.v.shape[3])).transpose(1, 2)
    return out, a.q.new_empty((b, h, s), dtype=kernels.accumulation_dtype(a.q.dtype))


@declare(
    fake=lambda a: [
        t.new_empty(t.shape) for t in (a.q, a.k, a.v, *filter(Tensor.is_floating_point, a.reads))
    ],
    derivatives="differentiate attngraph::attention, with create_graph=True",
    batched=lambda size, dims, args: None,
    runs=None,
)
def _attention_backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor,
    reads: list[Tensor], sizes: Sizes, program: str, kernel: str,
) -> list[Tensor]:  # fmt: skip
    parsed = parse(program)
    with _own_dtypes(q), autograd_inside():
        found = _kernel(kernel, parsed, q, k, v).backward(
            parsed, (q, k, v), reads, sizes, (out, lse), (grad_out, grad_lse)
        )
    return [g.contiguous() for g in found if g is not None]


class _Attention(torch.autograd.Function):
    """The op with its gradients in reverse mode. The reads come last, because they are any number."""

    @staticmethod
    def forward(
        ctx: Any, keys: Any, q: Tensor, k: Tensor, v: Tensor, sizes: list[int], program: str, kernel: str,
        *reads: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        with torch._C._AutoDispatchBelowAutograd():
            args = (q, k, v, list(reads), sizes, program, kernel)
            found: tuple[Tensor, Tensor] = run_kernel(_OP, keys, *args, kernel=_attention)
        ctx.sizes, ctx.program, ctx.kernel = sizes, program, kernel
        ctx.set_materialize_grads(False)  # zeros made by torch would be no DTensors
        ctx.save_for_backward(*found, q, k, v, *reads)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # checkpointing allows this once
        out, lse, q, k, v, *reads = saved
        if torch.is_grad_enabled() or has_tangent((*saved, *grads)) or are_batched(grads):
            found = _differentiated_formula(ctx, (q, k, v), reads, grads)
        else:
            grad_out, grad_lse = grads
            rest = iter(
                _attention_backward(
                    torch.zeros_like(out) if grad_out is None else grad_out,
                    torch.zeros_like(lse) if grad_lse is None else grad_lse,
                    out, lse, q, k, v, reads, ctx.sizes, ctx.program, ctx.kernel,
                )
            )  # fmt: skip
            found = [next(rest) if t.is_floating_point() else None for t in (q, k, v, *reads)]
        return (None, *found[:3], None, None, None, *found[3:])


def _differentiated_formula(
    ctx: Any, operands: tuple[Tensor, Tensor, Tensor], reads: list[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The same gradients by differentiating the formula, so that they can be differentiated themselves."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [t.view_as(t) for t in (*operands, *reads)]  # one tensor may be several of them
        outputs = _formula(own[0], own[1], own[2], own[3:], ctx.sizes, ctx.program)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        results, given = [o for o, _ in pairs], [g for _, g in pairs]
        inputs = [t for t in own if t.requires_grad]
        found = iter(torch.autograd.grad(results, inputs, given, create_graph=again, allow_unused=True))
    return [next(found) if t.requires_grad else None for t in own]


def _formula(
    q: Tensor, k: Tensor, v: Tensor, reads: list[Tensor], sizes: list[int], program: str, _: str = ""
) -> tuple[Tensor, Tensor]:
    """The op in PyTorch's own operations, which have derivatives of every kind; all scores at once."""
    parsed = parse(program)
    check_operands(q, k, v, reads, sizes, parsed)
    with _own_dtypes(q):
        out, lse = KERNELS["reference"].forward(parsed, (q, k, v), reads, sizes)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse


def _autograd(keys: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """Which of the three computes a call: the formula in torch.func's transformations and forward mode."""
    tell_dtensor()
    if has_tangent(args) or (is_recorded(args) and is_transformed()):
        return _formula(*args)
    if is_recorded(args):
        q, k, v, reads, sizes, program, *kernel = args
        apply: Callable[..., tuple[Tensor, Tensor]] = _Attention.apply
        return apply(keys, q, k, v, sizes, program, "".join(kernel), *reads)
    found: tuple[Tensor, Tensor] = run_kernel(_OP, keys, *args, kernel=_attention)
    return found


def _batched(size: int, dims: Sequence[Any], args: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """A batch of `torch.vmap` as a part of the op's own batch, where the program does not depend on b and
    the tensors that it reads are the same for the whole batch."""
    parsed = parse(args[5])
    of_reads = dims[3] or []
    nodes = (n for e in parsed.expressions for n in E.walk(e))
    if any(n.op == "var" and n.value == "b" for n in nodes) or any(d is not None for d in of_reads):
        return None
    folded = [
        (t.unsqueeze(0).expand(size, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1)
        for t, d in zip(args[:3], dims[:3], strict=True)
    ]
    out, lse = _OP(*folded, *args[3:])
    own = out.shape[0] // size
    return out.unflatten(0, (size, own)), lse.unflatten(0, (size, own))


@declare(fake=_attention_fake, derivatives=_autograd, batched=_batched, plain=True)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, reads: list[Tensor], sizes: Sizes, program: str, kernel: str = ""
) -> tuple[Tensor, Tensor]:
    parsed = parse(program)
    check_operands(q, k, v, reads, sizes, parsed)
    chosen = _kernel(kernel, parsed, q, k, v)
    with _NOTHING if not torch.is_grad_enabled() else torch.no_grad(), _own_dtypes(q):
        out, lse = chosen.forward(parsed, (q, k, v), reads, sizes)
        if not out.transpose(1, 2).is_contiguous() or out._is_view():  # `empty_result` did not make it
            out = kernels.empty_result(out, tuple(out.shape)).copy_(out)
        return out, lse.contiguous()


_OP = torch.ops.attngraph.attention.default


@declare(
    fake=lambda a: torch.empty((), dtype=torch.int64, device=a.device),
    tags=(torch.Tag.nondeterministic_seeded,),
)
def _seed(device: torch.device | None = None) -> Tensor:
    """A 32-bit seed drawn from the default generator of a device (None: the CPU), which `torch.manual_seed`
    seeds. On a GPU the CPU does not wait for it, and each replay of a captured graph draws its own."""
    return torch.randint(0, 1 << 32, (), dtype=torch.int64, device=device)


CHUNK = 64
"""Queries whose scores are computed at once under a causal mask."""


@declare()
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, reads: list[Tensor], sizes: Sizes, program: str
) -> Tensor:
    parsed = parse(program)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scaled = q if parsed.scale in (None, 1.0) else q * parsed.scale
    out = _causal(scaled, k, v) if parsed.keeps else scaled @ (k.mT @ v)
    if not parsed.changes_weights:
        return out
    tile = Tile((0, q.shape[0]), (0, q.shape[1]), (0, q.shape[2]), (0, 1))
    env = Environment(tile, reads, sizes, out.dtype, out.device)
    return out * evaluate.weights(parsed, out.new_ones((1, 1, 1, 1)).expand(*q.shape[:3], 1), env)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: explicit scores within a chunk, a running sum of k v^T over earlier chunks."""
    tokens, keys = q.shape[2], k.shape[2]
    longest: Any = torch.sym_max(tokens, keys)  # `max` would ask which it is
    chunks = (longest + CHUNK - 1) // CHUNK
    q, k, v = (
        F.pad(t, (0, 0, 0, chunks * CHUNK - t.shape[2])).view(*t.shape[:2], chunks, CHUNK, t.shape[3])
        for t in (q, k, v)
    )
    within = (q @ k.mT).tril() @ v
    states = k.mT @ v
    before = F.pad(states.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))
    return (within + q @ before).flatten(2, 3)[:, :, :tokens]
