"""From index expressions back to views: the steps that `solve` finds, done by torch, present exactly
the elements that were asked for; what is no view is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.attention.layout import NoView, ViewOp, solve
from attngraph.meaning.rules.movement import reindex

Number = Callable[..., Any]


def apply(tensor: Tensor, steps: tuple[ViewOp, ...], number: Number) -> Tensor:
    for step in steps:
        sizes = [number(s, {}, None) for s in step.sizes]
        match step.op:
            case "unflatten":
                tensor = tensor.unflatten(step.dims[0], sizes)
            case "narrow":
                assert sizes[0] >= 0, step
                tensor = tensor.narrow(step.dims[0], *sizes)
            case "select":
                assert sizes[0] >= 0, step
                tensor = tensor.select(step.dims[0], *sizes)
            case "permute":
                tensor = tensor.permute(step.dims)
            case "unsqueeze":
                tensor = tensor.unsqueeze(step.dims[0])
            case "expand":
                tensor = tensor.expand(sizes)
            case "reshape":
                tensor = tensor.reshape(sizes)
            case other:
                raise AssertionError(other)
    return tensor


def const(*values: int) -> tuple[Expr, ...]:
    return tuple(E.const(v) for v in values)


def variables(*extents: int) -> tuple[Expr, ...]:
    return tuple(E.var(f"v{d}", E.const(n)) for d, n in enumerate(extents))


def by_gather(
    tensor: Tensor, index: tuple[Expr, ...], roles: tuple[tuple[Expr, ...], ...], number: Number
) -> Tensor:
    """The definition: every element looked up by its index."""
    flat = [v for role in roles for v in role]
    extents = [v.args[0].value for v in flat]
    grid = torch.empty(extents, dtype=tensor.dtype)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in extents)).view(-1, len(extents)).tolist():
        at = tuple(number(e, dict(zip(flat, place, strict=True)), None) for e in index)
        assert all(0 <= a < n for a, n in zip(at, tensor.shape, strict=True))
        grid[tuple(place)] = tensor[at]
    return grid.reshape([math.prod(v.args[0].value for v in role) for role in roles])


@given(data=st.data())
@settings(max_examples=250)
def test_the_steps_of_a_chain_of_views_give_the_view(data: st.DataObject, number: Number) -> None:
    """A random chain of views, followed both by torch and by index expressions."""
    base = [data.draw(st.sampled_from([1, 2, 3, 4, 6])) for _ in range(data.draw(st.integers(1, 3)))]
    tensor = torch.arange(math.prod(base)).view(base)
    view = tensor
    maps: list[Callable[[tuple[Expr, ...]], tuple[Expr, ...]]] = []
    for _ in range(data.draw(st.integers(0, 4))):
        rank = view.ndim
        kind = data.draw(st.sampled_from(["permute", "split", "merge", "narrow", "select", "unsqueeze"]))
        if kind == "permute":
            order = data.draw(st.permutations(range(rank)))
            view = view.permute(order)
            maps.append(lambda at, o=order: tuple(at[o.index(d)] for d in range(len(o))))
        elif kind == "unsqueeze":
            dim = data.draw(st.integers(0, rank))
            view = view.unsqueeze(dim)
            maps.append(lambda at, d=dim: (*at[:d], *at[d + 1 :]))
        elif rank == 0:
            continue
        elif kind in ("narrow", "select"):
            dim = data.draw(st.integers(0, rank - 1))
            start = data.draw(st.integers(0, view.shape[dim] - 1))
            if kind == "select":
                view = view.select(dim, start)
                maps.append(lambda at, d=dim, s=start: (*at[:d], E.const(s), *at[d:]))
            else:
                view = view.narrow(dim, start, data.draw(st.integers(1, view.shape[dim] - start)))
                maps.append(lambda at, d=dim, s=start: (*at[:d], M.add(at[d], E.const(s)), *at[d + 1 :]))
        else:
            old = list(view.shape)
            new = list(old)
            dim = data.draw(st.integers(0, rank - 1))
            if kind == "split":
                factor = data.draw(st.sampled_from([f for f in range(1, old[dim] + 1) if old[dim] % f == 0]))
                new[dim : dim + 1] = [factor, old[dim] // factor]
            elif dim + 1 < rank:
                new[dim : dim + 2] = [old[dim] * old[dim + 1]]
            view = view.reshape(new)
            maps.append(lambda at, o=old, n=new: reindex(const(*n), const(*o), at))
    names = variables(*view.shape)
    index = tuple(E.ZERO if n == 1 else v for v, n in zip(names, view.shape, strict=True))
    for step in reversed(maps):
        index = step(index)
    index = tuple(E.ZERO if n == 1 else e for e, n in zip(index, base, strict=True))
    roles = tuple((v,) for v in names)
    try:
        steps = solve(const(*base), index, roles)
    except NoView:
        return
    assert torch.equal(apply(tensor, steps, number).reshape(view.shape), view)


CHAINS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], Callable[..., tuple[Expr, ...]]]] = {
    "heads of a projection": (
        (2, 5, 12),
        lambda x: x.view(2, 5, 3, 4).transpose(1, 2),
        lambda b, h, t, d: (b, t, 4 * h + d),
    ),
    "one of three in a row": (
        (2, 5, 24),
        lambda x: x[..., 8:16].view(2, 5, 2, 4).transpose(1, 2),
        lambda b, h, t, d: (b, t, 4 * h + d + 8),
    ),
    "interleaved q, k, v": (
        (2, 5, 24),
        lambda x: x.view(2, 5, 2, 3, 4)[:, :, :, 1].transpose(1, 2),
        lambda b, h, t, d: (b, t, 12 * h + d + 4),
    ),
    "transposed": ((3, 4), lambda x: x.mT, lambda i, j: (j, i)),
    "part": ((6, 4), lambda x: x[2:5], lambda i, j: (i + 2, j)),
    "every second": ((8,), lambda x: x[::2], lambda i: (2 * i,)),
    "every second from the second": ((8,), lambda x: x[1::2], lambda i: (2 * i + 1,)),
    "selected": ((3, 4), lambda x: x[2], lambda j: (2, j)),
    "digits exchanged": ((6,), lambda x: x.view(2, 3).mT, lambda i, j: (3 * j + i,)),
}


class _Index:
    """An index expression under Python's operators."""

    def __init__(self, node: Expr) -> None:
        self.node = node

    def __add__(self, other: Any) -> "_Index":
        return _Index(M.add(self.node, _node(other)))

    def __mul__(self, other: Any) -> "_Index":
        return _Index(M.mul(self.node, _node(other)))

    def __sub__(self, other: Any) -> "_Index":
        return _Index(M.sub(self.node, _node(other)))

    __radd__, __rmul__ = __add__, __mul__


def _node(value: Any) -> Expr:
    return value.node if isinstance(value, _Index) else E.const(value)


@pytest.mark.parametrize("name", list(CHAINS))
def test_a_known_layout_is_solved(name: str, number: Number) -> None:
    shape, view, index = CHAINS[name]
    tensor = torch.arange(math.prod(shape)).view(shape)
    wanted = view(tensor)
    names = variables(*wanted.shape)
    roles = tuple((v,) for v in names)
    places = tuple(_node(e) for e in index(*map(_Index, names)))
    steps = solve(const(*shape), places, roles)
    assert torch.equal(apply(tensor, steps, number), wanted)
    assert torch.equal(by_gather(tensor, places, roles, number), wanted)


NO_VIEWS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[..., tuple[Any, ...]]]] = {
    "a flip": ((4,), (4,), lambda i: (_Index(E.const(3)) - i,)),
    "the diagonal": ((4, 4), (4,), lambda i: (i, i)),
    "overlapping windows": ((8,), (3, 4), lambda i, j: (i + j,)),
    "overlapping strided windows": ((12,), (3, 4), lambda i, j: (2 * i + j,)),
    "windows that overlap by one digit": ((16,), (3, 5), lambda i, j: (4 * i + j,)),
    "a stride that does not divide": ((7,), (2, 3), lambda i, j: (4 * i + j,)),
    "a carry": ((12,), (2, 4), lambda i, j: (4 * i + j + 2,)),
    "an index read from data": ((4,), (3,), lambda i: (_Index(E.read("p", (i.node,), "int")),)),
    "a product of indices": ((12,), (3, 4), lambda i, j: (i * j,)),
    "a remainder": ((4,), (8,), lambda i: (_Index(M.mod(i.node, E.const(4))),)),
    "a start before the beginning": ((8,), (3,), lambda i: (i - 1,)),
    "one place before the beginning": ((8, 3), (3,), lambda i: (-1, i)),
}


@pytest.mark.parametrize("name", list(NO_VIEWS))
def test_what_is_no_view_is_refused(name: str, number: Number) -> None:
    shape, extents, index = NO_VIEWS[name]
    names = variables(*extents)
    roles = tuple((v,) for v in names)
    places = tuple(_node(e) for e in index(*map(_Index, names)))
    with pytest.raises(NoView):
        solve(const(*shape), places, roles)


def test_a_broadcast_operand_is_expanded_and_roles_of_several_digits_are_merged(number: Number) -> None:
    b, h, g, d = variables(2, 3, 2, 4)
    tensor = torch.arange(24).view(3, 2, 4)
    steps = solve(const(3, 2, 4), (h, b, d), ((b,), (h, g), (d,)))
    wanted = tensor.permute(1, 0, 2)[:, :, None].expand(2, 3, 2, 4).reshape(2, 6, 4)
    assert torch.equal(apply(tensor, steps, number), wanted)
