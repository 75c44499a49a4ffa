"""Torch that becomes nodes: what stands for the value of a node while a function of tensors is called on it.

`Builder.trace` calls a function once, on these. Each operation that it does (a method, an operator, a
function of `torch`, an overload of `torch.ops`) becomes a node, with its fake value and the source line of
what is rewritten; nothing is computed. Operations are recorded as they are written, never as what PyTorch
makes of them, as the overload that the text of a graph need not name (`ir/graph/call.py`). A symbolic
size becomes the node that has it. Sizes have arithmetic as well: `x.size(0) + 1`.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from attngraph.ir.graph import implied, is_size
from attngraph.ir.language.expr import Expr
from attngraph.meaning.algebra.sizes import size_expression

aten = torch.ops.aten
_OF_SIZES: dict[str, Any] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floor_divide": operator.floordiv,
    "remainder": operator.mod,
}  # fmt: skip
"""Arithmetic of sizes, by the name that it has for tensors."""
_AS_THEY_ARE = (operator.getitem, torch.sym_max, torch.sym_min, *_OF_SIZES.values())


class Recorder(Protocol):
    """Makes nodes of calls (`build.Builder`)."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node: ...

    def size(self, value: Expr) -> Any: ...


def _operator(name: str, turned: bool = False) -> "Callable[[Traced, Any], Traced]":
    """An operator of tensors, or of sizes alone; `turned`: the other operand comes first."""

    def method(self: "Traced", other: Any) -> "Traced":
        pair = (other, self) if turned else (self, other)
        numbers = all(is_size(v.node) if isinstance(v, Traced) else True for v in pair)
        return self._call(_OF_SIZES[name] if numbers else getattr(aten, name), *pair)

    return method


class Traced:
    """The value of a node: a tensor, a size, or several of these, which are taken apart as a tuple is."""

    __slots__ = ("builder", "node")

    def __init__(self, builder: Recorder, node: fx.Node) -> None:
        self.builder, self.node = builder, node

    @property
    def value(self) -> Any:
        """What is known of it: a fake tensor, a size, or several."""
        return self.node.meta["val"]

    def size(self, dim: int) -> "Traced":
        """An extent as a node of its own, whether the trace knows it as a number or not."""
        return self._call(aten.sym_size.int, self, dim)

    def to(self, dtype: torch.dtype) -> "Traced":
        """Itself where it has the dtype."""
        return self if self.dtype == dtype else self._call(aten._to_copy.default, self, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        """What is known of a tensor, or a method of tensors."""
        if name in ("shape", "ndim", "dtype", "device"):
            return getattr(self.value, name)
        return functools.partial(self._call, getattr(aten, name), self)

    def __getitem__(self, place: int) -> "Traced":
        """One of several values."""
        if isinstance(self.value, Tensor):
            raise TypeError("elements are taken by select, narrow, slice or index")
        return self._call(operator.getitem, self, place)

    def __iter__(self) -> "Iterator[Traced]":
        return (self[place] for place in range(len(self.value)))

    __add__, __radd__, __sub__ = _operator("add"), _operator("add"), _operator("sub")
    __mul__, __rmul__, __truediv__ = _operator("mul"), _operator("mul"), _operator("div")
    __floordiv__, __mod__, __pow__ = _operator("floor_divide"), _operator("remainder"), _operator("pow")
    __and__, __or__, __matmul__ = _operator("bitwise_and"), _operator("bitwise_or"), _operator("matmul")
    __le__, __lt__, __ge__, __gt__ = _operator("le"), _operator("lt"), _operator("ge"), _operator("gt")

    def __neg__(self) -> "Traced":
        return self._call(aten.neg, self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> "Traced":  # fmt: skip
        named = dict(kwargs or {})
        flat = [v for a in (*args, *named.values()) for v in (a if isinstance(a, (list, tuple)) else [a])]
        return next(v for v in flat if isinstance(v, Traced))._call(function, *args, **named)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> "Traced":
        """A call as a node, with these operands."""
        given: list[Any] = untraced(args, self.builder)
        named = {name: untraced(value, self.builder) for name, value in kwargs.items()}
        if not isinstance(function, torch._ops.OpOverload) and function not in _AS_THEY_ARE:
            function, given = _overload(function, given, named)
        return Traced(self.builder, self.builder.call(function, *given, **named))


def traced(value: Any, builder: Recorder) -> Any:
    """The value, with what stands for nodes in place of them."""
    if isinstance(value, (list, tuple)):
        return [traced(v, builder) for v in value]
    return Traced(builder, value) if isinstance(value, fx.Node) else value


def untraced(value: Any, builder: Recorder) -> Any:
    """The value, with nodes in place of what stands for them, and of symbolic sizes."""
    if isinstance(value, Traced):
        return value.node
    if isinstance(value, torch.SymInt):
        return builder.size(size_expression(value))
    return [untraced(v, builder) for v in value] if isinstance(value, (list, tuple)) else value


def _overload(function: Any, args: list[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The overload that a function or method of PyTorch is for these arguments, and its arguments: sizes at
    the end may be one list, as in `x.reshape(2, 3)`."""
    is_packet = isinstance(function, torch._ops.OpOverloadPacket)
    packet = function if is_packet else getattr(aten, function.__name__)
    first = next((n for n, a in enumerate(args) if all(map(_is_number, args[n:]))), len(args))
    for given in (args, [*args[:first], args[first:]]):
        target = implied(packet, given, kwargs)
        if target is not None:
            return target, given
    raise TypeError(f"no form of {packet} takes these arguments")


def _is_number(value: Any) -> bool:
    return is_size(value) if isinstance(value, fx.Node) else isinstance(value, int)
