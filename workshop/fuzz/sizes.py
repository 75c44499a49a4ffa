"""Functions with attention over tokens that data, slices, chunks and tiles choose, at sizes down to none and
in odd dtypes: eager is the truth, and nothing may end in an error of the compiler.

A function is four statements: which tokens there are, what they are multiplied by, the attention, and what
becomes of it. A number stands for the same function always.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import torch
from torch import Tensor

import attngraph


def _of(text: str) -> list[str]:
    return [part.strip() for part in text.split(";;")]


CHOSEN = _of("""
    x ;; x[:, w] ;; x[w[: len(x)]] ;; x[:, w.nonzero()[:, 0]] ;; x[:, torch.where(w)[0]] ;; x[:1, w]
    ;; x[w[: len(x)]][:, w] ;; x[0].masked_select(w[:, None]).view(1, -1, 8) ;; x[:, ~w] ;; x[:, 1:]
    ;; x[:, 5:] ;; x[:, -3:] ;; x[:, ::2] ;; x[:, 2:2] ;; x[:0] ;; torch.cat([x[:, w], x[:, ~w]], 1)
    ;; torch.cat([x[:, :1], x[:, w]], 1) ;; x[:, (x[0, :, 0] * 2).long().clamp(0, 0).unique()]
    ;; x.repeat_interleave(2, 1) ;; x[0].repeat_interleave(w.long(), 0)[None] ;; x[:, w][:, 1:]
    ;; F.pad(x, (0, 0, 0, -x.shape[1] % 4)) ;; x.narrow(1, 0, counted(w, x.shape[1])) ;; x.flip(1)
    ;; x[:, torch.argsort(w.long())] ;; x[:, torch.randperm(1)] ;; x.expand(2, *x.shape).flatten(0, 1)
    ;; x[x[:, 0, 0] > 0] ;; x[:, :, :0] ;; x.index_select(1, w.nonzero().flatten()) ;; x.roll(1, 1)
    ;; torch.stack([x, x], 1).flatten(0, 1) ;; x[:, : x.shape[1] // 2] ;; x.chunk(2, 1)[0]
    ;; x.split(3, 1)[-1] ;; x.tensor_split(2, 1)[1] ;; x[:, w].contiguous() ;; x.transpose(0, 1)
    ;; x[:, x.shape[1] - 1 :]
""")
MADE = _of("""
    t, t, t ;; t, t[:, :1], t[:, :1] ;; t[:, :1], t, t ;; t[:, -1:], t, t ;; t * 2, t.tanh(), t
    ;; (t @ W).chunk(3, -1) ;; (t @ W).split(8, -1) ;; t.to(odd), t.to(odd), t.to(odd)
    ;; t, t.to(odd).to(t.dtype), t ;; t.double(), t.double(), t.double() ;; t[..., :4], t[..., 4:], t
    ;; t, torch.cat([t, t], 1), torch.cat([t, t], 1) ;; t[:, :2], t[:, 2:], t[:, 2:] ;; t, t, t.long()
    ;; t, t, t > 0 ;; t, t, t[..., :1] ;; t, t, t[..., 0] ;; t.unsqueeze(1), t.unsqueeze(1), t.unsqueeze(1)
    ;; t[0], t[0], t[0] ;; heads(t), heads(t), heads(t) ;; heads(t), heads(t)[:, :1], heads(t)[:, :1]
    ;; t.mT, t.mT, t.mT ;; t.half(), t.half(), t.half() ;; t.bfloat16(), t.bfloat16(), t.bfloat16()
    ;; t, t, t.cumsum(1) ;; t[:, :0], t, t ;; t, t[:, :0], t[:, :0]
""")
ATTENDED = _of("""
    (q @ k.mT).softmax(-1) @ v ;; F.scaled_dot_product_attention(q, k, v) ;; causal(q @ k.mT).softmax(-1) @ v
    ;; F.scaled_dot_product_attention(q, k, v, is_causal=True) ;; tiles(q, k).softmax(-1) @ v
    ;; tril(q, k) @ v ;; tiles(q, k, 2).softmax(-1) @ v
    ;; torch.cat([(a @ k.mT).softmax(-1) @ v for a in q.split(4, -2)], -2)
    ;; torch.cat([(a @ k.mT).softmax(-1) @ v for a in q.chunk(3, -2)], -2) ;; online(q, k, v, 4)
    ;; online(q, k, v, 3) ;; written(q, k).softmax(-1) @ v ;; written(q, k, 2).softmax(-1) @ v ;; two(q, k, v)
    ;; (q @ k.mT).softmax(-2).mT @ q ;; (q @ k.mT / 64).exp() / (q @ k.mT / 64).exp().sum(-1, True) @ v
    ;; (q @ k.mT).masked_fill(mask(q, k), -torch.inf).softmax(-1) @ v
    ;; (q @ k.mT + bias(q, k)).softmax(-1) @ v ;; torch.einsum('...qd,...kd->...qk', q, k).softmax(-1) @ v
    ;; (q @ k.mT).softmax(-1)[..., :3] @ v[..., :3, :]
    ;; (q @ k.mT).topk(1, -1).values.softmax(-1) @ v[..., :1, :]
    ;; (q @ k.mT)[..., 1:].softmax(-1) @ v[..., 1:, :]
    ;; (q[..., None, :] * k[..., None, :, :]).sum(-1).softmax(-1) @ v
    ;; torch.cat([q @ k.mT, q @ k.mT], -1).softmax(-1) @ torch.cat([v, v], -2) ;; (q @ k.mT).sigmoid() @ v
    ;; (q @ k.mT).softmax(-1).unflatten(-2, (-1, 1)).flatten(-3, -2) @ v ;; chunked(q, k, v)
    ;; (q @ k.mT).relu() @ v
""")
AFTER = _of("""
    o ;; o.sum(-2) ;; o[..., :1, :] ;; o, (q @ k.mT).softmax(-1)
    ;; torch.zeros_like(o).index_add(-2, places(o), o) ;; torch.cat([o, o], -2) ;; o.flatten(-2) ;; o.to(odd)
    ;; o.mean() ;; o @ o.mT ;; (o @ o.mT).softmax(-1) @ o ;; o.transpose(-2, -1).reshape(-1)
    ;; o[..., 2:, :].amax() if o.shape[-2] > 5 else o ;; torch.kron(o, o[..., :1, :])
    ;; o.unsqueeze(0).expand(2, *o.shape) ;; o.masked_fill(o > 0, 0.0) ;; put(o) ;; o[o[..., 0] > 0]
    ;; o.nonzero().sum() ;; o.argmax(-1) ;; o.norm(dim=-1) ;; [o, {'p': o * 2}]
    ;; o.split(1, -2)[0] ;; o.isnan().any() ;; o.as_strided(o.shape[:1], (1,))
    ;; (o + 1)[..., 1:, :].as_strided(o.shape[:1], (2,))
""")
SIZES = ((2, 9), (3, 6), (2, 1), (1, 9), (1, 1), (0, 6), (2, 0), (0, 0), (2, 17), (4, 4))

TEXT = """
def counted(w, most):
    n = w.sum().item()
    torch._check(n >= 0)
    torch._check(n <= most)
    return n
def heads(t): return t.unflatten(-1, (2, -1)).transpose(1, 2)
def causal(s): return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
def tril(q, k): return (q @ k.mT).tril()
def mask(q, k): return torch.arange(k.shape[-2]) > torch.arange(q.shape[-2])[:, None] + 2
def bias(q, k): return (torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]).to(q.dtype) / 9
def tiles(q, k, n=4):
    rows = [torch.cat([a @ b.mT for b in k.split(n, -2)], -1) for a in q.split(n, -2)]
    return torch.cat(rows, -2)
def written(q, k, n=4):
    s = q.new_zeros(*q.shape[:-1], k.shape[-2])
    for i in range(0, q.shape[-2], n):
        for j in range(0, k.shape[-2], n):
            s[..., i : i + n, j : j + n] = q[..., i : i + n, :] @ k[..., j : j + n, :].mT
    return s
def online(q, k, v, n):
    m, l, o = q.new_full((*q.shape[:-1], 1), -torch.inf), 0, 0
    for a, b in zip(k.split(n, -2), v.split(n, -2)):
        s = q @ a.mT
        new = torch.maximum(m, s.amax(-1, True))
        p, r = (s - new).exp(), (m - new).exp()
        m, l, o = new, l * r + p.sum(-1, True), o * r + p @ b
    return o / l
def two(q, k, v):
    n = k.shape[-2] // 2
    a, b = q @ k[..., :n, :].mT, q @ k[..., n:, :].mT
    m = torch.maximum(a.amax(-1, True), b.amax(-1, True))
    a, b = (a - m).exp(), (b - m).exp()
    return (a @ v[..., :n, :] + b @ v[..., n:, :]) / (a.sum(-1, True) + b.sum(-1, True))
def chunked(q, k, v, n=4):
    more = (0, 0, 0, -q.shape[-2] % n)
    q, k, v = (F.pad(t, more).unflatten(-2, (-1, n)) for t in (q, k, v))
    return (q @ k.mT).softmax(-1) @ v
def places(o): return torch.arange(o.shape[-2]).flip(0)
def put(o):
    out = torch.zeros_like(o)
    out[..., : o.shape[-2] // 2, :] = o[..., o.shape[-2] // 2 * 1 : o.shape[-2] // 2 * 2, :]
    return out
def function(x, w):
    t = {chosen}
    q, k, v = {made}
    o = {attended}
    return {after}
"""


def text_of(number: int) -> str:
    """The statements of one function."""
    chosen = random.Random(number)
    keys = ("chosen", "made", "attended", "after")
    parts = dict(zip(keys, (chosen.choice(pool) for pool in (CHOSEN, MADE, ATTENDED, AFTER)), strict=True))
    text = TEXT
    for key, part in parts.items():
        text = text.replace(f"{{{key}}}", part)
    return text


def check(number: int) -> str:
    """What is wrong with one function in a few calls; "" if nothing."""
    chosen = random.Random(number)
    odd = chosen.choice(("float64", "float16", "bfloat16", "int64", "int8", "uint8", "bool", "complex64"))
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "odd": getattr(torch, odd)}
    space["W"] = torch.randn(8, 24, generator=torch.Generator().manual_seed(0)) / 3
    exec(compile(text_of(number), f"sizes_{number}.py", "exec"), space)
    asked = None if number % 5 == 4 else 0  # by default small calls run the model itself, but are traced too
    compiled = attngraph.compile(space["function"], min_scores=asked)
    faults = _Faults()
    logger = logging.getLogger("attngraph")
    logger.addHandler(faults)
    try:
        for place in range(3):
            rows, tokens = chosen.choice(SIZES)
            torch.manual_seed(place)
            x, w = torch.randn(rows, tokens, 8), torch.rand(tokens) < chosen.choice((0.0, 0.5, 0.5, 1.0))
            gradients = chosen.random() < 0.3
            want, found = (_answer(f, x, w, gradients) for f in (space["function"], compiled))
            narrow = any(
                word in text_of(number).split("def function")[1] for word in ("odd", "half", "bfloat16")
            )
            wrong = _difference(found, want, narrow)
            if wrong and not _is_rounding(found, want, _answer(space["function"], x.double(), w, gradients)):
                return f"call {place} of ({rows}, {tokens}): {wrong}"
            told = [m.reason for m in compiled.report.missed] if getattr(compiled, "report", None) else []
            faults.found += [reason for reason in told if "report it" in reason]
            if faults.found:
                return f"call {place} of ({rows}, {tokens}): {faults.found[0]}"
    finally:
        logger.removeHandler(faults)
    return ""


class _Faults(logging.Handler):
    """The errors that the compiler logs of itself."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"{record.getMessage()}: {record.exc_info[1] if record.exc_info else ''}")


def _answer(function: Any, x: Tensor, w: Tensor, gradients: bool) -> Any:
    """What the function gives, and the gradient of its sum; or its exception."""
    x = x.clone().requires_grad_(gradients)
    try:
        torch.manual_seed(0)
        found = [t for t in torch.utils._pytree.tree_leaves(function(x, w)) if isinstance(t, Tensor)]
        summed = [t.double().nan_to_num().sum() for t in found if t.requires_grad and not t.is_complex()]
        grads = torch.autograd.grad(sum(summed), x) if summed else ()  # type: ignore[arg-type]
        return [t.detach() for t in (*found, *grads)]
    except Exception as problem:
        return problem


def _is_rounding(found: Any, want: Any, exact: Any) -> bool:
    """Whether all three are answers alike, and `found` is at most twice as far from the exact as eager's."""
    every = (found, want, exact)
    if any(isinstance(one, Exception) for one in every) or len({len(one) for one in every}) > 1:
        return False
    for a, b, c in zip(found, want, exact, strict=True):
        if not a.shape == b.shape == c.shape or a.dtype != b.dtype or not a.is_floating_point():
            return False
        error, allowed = ((t.double() - c).abs().max() for t in (a, b))
        if not error <= 2 * allowed:
            return False
    return True


def _difference(found: Any, want: Any, narrow: bool) -> str:
    """How two answers differ; `narrow`: something in them was of 16 bits."""
    if isinstance(want, Exception):
        return "" if isinstance(found, Exception) else f"only eager raises {type(want).__name__}: {want}"
    if isinstance(found, Exception):
        return f"{type(found).__name__}: {found}"
    for a, b in zip(found, want, strict=False):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
        rough = 0.2 if narrow else 1e-3
        if a.is_floating_point() and not torch.allclose(a.double(), b.double(), rough, rough, equal_nan=True):
            return f"off by {(a.double() - b.double()).abs().max():.3g}"
    return "" if len(found) == len(want) else f"{len(found)} results instead of {len(want)}"
