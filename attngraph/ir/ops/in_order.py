"""Products and log-probabilities with the same bits whatever other rows there are, and wherever they lie.

`grouped_in_order` multiplies the rows of each group by the group's own matrix, as torch's `grouped_mm` does
for the experts of a mixture: rows `ends[g - 1] .. ends[g] - 1` of x `[N, D]` by weight[g], `[D, W]`. Every
product is a token program `in order` (`ir/language/token_program.py`), so it has the sums that layers have.
"""

import functools
import itertools

import torch
from torch import Tensor

from attngraph.ir.dtypes import FLOATS
from attngraph.ir.language.score import IN_ORDER
from attngraph.ir.language.token_program import parse
from attngraph.ir.ops.cached_attention import numbers_of
from attngraph.ir.ops.declare import INSTEAD, declare, with_value
from attngraph.ir.ops.token_program import is_supported


@functools.cache
def _product(depth: int, width: int, dtype: str, turned: bool) -> str:
    """Of a token `[D]` and a weight, `[W, D]`, or `[D, W]` if it is turned."""
    weight, place = (f"{depth}, {width}", "j, i0") if turned else (f"{width}, {depth}", "i0, j")
    word = "" if dtype == "float32" else f" {dtype}"
    return "\n".join((
        f"r0[t, {depth}]{word}", f"r1[{weight}]{word}", f"r2[i0 < {depth}] = r0[t, i0]",
        f"r3[i0 < {width}] = sum[j < {depth}] r2[j] * r1[{place}]", f"return r3[t, {width}]{word}", IN_ORDER,
    ))  # fmt: skip


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """`[N, D]` times `[D, W]`, which may be the transpose of a contiguous matrix."""
    depth, width = weight.shape
    turned = weight.is_contiguous()
    dtype = str(x.dtype).removeprefix("torch.")
    given = [x, weight if turned else weight.mT.contiguous()]
    found: Tensor = torch.ops.attngraph.token_program(given, _product(depth, width, dtype, turned))[0]
    return found


def product_in_order(x: Tensor, weight: Tensor) -> Tensor:
    """`[B, H, S, D]` times `[G, D, W]`, each group of heads by its own."""
    batch, heads, tokens, depth = x.shape
    rows = x.transpose(0, 1).reshape(weight.shape[0], -1, depth)
    found = torch.stack([_times(own, matrix) for own, matrix in zip(rows, weight, strict=True)])
    return found.view(heads, batch, tokens, -1).transpose(0, 1)


@declare(fake=lambda a: a.x.new_empty((a.x.shape[0], a.weight.shape[2])), derivatives=INSTEAD, plain=True)
def grouped_in_order(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    parts = [0, *numbers_of(ends)]
    times = torch.mm if x.dtype == torch.float64 else _times
    found = [times(x[a:b], w) for (a, b), w in zip(itertools.pairwise(parts), weight, strict=True) if b > a]
    return torch.cat([*found, x.new_zeros((x.shape[0] - parts[-1], weight.shape[2]))])


@functools.cache
def _shares(width: int, dtype: str) -> str:
    """The largest of a token's logits, and the logarithm of the sum of all exponentials beside it."""
    word = "" if dtype == "float32" else f" {dtype}"
    return "\n".join((
        f"r0[t, {width}]{word}", f"r1[] = amax[j < {width}] r0[t, j]",
        f"r2[] = sum[j < {width}] exp(r0[t, j] - r1[])", "r3[] = log(r2[])", "return r1[t], r3[t]", IN_ORDER,
    ))  # fmt: skip


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each token under its logits, `[...]`, in float32 (of float64 logits in float64).

    With `consistent=True`, tokens that were sampled and the same tokens in a training step have equal logits,
    and so the same bits here: the ratio of their probabilities is exactly 1. Gradients are those of
    `log_softmax`.

    Args:
        logits: `[..., V]`. tokens: int64 `[...]`, on the same device.

    Raises:
        ValueError: the shapes do not go together. BackendError: there is no C compiler, on a CPU.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"logits are [..., vocabulary] and tokens [...]; found {list(logits.shape)} and "
            f"{list(tokens.shape)}."
        )
    picked = logits.detach().gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    text = _shares(logits.shape[-1], str(logits.dtype).removeprefix("torch."))
    has_order = logits.dtype in FLOATS and logits.numel() > 0
    if not has_order or not (logits.is_cpu or is_supported(parse(text), logits.device.type)):
        value = torch.log_softmax(logits.detach(), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    else:
        rows = logits.detach().reshape(-1, logits.shape[-1])
        top, rest = torch.ops.attngraph.token_program([rows], text)
        value = picked.float() - top.view(tokens.shape) - rest.view(tokens.shape)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return value
    wide = logits if logits.dtype == torch.float64 else logits.float()
    derived = torch.log_softmax(wide, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return with_value(derived, value)
