"""Every element rule against eager PyTorch: one element of an op's result, lifted to a formula over the
inputs and worked out by plain Python at every index, is what eager computes there.

A row is (op, function, inputs). It is traced as capture traces a model, once with fixed sizes and, unless
its sizes must be fixed, once with every dimension dynamic. Ops that torch takes apart while tracing are
called in a graph built by hand, so that each registered rule is met.
"""

import dataclasses
import functools
import itertools
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import PARTS, RULES

aten = torch.ops.aten


def f(*shape: int, seed: int = 0) -> Tensor:
    """Floating values, none of them near zero."""
    drawn = torch.rand(
        shape, generator=torch.Generator().manual_seed(seed + 17 * len(shape)), dtype=torch.float64
    )
    sign = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64).sign()
    return (0.25 + drawn) * sign


def pos(*shape: int) -> Tensor:
    return f(*shape, seed=3).abs()


def i(*shape: int, low: int = -4, high: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def m(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


@dataclasses.dataclass(frozen=True)
class Row:
    """`op` is the rule that is meant to be met; `by_hand` builds the graph from the op itself and its
    arguments; `fixed` rows are traced with fixed sizes only."""

    op: str
    run: Callable[..., Any] | None
    inputs: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    fixed: bool = False
    part: int | None = None

    @property
    def by_hand(self) -> bool:
        return self.run is None


def traced(op: str, run: Callable[..., Any], *inputs: Tensor, fixed: bool = False) -> Row:
    return Row(op, run, inputs, fixed=fixed)


def hand(op: str, *args: Any, part: int | None = None, **kwargs: Any) -> Row:
    return Row(op, None, args, tuple(kwargs.items()), True, part)


def pick(extent: int, *shape: int, seed: int = 0) -> Tensor:
    return i(*shape, low=0, high=extent, seed=seed)


def assigned(x: Tensor, where: Any, values: Tensor) -> Tensor:
    x = x.clone()
    x[where] = values
    return x


T = traced
H = hand
ROWS: list[Row] = [
    # --- copies and casts ---
    T("clone", lambda x: x.clone(), f(2, 3)),
    T("contiguous", lambda x: x.mT.contiguous(), f(2, 3)),
    H("contiguous.default", f(2, 3)),
    H("alias.default", f(2, 3)),
    H("lift_fresh.default", f(2)),
    H("lift_fresh_copy.default", f(2)),
    H("clone.default", f(2, 3)),
    H("type_as.default", i(3), f(3)),
    H("type_as.default", f(3), i(3)),
    H("to.dtype", f(3), torch.float32),
    H("to.dtype", m(3), torch.float64),
    H("to.dtype", f(3), torch.bool),
    H("to.dtype", i(5), torch.bool),
    H("to.dtype", m(5), torch.int64),
    H("to.other", f(3), i(3)),
    H("to.dtype_layout", i(3), dtype=torch.float64),
    H("to.device", i(3), "cpu", torch.float64),
    T("_to_copy", lambda x: x.to(torch.int64), 3 * f(3, 4)),
    T("_to_copy", lambda x: (3 * x).int().float(), f(3, 4)),
    T("_to_copy", lambda x: x.bool().double(), i(4, low=-1, high=2)),
    H("_to_copy.default", m(3), dtype=torch.float64),
    # --- views ---
    T("view", lambda x: x.view(x.shape[0], x.shape[1], 2, 3), f(2, 4, 6)),
    T("view", lambda x: x.view(x.shape[0] * x.shape[1], 6), f(2, 4, 6)),
    T("view", lambda x: x.reshape(-1), f(2, 3, 4)),
    T("view", lambda x: x.reshape(4, 3, 2), f(2, 3, 4), fixed=True),
    T("view", lambda x: x.reshape(8, 3), f(6, 4), fixed=True),
    T("view", lambda x: x.reshape(3, 8), f(4, 6), fixed=True),
    T("view", lambda x: x.reshape(2, 5, 6), f(10, 6), fixed=True),
    T("view", lambda x: x.reshape(9, 4), f(6, 6), fixed=True),
    T("view", lambda x: x.reshape(1, 12, 1), f(3, 1, 4), fixed=True),
    T("view", lambda x: x.view(x.shape[0] * 2, 3), f(5, 6)),
    T("view", lambda x: x.view(x.shape[0], 1, -1, 1), f(3, 4)),
    T("view", lambda x: x.reshape(()), f(1, 1), fixed=True),
    T("view", lambda x: x.mT.reshape(x.shape[0], x.shape[1]), f(3, 4)),
    T("view", lambda x: x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1), f(2, 3, 4, 2)),
    T("view", lambda x: x.view(1, -1).repeat(1, 2), f(4)),
    T("view", lambda x: x.unsqueeze(0).repeat(2, 3), f(4)),
    T("view", lambda x: x.repeat(3).view(3, -1), f(4)),
    T("view", lambda x: x.repeat(3).view(-1, 3), f(4)),
    T("view", lambda x: x.repeat(2, 2).view(-1), f(2, 3)),
    T("view", lambda x: x.repeat(1, 3).unsqueeze(1).squeeze(1), f(2, 3)),
    T("view", lambda x: x.repeat(2, 1).reshape(1, -1, 3).squeeze(0), f(2, 3), fixed=True),
    T("view", lambda x: x.repeat_interleave(3, 0).view(-1, 1)[:, 0], f(4)),
    T("view", lambda x: x.repeat(2)[1:].view(1, -1), f(4)),
    T("view", lambda x: x.flip(0).view(2, 3), f(6), fixed=True),
    T("view", lambda x: F.pad(x, (1, 1)).view(2, 3).mT.reshape(-1), f(4), fixed=True),
    T("view", lambda x: x.flatten(1), f(2, 3, 4)),
    T("view", lambda x: x.flatten(), f(2, 3)),
    T("view", lambda x: x.unflatten(1, (2, -1)), f(2, 6), fixed=True),
    T("view", lambda x: torch.cat([x, x], 1).view(x.shape[0], 2, -1), f(2, 3)),
    H("view.default", f(6, 4), [8, 3]),
    H("_unsafe_view.default", f(2, 6), [2, 2, 3]),
    H("reshape.default", f(2, 6), [4, 3]),
    H("flatten.using_ints", f(2, 3, 4, 2), 1, 2),
    H("flatten.using_ints", f(2, 3), -2),
    H("unflatten.int", f(2, 12), -1, [3, 4]),
    H("view_as.default", f(6), f(2, 3)),
    H("reshape_as.default", f(6), f(3, 2)),
    H("squeeze.default", f(1, 3, 1, 2)),
    H("squeeze.dim", f(2, 1, 3), -2),
    H("squeeze.dim", f(2, 3), 0),
    H("squeeze.dims", f(1, 3, 1, 2), [0, -2]),
    T("unsqueeze", lambda x: x.unsqueeze(1), f(2, 3)),
    H("unsqueeze.default", f(2, 3), -1),
    H("unsqueeze.default", f(2, 3), 0),
    # --- permutations ---
    T("transpose", lambda x: x.transpose(0, -1), f(2, 3, 4)),
    T("permute", lambda x: x.permute(2, 0, 1), f(2, 3, 4)),
    H("permute.default", f(2, 3, 4), [-1, 0, -2]),
    H("transpose.int", f(2, 3, 4), -2, -1),
    H("t.default", f(2, 3)),
    H("t.default", f(3)),
    H("numpy_T.default", f(2, 3, 4)),
    H("mT.default", f(2, 3, 4)),
    H("adjoint.default", f(2, 3, 4)),
    H("swapaxes.default", f(2, 3, 4), 0, -1),
    H("swapdims.default", f(2, 3, 4), 1, 2),
    H("movedim.int", f(2, 3, 4), 0, -1),
    H("movedim.int", f(2, 3, 4), -1, 0),
    H("movedim.intlist", f(2, 3, 4, 5), [0, -1], [2, 0]),
    H("moveaxis.int", f(2, 3, 4), 2, 0),
    H("movedim.intlist", f(2, 3, 4, 5), [3, 1], [0, 1]),
    # --- expansion, slices, selection ---
    T("expand", lambda x: x.expand(5, -1, 3), f(2, 1)),
    H("expand.default", f(1, 3), [2, 4, 3]),
    H("expand_as.default", f(3, 1), f(3, 4)),
    H("broadcast_to.default", f(3, 1), [2, 3, 4]),
    T("slice", lambda x: x[:, 1:3], f(2, 5)),
    T("slice", lambda x: x[..., -2:], f(2, 5), fixed=True),
    T("slice", lambda x: x[1:7:2], f(9)),
    T("slice", lambda x: x[::3], f(8)),
    T("slice", lambda x: x[:-1], f(5)),
    T("slice", lambda x: x[-3:-1], f(5), fixed=True),
    T("slice", lambda x: x[-9:], f(5), fixed=True),
    T("slice", lambda x: x[2:, 1:][:, ::2], f(5, 6)),
    T("slice", lambda x: x[x.shape[0] - 1 :], f(5)),
    T("slice", lambda x, y: x[: y.shape[0]], f(6), f(4)),
    H("slice.Tensor", f(7), 0, -6, -1, 2),
    H("slice.Tensor", f(2, 7), -1, 2, 100, 3),
    H("slice.Tensor", f(4)),
    H("slice.Tensor", f(5), 0, None, 3),
    H("narrow.default", f(5, 2), 0, 1, 3),
    H("narrow.default", f(5, 2), -2, -3, 2),
    T("narrow", lambda x: x.narrow(1, 1, 2), f(2, 4)),
    T("select", lambda x: x[:, -1], f(2, 3)),
    T("select", lambda x: x[1], f(2, 3)),
    H("select.int", f(2, 3, 4), -2, -3),
    T("select", lambda x: x[0, 1], f(2, 3)),
    # --- splits ---
    *[H("split.Tensor", f(2, 7), 3, -1, part=p) for p in range(3)],
    *[H("split.sizes", f(6, 2), [1, 3, 2], part=p) for p in range(3)],
    *[H("split_with_sizes.default", f(2, 6), [1, 3, 2], 1, part=p) for p in range(3)],
    *[H("chunk.default", f(7, 2), 3, part=p) for p in range(3)],
    H("unsafe_split.Tensor", f(6), 4, part=1),
    H("unsafe_chunk.default", f(2, 5), 2, 1, part=1),
    *[H("tensor_split.sections", f(7), 3, part=p) for p in range(3)],
    *[H("unbind.int", f(2, 3, 2), 1, part=p) for p in range(3)],
    H("unbind.int", f(2, 3), -1, part=2),
    T("chunk", lambda x: x.chunk(3, -1)[1], f(2, 6)),
    T("split", lambda x: x.split(2, 1)[2], f(2, 5), fixed=True),
    T("unbind", lambda x: x.unbind(0)[1], f(3, 2), fixed=True),
    T("split", lambda x: torch.cat(x.chunk(2, -1)[::-1], -1), f(2, 6)),
    T("tensor_split", lambda x: x.tensor_split(3)[1], f(8), fixed=True),
    # --- repetition, joins ---
    T("repeat", lambda x: x.repeat(2, 3), f(2, 3)),
    T("repeat", lambda x: x.repeat(2, 1, 3), f(2, 3)),
    T("repeat", lambda x: x.repeat(4, 1), f(1, 3)),
    T("repeat", lambda x: x.repeat(3), f(1), fixed=True),
    H("tile.default", f(2, 3), [2]),
    H("tile.default", f(3), [2, 2]),
    H("repeat.default", f(3), [2, 2]),
    T("repeat_interleave", lambda x: x.repeat_interleave(3, dim=1), f(2, 3)),
    T("repeat_interleave", lambda x: x.repeat_interleave(2), f(2, 3)),
    H("repeat_interleave.self_int", f(2, 3), 2, -1),
    H("repeat_interleave.self_int", f(2, 3), 2),
    T("flip", lambda x: x.flip(0, -1), f(2, 3, 4)),
    T("roll", lambda x: x.roll(1, 1), f(2, 3)),
    T("roll", lambda x: x.roll((-2, 1), (1, 0)), f(2, 3), fixed=True),
    T("cat", lambda x, y, z: torch.cat([x, y, z], 1), f(2, 3), f(2, 1, seed=1), f(2, 2, seed=2)),
    T("cat", lambda x, y: torch.cat([x, y], -1), f(2, 3), f(2, 3, seed=1)),
    T("cat", lambda x: torch.cat([x, x.new_zeros(0), x]), f(3)),
    H("concat.default", [f(2, 3), f(1, 3)]),
    H("copy.default", f(2, 3), f(2, 3, seed=1)),
    H("copy.default", f(2, 3), f(3, seed=1)),
    T("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 1, 2), f(2, 5), f(2, 3, seed=1)),
    T("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 0, 1, 3), f(4, 2), f(2, 2, seed=1)),
    T(
        "slice_scatter",
        lambda x, y: torch.slice_scatter(x, y, 0, -3, -1),
        f(4, 2),
        f(2, 2, seed=1),
        fixed=True,
    ),
    T(
        "slice_scatter",
        lambda x, y: torch.slice_scatter(x, y, -1, 1, 6, 2),
        f(2, 6),
        f(2, 3, seed=1),
        fixed=True,
    ),
    T("select_scatter", lambda x, y: torch.select_scatter(x, y, 1, 2), f(2, 5), f(2, seed=1)),
    T("select_scatter", lambda x, y: torch.select_scatter(x, y, 0, -1), f(3, 5), f(5, seed=1)),
    T("index_fill", lambda x: x.index_fill(-1, torch.tensor([0, -2]), -7.0), f(2, 5)),
    T("index_fill", lambda x: x.index_fill(0, torch.tensor(1), x.sum()), f(3, 2)),
    T("index_fill", lambda x: x.index_fill(1, torch.tensor([3, 1, 1]), True) > 0, f(2, 5)),
    T("index_fill", lambda x: x.index_fill(1, torch.arange(5, 0, -2), 0.0), f(2, 6), fixed=True),
    T("index_fill", lambda x: x.index_fill(1, torch.arange(x.shape[1] - 1), 0.0), f(2, 6)),
    # --- assignments ---
    *[
        T("index_put", lambda x, v, where=where: assigned(x, where, v), f(4, 5, 6), values)
        for where, values in [
            ((..., [0, -2, 2]), f()),
            ((slice(None), [0, -2, 2]), f(3, 6, seed=1)),
            ((slice(1, 3), [1, 3, 0]), f(2, 1, 6, seed=1)),
            (([1, -1, 0], [2, 0, 0]), f(3, 6, seed=1)),
            (([1, -1, 0], slice(None), [2, 0, 0]), f(3, 5, seed=1)),
            (([[1], [-1]], slice(1, 4), [2, 0, 4]), f(2, 3, 3, seed=1)),
            ((slice(None, None, 2), None, [4, 1], 3), f()),
            ((None, [3, 1]), f(1, 2, 5, 6, seed=1)),
            ((2, [], 1), f()),
        ]
    ],
    *[
        T(
            "index_put",
            lambda x, v, *p, d=d: assigned(x, (slice(None),) * d + p, v),
            f(4, 5, 6),
            v,
            *p,
            fixed=fixed,
        )
        for d, v, p, fixed in [
            (1, f(3, 1, seed=1), (torch.tensor([0, 4, -2]),), True),
            (0, f(2, 3, 6, seed=1), (torch.tensor([[1], [-2]]), torch.tensor([4, 0, 2])), True),
            (0, f(), (m(4, 5, 6),), False),
            (1, f(4, 1, seed=1), (m(5, 6),), False),
            (1, f(1, 6, seed=1), (m(5),), False),
            (2, f(1), (m(6),), False),
        ]
    ],
    *[
        T(
            "index_put",
            lambda x, v, where=where: assigned(x, where(*x.shape), v),
            f(6, 6),
            values,
            fixed=fixed,
        )
        for where, values, fixed in [
            (lambda n, _: (torch.arange(n), torch.arange(n)), f(6, seed=1), False),
            (lambda n, _: (torch.arange(n), torch.arange(n - 1, -1, -1)), f(6, seed=1), False),
            (lambda n, _: (torch.arange(n)[:, None], torch.arange(0, n, 2)), f(6, 3, seed=1), False),
            (lambda n, _: (slice(None), torch.arange(n - 2, 0, -3)), f(6, 2, seed=1), True),
            (lambda n, _: (torch.arange(n - 1), torch.arange(n - 1) + 1), f(), False),
            (lambda n, _: torch.arange(3) - 5, f(3, 1, seed=1), False),
            (lambda n, _: torch.arange(3) - 1, f(3, 1, seed=1), True),
            (lambda n, _: ([4, 1], torch.arange(n)[:, None]), f(6, 2, seed=1), False),
            (lambda n, _: torch.triu_indices(n, n, 1).unbind(0), f(), True),
            (lambda n, _: torch.triu_indices(n, n - 2, -1).unbind(0)[::-1], f(), True),
            (lambda n, _: torch.tril_indices(n - 1, n, 2).unbind(0), f(), True),
            (lambda n, _: (torch.tril_indices(n, n)[0], torch.tril_indices(n, n)[1]), f(), True),
            (lambda n, _: (slice(None), torch.triu_indices(3, 3)[1]), f(), True),
        ]
    ],
    *[
        T("index_put", lambda x, v, p=p: x.index_put(p(x.shape[0]), v, accumulate=True), x, v)
        for p, x, v in [
            (lambda n: (torch.tensor([3, 1, 1, -1]),), f(4, 5), f(4, 5, seed=1)),
            (lambda n: (torch.tensor([3, 1, 1, -1]),), i(4, 5), i(5, seed=1)),
            (lambda n: (torch.arange(n), torch.arange(n)), f(4, 5), f(4, seed=1)),
            (lambda n: (torch.arange(n) < 2,), f(4, 5), f(5, seed=1)),
        ]
    ],
    H("index_put.default", m(4, 5), [None, torch.tensor([2, 2, 0])], m(3)),
    H("index_put.default", f(4, 5), [torch.tensor([1, 0, 1, 0], dtype=torch.uint8)], f(5, seed=1)),
    H("cat.default", [f(2, 3), i(1, 3)], 0),
    T("cat", lambda x: torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1), f(2, 6)),
    H("cat.default", [f(2, 0), f(2, 3)], -1),
    T("cat", lambda x: torch.cat([x[1:], x[:1]]), f(5)),
    T("cat", lambda x: torch.cat([x[-2:], x[:-2]]).mT, f(5, 2), fixed=True),
    T("stack", lambda x, y, z: torch.stack([x, y, z], -1), f(2), f(2, seed=1), f(2, seed=2)),
    T("stack", lambda x: torch.stack([x, -x], -1).flatten(-2), f(2, 3)),
    H("stack.default", [f(2, 3), f(2, 3, seed=1)]),
    H("stack.default", [f(2, 3), f(2, 3, seed=1)], -2),
    T("constant_pad_nd", lambda x: F.pad(x, (1, 2)), f(2, 3)),
    T("constant_pad_nd", lambda x: F.pad(x, (1, -1, -1, 2), value=7.0), f(3, 3)),
    H("constant_pad_nd.default", f(2, 3), [-1, 1]),
    H("pad.default", f(2, 3), [1, 0], "constant", 2.5),
    H("pad.default", f(2, 3), [0, 1]),
    T("pad", lambda x: F.pad(x, (1, 0), value=True), m(2, 3)),
    H("constant_pad_nd.default", i(2, 3), [2, 0], -1),
    # --- gathers ---
    T("index", lambda x, p: x[p], f(4, 3), pick(4, 2, 5)),
    T("index", lambda x, p: x[:, p], f(2, 4), pick(4, 3)),
    T("index", lambda x, p, r: x[p, :, r], f(3, 2, 4), pick(3, 5), pick(4, 5)),
    T("index", lambda x, p, r: x[:, p, r], f(2, 3, 4), pick(3, 5), pick(4, 5)),
    T("index", lambda x, p, r: x[p[:, None], r[None, :]], f(3, 4), pick(3, 2), pick(4, 5)),
    T("index", lambda x, p, r: x[:, p[:, None], :, r], f(2, 3, 2, 4), pick(3, 2), pick(4, 3)),
    T("index", lambda x, p: x[p - 4], f(4, 3), pick(4, 5)),
    H("index.Tensor", f(4), [pick(4)]),
    H("index.Tensor", f(4, 3), [None, pick(3)]),
    H("index.Tensor", f(4, 3), [pick(4, 2, 1), i(3, low=-3, high=3)]),
    T("index", lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)], f(5)),
    T("index", lambda x: x[torch.arange(4)[:, None], torch.arange(3)], f(4, 3), fixed=True),
    T("index", lambda x: x[:, (torch.arange(4)[:, None] - torch.arange(4)).abs()], f(2, 4), fixed=True),
    T("index", lambda x: x[(torch.arange(3) - 2)], f(4)),
    T("index", lambda x, p: x[..., p, :], f(2, 4, 2), pick(4, 3)),
    T("index_select", lambda x, p: x.index_select(1, p), f(2, 4), pick(4, 3)),
    H("index_select.default", f(4, 2), 0, torch.tensor(2)),
    H("index_select.default", f(4, 2), -1, pick(2, 3)),
    T("embedding", lambda w, p: F.embedding(p, w), f(5, 3), pick(5, 2, 4)),
    H("embedding.default", f(5, 3), pick(5, 4)),
    T("embedding", lambda w, p: F.embedding(p, w), f(5, 3), pick(5)),
    T("gather", lambda x, p: x.gather(1, p), f(2, 4), pick(4, 2, 3)),
    H("gather.default", f(4, 3), -2, pick(4, 2, 3)),
    T("diff", lambda x: x.diff(), f(2, 5)),
    T("diff", lambda x: x.diff(dim=0), i(4, 2)),
    H("diff.default", i(4), 1, -1, i(1)),
    H("diff.default", i(4, 2), 1, 0, i(2, 2)),
    H("diff.default", m(6)),
    # --- pointwise ---
    *[
        H(f"{n}.default", 2 * f(2, 3))
        for n in (
            "tanh",
            "sigmoid",
            "sin",
            "cos",
            "erf",
            "sign",
            "floor",
            "ceil",
            "trunc",
            "round",
            "exp",
            "exp2",
            "neg",
            "abs",
            "square",
            "relu",
            "reciprocal",
            "isnan",
        )
    ],
    *[H(f"{n}.default", 2 * f(2, 3)) for n in ("silu", "expm1", "log_sigmoid", "leaky_relu", "hardtanh")],
    *[H(f"{n}.default", f(2, 3)) for n in ("erfc", "tan", "sinh", "cosh", "asinh", "atan", "sgn", "sinc")],
    *[H(f"{n}.default", f(2, 3) / 9) for n in ("asin", "acos", "atanh")],
    *[H(f"{n}.default", 4 * f(2, 3)) for n in ("celu", "mish", "selu", "relu6", "hardsigmoid", "hardswish")],
    *[H(f"{n}.default", f(2, 3)) for n in ("hardshrink", "softshrink", "deg2rad", "rad2deg")],
    H("celu.default", f(2, 3), 0.7),
    H("softshrink.default", f(2, 3), 0.2),
    H("threshold.default", f(2, 3), 0.1, -2.0),
    H("logit.default", pos(2, 3) / 9),
    H("logit.default", f(2, 3), 0.1),
    H("log10.default", pos(2, 3)),
    H("special_entr.default", f(2, 3)),
    H("heaviside.default", torch.tensor([-1.0, 0.0, 2.0, math.nan], dtype=torch.float64), f(4)),
    H("xlogy.Tensor", torch.tensor([0.0, 1.0, 2.0]), pos(3)),
    H("special_xlog1py.default", torch.tensor([0.0, 1.0, 2.0]), pos(3)),
    H("hypot.default", f(2, 3), f(3, seed=1)),
    *[
        H(f"{n}.default", torch.tensor([1.0, math.nan, 2.0]), torch.tensor([math.nan, 1.0, 3.0]))
        for n in ("fmax", "fmin")
    ],
    H("copysign.Tensor", f(4), torch.tensor([-0.0, 0.0, -math.inf, 1.0])),
    H("copysign.Scalar", f(4), -2.0),
    H("log1p.default", pos(2, 3)),
    H("isinf.default", torch.tensor([1.0, math.inf, -math.inf])),
    H("leaky_relu.default", 2 * f(2, 3), 0.2),
    H("hardtanh.default", 8 * f(2, 3), 0, 6),
    H("elu.default", 2 * f(2, 3)),
    H("elu.default", 2 * f(2, 3), 1.7, 1.1, 0.5),
    H("softplus.default", 2 * f(2, 3)),
    H("softplus.default", 8 * f(2, 3), 2, 3),
    H("addcmul.default", f(2, 3), f(3), f(2, 1), value=0.5),
    H("addcdiv.default", f(2, 3), f(3), f(2, 1), value=-2),
    H("lerp.Scalar", f(2, 3), f(3), 0.3),
    H("lerp.Tensor", f(2, 3), f(3), f(2, 1)),
    H("fill.Scalar", f(2, 3), -math.inf),
    H("fill.Tensor", f(2, 3), f()),
    *[
        H("diagonal.default", f(3, 4, 5), offset, a, b)
        for offset, a, b in ((0, 0, 1), (1, -1, 0), (-2, 1, 2))
    ],
    *[
        H("diagonal_scatter.default", f(4, 4, 2), f(2, 4 - abs(offset)), offset, 0, 1)
        for offset in (0, 1, -2)
    ],
    *[H("diag_embed.default", f(2, 3), *where) for where in ((), (1,), (-2,), (1, 0, -1), (-1, 2, 0))],
    H("diag_embed.default", m(3)),
    H("mul.Tensor", m(2, 3), m(3)),
    H("isnan.default", torch.tensor([math.nan, 0.0, math.inf])),
    H("addmv.default", f(3), f(3, 4), f(4), alpha=0.5, beta=2),
    *[H(f"{n}.default", pos(2, 3)) for n in ("log", "log2", "sqrt", "rsqrt")],
    *[
        H(f"{n}.default", i(6))
        for n in (
            "neg",
            "abs",
            "sign",
            "floor",
            "ceil",
            "trunc",
            "round",
            "square",
            "relu",
            "exp",
            "sin",
            "tanh",
            "sigmoid",
            "isnan",
        )
    ],
    *[H(f"{n}.default", i(4, low=1)) for n in ("log", "sqrt", "rsqrt", "reciprocal", "log2")],
    H("logical_not.default", i(6, low=0, high=2)),
    H("logical_not.default", f(3)),
    H("logical_not.default", m(4)),
    H("bitwise_not.default", m(4)),
    H("bitwise_not.default", i(6)),
    H("exp.default", m(4)),
    H("sign.default", m(4)),
    *[
        H(f"{n}.Tensor", f(2, 3), f(3, seed=1))
        for n in (
            "mul",
            "eq",
            "ne",
            "le",
            "lt",
            "ge",
            "gt",
            "remainder",
            "add",
            "sub",
            "rsub",
            "div",
            "true_divide",
        )
    ],
    *[
        H(f"{n}.Tensor", i(2, 5), i(5, seed=1))
        for n in ("mul", "eq", "ne", "le", "lt", "ge", "gt", "add", "sub", "rsub")
    ],
    *[H(f"{n}.Tensor", m(2, 5), m(5, seed=1)) for n in ("mul", "eq", "ne", "le", "lt", "ge", "gt", "add")],
    *[
        H(f"{n}.Scalar", f(2, 3), 1.5)
        for n in ("mul", "eq", "ne", "le", "lt", "ge", "gt", "remainder", "add", "sub", "rsub", "div")
    ],
    *[
        H(f"{n}.Scalar", i(8), 3)
        for n in ("mul", "eq", "ne", "le", "lt", "ge", "gt", "remainder", "add", "sub", "rsub", "div")
    ],
    *[H(f"{n}.Scalar", m(6), 1) for n in ("mul", "eq", "ne", "le", "lt", "ge", "gt", "add")],
    *[H(f"{n}.Scalar", m(6), s) for n in ("eq", "ne") for s in (0, 2, True, False)],
    H("add.Tensor", f(3), f(3, seed=1), alpha=2),
    H("sub.Tensor", f(3), f(3, seed=1), alpha=2),
    H("rsub.Tensor", f(3), f(3, seed=1), alpha=2),
    H("rsub.Scalar", f(3), 2.0, 3),
    H("add.Scalar", f(3), 2.0, 3),
    H("sub.Scalar", f(3), 2, 0.5),
    H("mul.Tensor", m(4), f(4)),
    H("add.Tensor", i(4), m(4)),
    H("div.Tensor", m(4), f(4)),
    H("add.Tensor", f(2, 1), f(1, 3)),
    H("mul.Tensor", f(), f(2, 3)),
    H("remainder.Tensor", i(20), i(20, low=1, seed=1)),
    H("remainder.Tensor", i(20), i(20, low=-5, high=0, seed=1)),
    H("remainder.Scalar", i(12), -3),
    H("remainder.Scalar", f(6), -0.3),
    H("remainder.Scalar", i(12), 2.5),
    H("floor_divide.default", i(20), i(20, low=1, seed=1)),
    H("floor_divide.default", i(20), i(20, low=-5, high=0, seed=1)),
    H("floor_divide.Scalar", i(12), -3),
    H("floor_divide.default", f(6), f(6, seed=1)),
    H("floor_divide.Scalar", i(12), 3),
    *[
        H("div.Tensor_mode", i(20), i(20, low=lo, high=hi, seed=1), rounding_mode=r)
        for r in ("floor", "trunc")
        for lo, hi in ((1, 5), (-5, 0))
    ],
    *[H("div.Scalar_mode", i(12), s, rounding_mode=r) for r in ("floor", "trunc") for s in (3, -3)],
    H("div.Tensor_mode", f(4), f(4, seed=1), rounding_mode=None),
    H("div.Tensor", i(6), i(6, low=1)),
    H("div.Scalar", i(6), 4),
    H("pow.Tensor_Scalar", f(4), 2),
    H("pow.Tensor_Scalar", f(4), 3),
    H("pow.Tensor_Scalar", f(4), -1),
    H("pow.Tensor_Scalar", f(4), 0),
    H("pow.Tensor_Scalar", f(4), 1),
    H("pow.Tensor_Scalar", pos(4), 0.5),
    H("pow.Tensor_Scalar", pos(4), -0.5),
    H("pow.Tensor_Scalar", i(6), 2),
    H("pow.Tensor_Scalar", i(6), 3),
    H("pow.Tensor_Tensor", pos(4), f(4)),
    H("pow.Scalar", 2.0, f(4)),
    H("pow.Scalar", 2, i(4, low=0)),
    H("pow.Scalar", 2, f(4)),
    H("pow.Tensor_Scalar", m(4), 2),
    H("pow.Tensor_Scalar", -pos(4), 1 / 3),
    *[
        H(f"{n}", f(2, 3), f(3, seed=1))
        for n in (
            "maximum.default",
            "minimum.default",
            "max.other",
            "min.other",
            "clamp_min.Tensor",
            "clamp_max.Tensor",
        )
    ],
    H("maximum.default", m(4), m(4, seed=1)),
    H("clamp_min.default", f(6), 0.2),
    H("clamp_max.default", f(6), 0.2),
    H("clamp_min.default", i(6), 0),
    H("clamp.default", f(6), -0.4, 0.4),
    H("clamp.default", f(6), None, 0.1),
    H("clamp.default", f(6), 0.1),
    H("clamp.default", f(6), max=0.1),
    H("clamp.default", i(6), 0, 3),
    H("clamp.Tensor", f(2, 3), f(3, seed=4), f(3, seed=4) + 0.3),
    H("clamp.Tensor", f(3), None, f(3, seed=4)),
    *[H(f"logical_{n}.default", i(4, low=0, high=2), m(4)) for n in ("and", "or", "xor")],
    *[H(f"logical_{n}.default", m(4), m(4, seed=1)) for n in ("and", "or", "xor")],
    *[
        H(f"{n}.Tensor", m(3, 4), m(4, seed=1))
        for n in ("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__")
    ],
    *[
        H(f"{n}.Scalar", m(4), b)
        for n in ("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__")
        for b in (True, False)
    ],
    *[
        H(f"{n}.Scalar", numbers, mask)
        for n in ("bitwise_and", "__and__")
        for numbers in (i(9, low=-40, high=40), i(9, low=-128, high=128).to(torch.int8))
        for mask in (15, 112, -16, 1, 0)
    ],
    *[H(f"{n}.Scalar", i(9, low=-40, high=40), bit) for n in ("bitwise_xor", "__xor__") for bit in (1, 8)],
    *[
        H(f"{n}.{overload}", numbers, 3)
        for n, overload in (
            ("bitwise_right_shift", "Tensor_Scalar"),
            ("__rshift__", "Scalar"),
            ("bitwise_left_shift", "Tensor_Scalar"),
            ("__lshift__", "Scalar"),
        )
        for numbers in (
            i(9, low=-40, high=40),
            i(9, low=-128, high=128).to(torch.int8),
            i(9, low=0, high=256).to(torch.uint8),
            i(9, low=-999, high=999).to(torch.int16),
        )
    ],
    *[
        T(n, lambda x, n=n: getattr(torch.ops.aten, n).Tensor(x[:, None], torch.arange(0, 8, 4)), numbers)
        for n in ("__rshift__", "__lshift__", "bitwise_right_shift", "bitwise_left_shift")
        for numbers in (i(5, low=-40, high=40), i(5, low=0, high=256).to(torch.uint8))
    ],
    T("mul", lambda x: x * 5 - 3, i(9, low=-128, high=128).to(torch.int8)),
    T("add", lambda x: 7 - x, i(9, low=0, high=256).to(torch.uint8)),
    H("where.self", m(2, 3), f(3), f(2, 1)),
    H("where.ScalarOther", m(4), f(4), 0.0),
    H("where.ScalarSelf", m(4), -1.0, f(4)),
    H("where.Scalar", m(4), 1.0, 0.0),
    H("where.self", m(4), i(4), f(4)),
    H("where.self", m(4), m(4, seed=1), m(4, seed=2)),
    H("where.self", m(4), m(4, seed=1), i(4)),
    H("masked_fill.Scalar", f(2, 3), m(3), -math.inf),
    H("masked_fill.Scalar", f(2, 3), m(2, 1), -1e9),
    H("masked_fill.Tensor", f(3), m(3), torch.tensor(2.0)),
    H("masked_fill.Scalar", m(4), m(4, seed=1), False),
    H("masked_fill.Scalar", i(4), m(4), 7),
    H("masked_fill.Scalar", f(3), m(2, 3), 0),
    H("outer.default", f(3), f(2)),
    H("logaddexp.default", f(3), f(3, seed=1)),
    H("logaddexp2.default", f(3), f(3, seed=1)),
    T("outer", lambda x: torch.outer(x, x), f(3)),
    T("outer", lambda x, y: torch.outer(x, y), f(3), f(4)),
    H("nan_to_num.default", torch.tensor([1.0, math.nan, -2.0])),
    H("nan_to_num.default", torch.tensor([1.0, math.nan]), 3.0),
    H("nan_to_num.default", torch.tensor([1.0, math.nan]), nan=3.0),
    H("dropout.default", f(4), 0.5, False),
    H("dropout.default", f(4), 0.0, True),
    H("dropout.default", f(4), 1.0, True),
    H("native_dropout.default", f(4), 0.5, False, part=0),
    # --- reductions ---
    T("sum", lambda x: x.sum(), f(2, 3)),
    T("sum", lambda x: x.sum(-1), f(2, 3)),
    T("sum", lambda x: x.sum((0, -1), keepdim=True), f(2, 3, 4)),
    T("sum", lambda x: x.sum(1), m(2, 3)),
    T("sum", lambda x: x.sum(0), i(3, 2)),
    H("sum.dim_IntList", f(2, 3), []),
    H("sum.dim_IntList", f(2, 3), None, True),
    H("sum.dim_IntList", f(2, 3, 2), [1]),
    H("sum.default", f(2, 3)),
    H("sum.default", m(5)),
    H("sum.dim_IntList", i(2, 3), [0], dtype=torch.float64),
    T("mean", lambda x: x.mean(), f(2, 3)),
    T("mean", lambda x: x.mean(-1, keepdim=True), f(2, 3)),
    T("mean", lambda x: x.mean((0, 2)), f(2, 3, 4)),
    H("mean.dim", f(2, 3), None),
    H("mean.default", f(2, 3)),
    H("amax.default", f(2, 3), [1]),
    H("amax.default", f(2, 3)),
    H("amax.default", f(2, 3), [0, -1], True),
    H("amin.default", f(2, 3), [-1], True),
    H("amin.default", i(2, 3), [0]),
    H("amax.default", m(2, 3), [1]),
    H("max.default", f(2, 3)),
    H("min.default", f(2, 3)),
    H("max.default", i(4)),
    H("max.dim", f(2, 3), -1, part=0),
    H("max.dim", f(2, 3), 0, True, part=0),
    H("min.dim", f(2, 3), 1, part=0),
    T("max", lambda x: x.max(-1, keepdim=True).values, f(2, 3)),
    T("amax", lambda x: x.amax(-1), f(2, 3)),
    T("logsumexp", lambda x: x.logsumexp(-1), f(2, 3)),
    H("logsumexp.default", f(2, 3), [0, 1], True),
    T("softmax", lambda x: x.softmax(-1), f(2, 3)),
    T("softmax", lambda x: F.softmax(x, 0), f(2, 3)),
    H("_softmax.default", f(2, 3), 1, False),
    H("softmax.int", f(2, 3), -2),
    H("_safe_softmax.default", f(2, 3), -1),
    H("softmax.int", i(2, 3), -1, torch.float64),
    H("_safe_softmax.default", torch.tensor([[0.0, -math.inf], [-math.inf, -math.inf]]), -1),
    H("softmax.int", torch.tensor([[0.0, -math.inf], [-math.inf, -math.inf]]), -1),
    H("log_softmax.int", f(2, 3), -1),
    H("_log_softmax.default", f(2, 3), 0, False),
    T("log_softmax", lambda x: x.log_softmax(-1).exp(), f(2, 3)),
    # --- contractions ---
    T("matmul", lambda x, y: x @ y, f(2, 3, 4), f(2, 4, 2)),
    T("matmul", lambda x, y: x @ y, f(2, 1, 3, 4), f(3, 4, 2)),
    T("matmul", lambda x, y: x @ y, f(3, 4), f(4)),
    T("matmul", lambda x, y: x @ y, f(4), f(2, 4, 3)),
    T("matmul", lambda x, y: x @ y, f(4), f(4, seed=1)),
    T("matmul", lambda x, y: x @ y.mT, f(2, 2, 3, 4), f(2, 2, 5, 4)),
    T("matmul", lambda x, y: x @ y, f(2, 3, 4), f(4)),
    H("matmul.default", f(2, 3, 4), f(4, 2)),
    H("matmul.default", f(4), f(4, 2)),
    H("matmul.default", i(2, 3), i(3, 2)),
    H("bmm.default", f(2, 3, 4), f(2, 4, 2)),
    H("mm.default", f(3, 4), f(4, 2)),
    H("mv.default", f(3, 4), f(4)),
    H("dot.default", f(4), f(4, seed=1)),
    H("inner.default", f(2, 3, 4), f(5, 4)),
    H("inner.default", f(4), f(4, seed=1)),
    H("tensordot.default", f(2, 3, 4), f(4, 2, 5), [0, 2], [1, 0]),
    H("tensordot.default", f(2, 3), f(3, 2), [1], [0]),
    H("addmm.default", f(3), f(2, 4), f(4, 3)),
    H("addmm.default", f(2, 1), f(2, 4), f(4, 3), beta=2, alpha=0.5),
    H("addmm.default", f(3), f(2, 4), f(4, 3), beta=0),
    H("baddbmm.default", f(2, 3, 2), f(2, 3, 4), f(2, 4, 2), beta=0.5, alpha=2),
    H("baddbmm.default", f(1, 1, 2), f(2, 3, 4), f(2, 4, 2)),
    T("linear", lambda x, w: F.linear(x, w), f(2, 3, 4), f(5, 4)),
    T("linear", lambda x, w, b: F.linear(x, w, b), f(2, 4), f(3, 4), f(3)),
    H("linear.default", f(4), f(3, 4), f(3)),
    *[
        H("max_pool1d.default", f(2, 3, 7), *how)
        for how in (
            ([3],),
            ([3], [1]),
            (2, 1, 1),
            ([4], [2], [2]),
            ([3], [1], [0], [2]),
            ([3], [2], [1], [2], True),
            ([2], [2], [0], [1], True),
            ([1], [1]),
        )
    ],
    H("max_pool1d.default", f(3, 7), [3], stride=[1], padding=[1]),
    H("max_pool2d.default", f(2, 3, 5, 4), [3, 2], [1, 1], [1, 0]),
    H("max_pool2d.default", f(2, 5, 4), 2),
    H("max_pool3d.default", f(2, 3, 4, 3), [2, 1, 2], 1, [1, 0, 1]),
    *[
        H("avg_pool1d.default", f(2, 3, 7), *how)
        for how in (([3],), ([3], [1]), ([3], [2], [1]), ([3], [2], [1], False, False))
    ],
    H("avg_pool1d.default", f(3, 8), [3], [2], [1], True, False),
    H("avg_pool2d.default", f(2, 3, 5, 4), [3, 2], [1, 2], [1, 0]),
    H("avg_pool2d.default", f(2, 5, 4), [3, 2], [1, 1], [1, 1], False, False),
    H("avg_pool2d.default", f(2, 5, 4), [2, 2], divisor_override=3),
    H("avg_pool2d.default", f(2, 5, 5), [2, 2], [2, 2], [0, 0], True, True, 3),
    H("avg_pool3d.default", f(2, 3, 4, 3), [2, 1, 2], 1),
    T("avg_pool1d", lambda x: F.avg_pool1d(F.pad(x, (2, 0)), 3, 1), f(2, 3, 5)),
    T("unfold", lambda x: x.unfold(1, 3, 1), f(2, 5, 3)),
    T("unfold", lambda x: x.unfold(-1, 2, 3).amax(-1), f(2, 8)),
    H("unfold.default", f(2, 7, 3), 1, 3, 2),
    H("unfold.default", f(2, 7), -1, 1, 2),
    H("linalg_vector_norm.default", f(2, 3), 1, [-1], True),
    H("linalg_vector_norm.default", f(2, 3, 4), 2.0, [0, 2]),
    T("linalg_vector_norm", lambda x: torch.linalg.vector_norm(x), f(2, 3)),
    T("conv1d", lambda x, w, b: F.conv1d(x, w, b), f(2, 4, 5), f(3, 4, 1), f(3)),
    T("conv2d", lambda x, w: F.conv2d(x, w), f(2, 4, 5, 3), f(6, 4, 1, 1)),
    H("conv2d.default", f(4, 5, 3), f(6, 2, 1, 1), f(6), [1, 1], [0, 0], [1, 1], 2),
    H("conv3d.default", f(2, 4, 2, 3, 2), f(3, 4, 1, 1, 1)),
    H("linear.default", f(2, 4), f(4)),
    H("linear.default", f(2, 4), f(3, 4), None),
    T("einsum", lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y), f(1, 2, 3, 4), f(1, 2, 5, 4)),
    T("einsum", lambda x, y: torch.einsum("...qd,...kd->...qk", x, y), f(2, 3, 4), f(2, 5, 4)),
    T("einsum", lambda x, y: torch.einsum("...i,ij", x, y), f(2, 3), f(3, 4)),
    *[
        H("einsum.default", e, list(t))
        for e, t in [
            ("ij,jk", (f(2, 3), f(3, 4))),
            ("ii->i", (f(3, 3),)),
            ("ii", (f(3, 3),)),
            ("i,j->ij", (f(2), f(3))),
            ("ij->", (f(2, 3),)),
            ("ij->ji", (f(2, 3),)),
            ("ba", (f(2, 3),)),
            ("iB,Bj", (f(2, 3), f(3, 2))),
            ("i j , j k -> k i", (f(2, 3), f(3, 4))),
            ("...ij,...jk->...ik", (f(2, 3, 4), f(4, 2))),
            ("...ij,jk->...ik", (f(2, 1, 3, 4), f(4, 2))),
            ("i...,i...->...", (f(3, 2), f(3, 2))),
            ("...i->...", (f(2, 3, 4),)),
            ("a...b,b->a...", (f(2, 3, 4, 2), f(2))),
            ("ij,ik,il->jkl", (f(2, 2), f(2, 3), f(2, 2))),
            ("bhqk,bkhd->bqhd", (f(1, 2, 3, 4), f(1, 4, 2, 2))),
            ("ij,jk->ik", (f(2, 1), f(3, 4))),
            ("ij,jk->ik", (f(2, 3), f(1, 4))),
            ("ij,ij->ij", (f(1, 3), f(2, 3))),
            ("ij,ij->ij", (f(2, 3), f(1, 3))),
            ("...ij,...ij->...", (f(1, 2, 3), f(4, 2, 3))),
            ("...i,...i->i", (f(2, 3), f(2, 3))),
            ("...i,...i->i", (f(1, 3), f(2, 3))),
        ]
    ],
    *[
        T(
            "scaled_dot_product_attention",
            lambda q, k, v, c=c, s=s: F.scaled_dot_product_attention(q, k, v, is_causal=c, scale=s),
            f(1, 2, 3, 2),
            f(1, 2, 4, 2, seed=1),
            f(1, 2, 4, 3, seed=2),
        )
        for c in (False, True)
        for s in (None, 0.3)
    ],
    T(
        "scaled_dot_product_attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        f(1, 4, 2, 2),
        f(1, 2, 3, 2),
        f(1, 2, 3, 2, seed=1),
        fixed=True,
    ),
    T(
        "scaled_dot_product_attention",
        lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, attn_mask=b),
        f(2, 3, 2),
        f(2, 4, 2),
        f(2, 4, 2, seed=1),
        f(3, 4),
    ),
    H(
        "scaled_dot_product_attention.default",
        f(1, 2, 3, 2),
        f(1, 2, 4, 2),
        f(1, 2, 4, 2, seed=1),
        torch.tensor([[True, False, True, True], [False] * 4, [True] * 4]),
    ),
    H(
        "scaled_dot_product_attention.default",
        f(1, 2, 3, 2),
        f(1, 2, 4, 2),
        f(1, 2, 4, 2, seed=1),
        f(1, 1, 3, 4),
    ),
    H("scaled_dot_product_attention.default", f(3, 2), f(4, 2), f(4, 2)),
    H(
        "scaled_dot_product_attention.default",
        f(1, 4, 2, 2),
        f(1, 1, 3, 2),
        f(1, 1, 3, 2, seed=1),
        None,
        0.0,
        True,
        enable_gqa=True,
    ),
    H(
        "scaled_dot_product_attention.default",
        f(2, 2, 3, 2),
        f(2, 2, 4, 2),
        f(2, 2, 4, 2, seed=1),
        m(2, 1, 1, 4) | torch.tensor([True, False, False, False]),
    ),
    H(
        "scaled_dot_product_attention.default",
        f(1, 2, 3, 2),
        f(1, 2, 3, 2),
        f(1, 2, 3, 2),
        None,
        0.0,
        True,
        scale=0.5,
    ),
    # --- made from the index ---
    T("arange", lambda x: x + torch.arange(x.shape[0]), f(4)),
    T("arange", lambda x: x + torch.arange(2, 2 + 3 * x.shape[0], 3), f(4)),
    H("arange.default", 4),
    H("arange.start", 2, 6),
    H("arange.start_step", 5, -2, -3),
    H("arange.start_step", 0, 1, 0.25),
    H("arange.start_step", 0.5, 3, 1),
    H("arange.default", 3, dtype=torch.float64),
    T("arange", lambda x: torch.arange(0, x.shape[0], 2), f(5)),
    T("arange", lambda x: x * (torch.arange(0, 6, 2) / 6), f(3), fixed=True),
    T("arange", lambda x: x[:, None] <= torch.arange(x.shape[0]), i(4)),
    T("full", lambda x: torch.full_like(x, 2.0) + torch.full((x.shape[0],), -1.5), f(3)),
    H("full.default", [2, 3], True),
    H("full.default", [2], 1, dtype=torch.bool),
    H("full.default", [2], -math.inf),
    H("full.default", [2], 2.7, dtype=torch.int64),
    H("full_like.default", f(2), 3),
    H("full_like.default", m(2), 3),
    H("new_full.default", f(2), [3], 2.5),
    H("new_full.default", i(2), [3], 2),
    H("full_like.default", i(2), 2.7),
    H("scalar_tensor.default", 2.5),
    H("scalar_tensor.default", True),
    H("zeros.default", [2, 3]),
    H("zeros.default", [2], dtype=torch.bool),
    H("zeros_like.default", f(2)),
    H("new_zeros.default", m(2), [3]),
    H("ones.default", [2, 3]),
    H("ones.default", [2], dtype=torch.bool),
    H("ones_like.default", m(2)),
    H("new_ones.default", i(2), [3]),
    H("eye.default", 3),
    H("eye.m", 2, 4),
    H("eye.default", 3, dtype=torch.bool),
    T("eye", lambda x: x.masked_fill(torch.eye(3, dtype=torch.bool), 0.0), f(3, 3), fixed=True),
    T("eye", lambda x: x.masked_fill(~torch.eye(3, dtype=torch.bool), 0.0), f(3, 3), fixed=True),
    *[
        T(n, lambda x, n=n, d=d: getattr(x, n)(d), f(2, 3, 4))
        for n, d in (("tril", 0), ("triu", 1), ("tril", -1))
    ],
    H("tril.default", m(3, 3)),
    H("triu.default", i(3, 4), -1),
    H("tril.default", torch.full((3, 3), -math.inf)),
    H("triu.default", torch.full((3, 3), -math.inf), 1),
    T("triu", lambda x: x + torch.triu(torch.full((x.shape[0], x.shape[0]), float("-inf")), 1), f(3, 3)),
    T("cumsum", lambda x: x + torch.ones(x.shape[0], dtype=torch.int64).cumsum(0), i(4)),
    T("cumsum", lambda x: x + torch.full((3, 4), True).cumsum(-1), i(3, 4), fixed=True),
    T("cumsum", lambda x: x * torch.full((x.shape[0],), 0.5).cumsum(0), f(4)),
]
UNREACHED = {
    "aten.addbmm.default",  # it sums over the batch, which its rule refuses
    "aten.linalg_solve_triangular.default",  # for rows of known number alone: see the test of it below
}


def identity(row: Row) -> str:
    shapes = ";".join(_brief(v) for v in [*row.inputs, *row.kwargs])
    return f"{'op ' if row.by_hand else ''}{row.op}({shapes}){'' if row.part is None else f'[{row.part}]'}"


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:7]}{'x'.join(map(str, value.shape))}"
    if isinstance(value, (list, tuple)):
        return ",".join(_brief(v) for v in value)
    return str(value)


class _All(torch.nn.Module):
    """Many rows side by side: tracing them at once takes a fraction of the time."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        given = iter(inputs)
        return tuple(r.run(*(next(given) for _ in r.inputs)) for r in self.rows)  # type: ignore[misc]


Graph = tuple[fx.Graph, dict[fx.Node, Tensor], dict[int, fx.Node]]


def trace(rows: list[Row], dynamic: bool) -> Graph:
    """The graph of these rows as capture sees it, the values of its inputs, and each row's result."""
    tensors = [t.clone() for r in rows for t in r.inputs]
    dims = tuple(dict.fromkeys(range(t.ndim), torch.export.Dim.AUTO) for t in tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            _All(rows), tuple(tensors), dynamic_shapes=(dims,) if dynamic else None, strict=False
        ).run_decompositions({})
    rest, values = iter(tensors), {}
    placeholders = program.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        values[node] = next(rest) if spec.kind.name == "USER_INPUT" else program.constants[spec.target]
    results = program.graph.output_node().args[0]
    return program.graph, values, {id(r): n for r, n in zip(rows, results, strict=True)}


@functools.cache
def traced_rows(dynamic: bool) -> tuple[list[Row], ...]:
    """The rows that are traced, in groups whose trace is quicker than one of all: torch compares sizes."""
    rows = [r for r in ROWS if not r.by_hand and not (dynamic and r.fixed)]
    return tuple(rows[at : at + 30] for at in range(0, len(rows), 30))


@functools.cache
def trace_of_group(dynamic: bool, number: int) -> Graph:
    return trace(traced_rows(dynamic)[number], dynamic)


def trace_with(row: Row, dynamic: bool) -> Graph:
    groups = traced_rows(dynamic)
    return trace_of_group(dynamic, next(n for n, group in enumerate(groups) if any(r is row for r in group)))


def build(row: Row) -> tuple[dict[fx.Node, Tensor], fx.Node, Any]:
    """A graph of the op alone, its tensor arguments as placeholders: their values, the op, its result."""
    graph, mode = fx.Graph(), FakeTensorMode()
    values: dict[fx.Node, Tensor] = {}

    def place(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [place(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(values)}")
        node.meta["val"] = mode.from_tensor(value)
        values[node] = value
        return node

    packet, overload = row.op.split(".")
    target = getattr(getattr(aten, packet), overload)
    args, kwargs = place(list(row.inputs)), dict(row.kwargs)
    node = graph.call_function(target, tuple(args), kwargs)
    with mode:
        fakes = fx.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*fakes, **kwargs)
    result = target(*row.inputs, **kwargs)
    if row.part is not None:
        whole = node
        node = graph.call_function(operator.getitem, (whole, row.part))
        node.meta["val"] = whole.meta["val"][row.part]
        result = result[row.part]
    return values, node, result


def lifted(context: Meaning, node: fx.Node) -> tuple[Expr, tuple[Expr, ...]]:
    shape = context.shape(node)
    at = tuple(E.var(f"o{d}", extent) for d, extent in enumerate(shape))
    return context.lift(context.read(node, at), lambda r: context.category(r.value) is not None), at


def check(row: Row, dynamic: bool, number: Callable[..., Any], traced: Graph | None = None) -> None:
    if row.by_hand:
        known, result, expected = build(row)
    else:
        _, known, results = traced or trace_with(row, dynamic)
        result, expected = results[id(row)], row.run(*row.inputs)  # type: ignore[misc]
    sizes: dict[str, int] = {}
    for node, value in known.items():
        for symbol, extent in zip(node.meta["val"].shape, value.shape, strict=True):
            if not isinstance(symbol, int):
                sizes[str(symbol.node.expr)] = extent
    formula, at = lifted(Meaning(), result)
    opaque = {n.value for n in E.walk(formula) if n.op == "read"} - set(known)
    assert not opaque, f"{identity(row)} is not lifted through {opaque}: {formula}"

    def read(node: fx.Node, place: tuple[int, ...]) -> Any:
        shape = known[node].shape
        assert all(0 <= p < n for p, n in zip(place, shape, strict=True)), (
            f"{node}{list(place)} of {list(shape)}"
        )
        return known[node][place].item()

    assert expected.ndim == len(at)
    for place in itertools.product(*map(range, expected.shape)):
        found = number(formula, {**sizes, **dict(zip(at, place, strict=True))}, read)
        wanted = expected[place].item()
        assert same(found, wanted), (
            f"{identity(row)}: {found} instead of {wanted} at {list(place)} by {formula}"
        )


def same(found: Any, wanted: Any) -> bool:
    if wanted != wanted:
        return bool(found != found)
    return bool(found == wanted) or math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-7)


def test_one_element_is_what_its_rule_says_at_fixed_sizes(number: Callable[..., Any]) -> None:
    """One test of all rows: of one with a case for each, a few would run by default."""
    for row in ROWS:
        check(row, False, number)


@pytest.mark.parametrize("row", [r for r in ROWS if not r.fixed], ids=identity)
def test_one_element_is_what_its_rule_says_at_dynamic_sizes(row: Row, number: Callable[..., Any]) -> None:
    check(row, True, number)


def exists(name: str) -> bool:
    _, packet, overload = name.split(".")
    return hasattr(getattr(aten, packet, None), overload)


def test_every_registered_rule_has_a_row() -> None:
    met = {f"aten.{row.op}" for row in ROWS if row.by_hand}
    for row, dynamic in itertools.product(ROWS, (False, True)):
        if not row.by_hand and not (dynamic and row.fixed):
            met |= {str(n.target) for n in trace_with(row, dynamic)[0].nodes if n.op == "call_function"}
    missing = {name for name in [*RULES, *PARTS] if exists(name)} - met - UNREACHED
    assert not missing


@pytest.mark.parametrize("unit", [False, True])
def test_the_rows_of_a_triangular_system_follow_by_forward_substitution(
    unit: bool, number: Callable[..., Any]
) -> None:
    """Each in terms of the rows before it."""
    matrix, sides = torch.randn(4, 4) + 3 * torch.eye(4), f(4, 2)
    row = hand("linalg_solve_triangular.default", matrix, sides, upper=False, unitriangular=unit)
    values, result, _ = build(row)
    wanted = torch.linalg.solve_triangular(matrix.double(), sides.double(), upper=False, unitriangular=unit)
    known = {**values, result: wanted}
    meaning = Meaning(along_tokens=True)
    for at in itertools.product(range(4), range(2)):
        formula = meaning.element(result, tuple(map(E.const, at)))
        found = number(formula, {}, lambda node, place: known[node][place].item())
        assert found == pytest.approx(float(wanted[at]), rel=1e-5)


@pytest.mark.parametrize("op", ["dropout.default", "native_dropout.default"])
def test_dropout_keeps_an_element_where_its_random_number_reaches_the_rate(
    op: str, number: Callable[..., Any]
) -> None:
    x = f(2, 3)
    values, result, _ = build(hand(op, x, 0.2, True, part=0 if "native" in op else None))
    formula, at = lifted(Meaning(), result)
    assert [n.value for n in E.walk(formula) if n.op == "read"] == list(values)
    for place in itertools.product(range(2), range(3)):
        for drawn, factor in ((0.0, 0), (0.19, 0), (0.2, 1.25), (0.9, 1.25)):
            counters: list[tuple[int, ...]] = []

            def random(*c: int, drawn: float = drawn, counters: list[tuple[int, ...]] = counters) -> float:
                counters.append(c)
                return drawn

            found = number(formula, dict(zip(at, place, strict=True)), lambda _, p: x[p].item(), random)
            assert found == pytest.approx(factor * x[place].item())
            assert counters == [place]


def test_a_remainder_that_belongs_to_a_repeat_survives_the_view_behind_it(number: Callable[..., Any]) -> None:
    shapes = ((1, 4), (4, 1), (1, 4, 1), (2, 2))
    rows = [
        traced("repeat", lambda x, t=times, s=shape: x.view(s).repeat(*t).flatten(), f(4))
        for shape in shapes
        for times in (
            (2,) + (1,) * (len(shape) - 1),
            (1,) * (len(shape) - 1) + (2,),
            (2,) * len(shape),
            (3, 2, 2),
        )
        if len(times) >= len(shape)
    ]
    graph = trace(rows, False)
    for row in rows:
        check(row, False, number, graph)


def test_the_index_of_a_sum_is_none_of_those_that_are_asked_for() -> None:
    program = torch.export.export(_Sum(), (f(3, 3),), strict=False)
    for name in ("i0", "i1", "o0", "j"):
        own = E.var(name, E.const(3))
        found = Meaning().element(program.graph.output_node().args[0][0], (own,))
        assert found.op == "sum" and own in found.free and found.args[0] is not own


class _Sum(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(-1)


def test_a_number_read_from_data_is_not_taken_for_a_positive_size() -> None:
    """`int(x.sum())` may be zero or negative, unlike the extent of a dimension that has elements."""

    class Model(torch.nn.Module):
        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            return x.masked_fill(torch.arange(x.shape[0]) < count.item(), 0.0)

    program = torch.export.export(Model(), (f(4), torch.tensor(0)), strict=False).run_decompositions({})
    formula, at = lifted(Meaning(), program.graph.output_node().args[0][0])
    reads = {n.value.name for n in E.walk(formula) if n.op == "read"}
    assert reads != {"x"} or any(n.op == "where" for n in E.walk(formula)), formula
    first = Meaning().element(program.graph.output_node().args[0][0], (E.ZERO,))
    found = Meaning().lift(first, lambda r: Meaning().category(r.value) is not None)
    assert found is not E.const(0.0), "the first element was taken to be masked whatever the number is"
    assert at


UNLIFTABLE = {
    "a value for each mark": lambda x, mask: assigned(x, mask, x[mask]),
    "long list": lambda x, mask: assigned(x.repeat(20), torch.arange(20) ** 2 % 61, -7.0),
    "a list beside a mask": lambda x, mask: assigned(x.expand(2, 4), ([[0], [1]], mask), -7.0),
    "truth values added up": lambda x, mask: mask.index_put((torch.tensor([1]),), x[:1] > 0, accumulate=True),
    "convolution over places": lambda x, mask: F.conv1d(x[None], x[None, None, :2]),
    "convolution that pads": lambda x, mask: F.conv1d(x[None], x[None, None, :1], padding=1),
    "convolution that skips": lambda x, mask: F.conv1d(x[None], x[None, None, :1], stride=2),
    "a mean over an end beyond the padding": lambda x, mask: F.avg_pool1d(x[None], 3, 2, 1, ceil_mode=True),
    "boolean index": lambda x, mask: x[mask],
    "sort": lambda x, mask: x.sort().values,
    "reflected padding": lambda x, mask: F.pad(x[None], (1, 1), mode="reflect"),
    "running sum": lambda x, mask: x.cumsum(0),
    "place of a maximum": lambda x, mask: x.max(0).indices,
    "norm of another order": lambda x, mask: torch.linalg.vector_norm(x, 3, dim=0),
    "second difference": lambda x, mask: x.diff(n=2),
    "a mask with gaps": lambda x, mask: (x > 0).long() & 5,
    "bits of two numbers": lambda x, mask: (x > 0).long() | (x > 1).long(),
    "a shift by data": lambda x, mask: (x > 0).long() << (x > 1).long(),
}


@pytest.mark.parametrize("what", list(UNLIFTABLE))
def test_what_has_no_rule_is_left_as_a_leaf(what: str) -> None:
    """A rule that does not apply must refuse, never raise anything else or guess."""
    row = traced(what, UNLIFTABLE[what], f(4), torch.tensor([True, False, True, True]))
    _, known, results = trace([row], False)
    context = Meaning()
    result = results[id(row)]
    at = tuple(E.var(f"o{d}", context.shape(result)[d]) for d in range(result.meta["val"].ndim))
    formula = context.lift(context.read(result, at), lambda r: context.category(r.value) is not None)
    assert {n.value for n in E.walk(formula) if n.op == "read"} - set(known)
