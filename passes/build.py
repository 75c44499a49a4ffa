"""Building nodes: by functions of tensors, views found by `layout.py`, and sizes from size expressions.

Every new node gets its fake value at once, and the source line of the node that it replaces.

`Builder.trace` calls a function of tensors once, on what stands for the values of nodes (`Traced`). Each
operation that it does (a method, an operator, a function of `torch`, an overload of `torch.ops`) becomes a
node; nothing is computed. Operations are recorded as they are written, never as what PyTorch makes of them,
as the overload that the text of a graph need not name (`ir/graph/call.py`). A symbolic size becomes the node
that has it. Sizes have arithmetic as well: `x.size(0) + 1`.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph import ORIGIN, ProgramGraph, implied, infer, infer_once, is_size, makes_a_size
from attngraph.ir.language.expr import Expr
from attngraph.ir.ops.nodes import AttentionOp, view
from attngraph.meaning.algebra.sizes import is_example, size_expression
from attngraph.meaning.attention.claim import Operand, View
from attngraph.meaning.attention.layout import NoView, ViewOp

aten = torch.ops.aten
_OF_SIZES: dict[str, Any] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
    "mod": operator.mod, "max": torch.sym_max, "min": torch.sym_min,
}  # fmt: skip
_VIEWS = {
    "select": aten.select.int, "unsqueeze": aten.unsqueeze.default, "unflatten": aten.unflatten.int,
    "permute": aten.permute.default, "zeros": aten.new_zeros.default, "expand": aten.expand.default,
    "reshape": aten.reshape.default,
}  # fmt: skip
"""The operation of each view but `narrow` (`layout.ViewOp`)."""
_NOTHING: Mapping[Expr, Any] = MappingProxyType({})
_FOR_SIZES = {{"floordiv": "floor_divide", "mod": "remainder"}.get(n, n): f for n, f in _OF_SIZES.items()}
"""Arithmetic of sizes, by the name that it has for tensors."""
_AS_THEY_ARE = (operator.getitem, *_OF_SIZES.values())


class Refused(Exception):
    """Why nothing is rewritten here, in words for the report. `tell`: whether a user would ask."""

    def __init__(self, reason: str = "", tell: bool = True) -> None:
        super().__init__(reason)
        self.tell = tell


class NoSize(Refused):
    """A size that cannot be computed from dimensions of tensors in the graph."""


def infer_anew(graph: ProgramGraph, changed: Iterable[fx.Node]) -> None:
    """Say anew what follows from values of another form, up to attentions, whose results do not."""
    anew = set(changed)
    for node in graph.graph.nodes:
        if node.op == "call_function" and view(node) is None and not anew.isdisjoint(node.all_input_nodes):
            anew.add(node)
            node.meta["val"] = infer(node.target, node.args, node.kwargs, graph.fake_mode())


class Builder:
    """Inserts nodes before `anchor`, with the source line of `rewritten`, else of the anchor."""

    def __init__(self, graph: ProgramGraph, anchor: fx.Node, rewritten: fx.Node | None = None) -> None:
        self.graph, self.anchor, self.rewritten = graph, anchor, rewritten
        self.made: list[fx.Node] = []
        self._sizes: dict[Expr, Any] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        value = infer_once(target, args, kwargs, self.graph.fake_mode())
        with self.graph.graph.inserting_before(self.anchor):
            node: fx.Node = self.graph.graph.call_function(target, args, kwargs)
        origin = (self.rewritten or self.anchor).meta
        node.meta = {key: origin[key] for key in ORIGIN if key in origin}
        node.meta["val"] = value
        self.made.append(node)
        return node

    def trace(self, function: Callable[..., Any], *args: Any) -> Any:
        """The nodes that a function of tensors computes from these: a node, or a list of them. Arguments may
        be nodes of tensors, of sizes or of several values, lists of them, and anything else."""
        return self.untraced(function(*self.traced(args)))

    def traced(self, value: Any) -> Any:
        """The value, with what stands for nodes in place of them."""
        if isinstance(value, (list, tuple)):
            return [self.traced(v) for v in value]
        return Traced(self, value) if isinstance(value, fx.Node) else value

    def untraced(self, value: Any) -> Any:
        """The value, with nodes in place of what stands for them, and of symbolic sizes."""
        if isinstance(value, Traced):
            return value.node
        if isinstance(value, torch.SymInt):
            return self.size(size_expression(value))
        return [self.untraced(v) for v in value] if isinstance(value, (list, tuple)) else value

    def again(self, node: fx.Node, operand: Callable[[fx.Node], Any]) -> fx.Node:
        """A node's call with these in place of its operands."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        target: Any = node.target
        return self.call(target, *args, **kwargs)

    def attention(self, view: AttentionOp) -> fx.Node:
        return self.call(view.target, *view.args)

    def results(self, several: fx.Node) -> list[fx.Node]:
        """Each of the values that a node gives."""
        return [self.call(operator.getitem, several, n) for n in range(len(several.meta["val"]))]

    def to(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Itself where it has the dtype."""
        same = node.meta["val"].dtype == dtype
        return node if same else self.call(aten._to_copy.default, node, dtype=dtype)

    def permuted(self, node: fx.Node, order: list[int]) -> fx.Node:
        """Itself where its dimensions are in order."""
        return node if order == sorted(order) else self.call(aten.permute.default, node, order)

    def unsqueezed(self, node: fx.Node, *dims: int) -> fx.Node:
        """With more dimensions of extent 1, one after the other."""
        for dim in dims:
            node = self.call(aten.unsqueeze.default, node, dim)
        return node

    def discard(self) -> None:
        """Remove all nodes that were built."""
        for node in reversed(self.made):
            self.graph.graph.erase_node(node)
        self.made.clear()

    def size(self, value: Expr, known: Mapping[Expr, Any] = _NOTHING) -> Any:
        """A number, or a node that computes the size. `known`: nodes of some sizes, or tensors and dimensions
        that have them. Raises `NoSize`: a symbol that is no tensor's dimension."""
        if value in known:
            found = known[value]
            return self.call(aten.sym_size.int, *found) if isinstance(found, tuple) else found
        if value.op == "const" or is_example(value):
            return int(value.value)
        if value in self._sizes and (value.op == "size" or not known):
            return self._sizes[value]
        if value.op == "size":
            whole: Any = self._symbol(value.value)
        elif value.op in _OF_SIZES:
            operation = _OF_SIZES[value.op]
            whole, *rest = [self.size(a, known) for a in value.args]
            for part in rest:
                numbers = bool(known) and not any(isinstance(x, fx.Node) for x in (whole, part))
                whole = operation(whole, part) if numbers else self.call(operation, whole, part)
        else:
            raise NoSize(f"a size has no {value.op}")
        if value.op == "size" or not known:
            self._sizes[value] = whole
        return whole

    def _symbol(self, name: str) -> fx.Node:
        """The symbol as the first number that it is, or the dimension of the first tensor that has it."""
        node: fx.Node
        for node in self.graph.graph.nodes:
            if node is self.anchor:
                break
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and str(value.node.expr) == name:
                return node
            for axis, extent in enumerate(getattr(value, "shape", ())):
                if not isinstance(extent, int) and str(extent.node.expr) == name:
                    for user in node.users:
                        if user.target is aten.sym_size.int and user.args[1] == axis and user < self.anchor:
                            return user
                    return self.call(aten.sym_size.int, node, axis)
        raise NoSize(f"size {name} is no dimension of a tensor that is there before")

    def view(self, node: fx.Node, steps: tuple[ViewOp, ...]) -> fx.Node:
        """`node` with the view steps applied. Raises `NoView`: they lead outside of the tensor."""
        for step in steps:
            sizes = [self.size(s) for s in step.sizes]
            match step.op:
                case "narrow":
                    node = self._narrowed(node, *step.dims, *sizes)
                case "permute":
                    node = self.call(_VIEWS[step.op], node, list(step.dims))
                case "select" | "unsqueeze":
                    node = self.call(_VIEWS[step.op], node, *step.dims, *sizes)
                case _:
                    node = self.call(_VIEWS[step.op], node, *step.dims, sizes)
        return node

    def _narrowed(self, node: fx.Node, dim: int, start: Any, length: Any) -> fx.Node:
        """A part of a dimension.

        Raises:
            NoView: it ends outside of the tensor. An index that some of the elements have (one side of a
                condition, one tensor of several) says where those are, and not where all are.
        """
        try:
            part = self.call(aten.narrow.default, node, dim, start, length)
        except RuntimeError as problem:
            raise NoView from problem
        if makes_a_size(part):  # torch cannot tell how long it is then
            self.graph.graph.erase_node(self.made.pop())
            raise NoView
        return part

    def operand(self, operand: Operand, dtype: torch.dtype | None = None) -> fx.Node:
        """An operand of an attention, as `[B, H, S, D]`."""
        columns = ([self.scaled(view, dtype) for view in part] for part in operand.parts)
        return self.side_by_side([self.side_by_side(part, -1) for part in columns], -2)

    def scaled(self, view: View, dtype: torch.dtype | None = None) -> fx.Node:
        """A view, with its factor and its zeros."""
        node = self.view(view.base, view.steps)
        node = node if dtype is None else self.to(node, dtype)
        node = node if view.factor == 1 else self.call(aten.mul.Tensor, node, view.factor)
        zeros = [self.size(extent) for extent in view.zeros]
        return node if zeros == [0, 0] else self.call(aten.constant_pad_nd.default, node, zeros)

    def side_by_side(self, parts: list[fx.Node], dim: int) -> fx.Node:
        """The parts along a dimension; the one itself where there is no other."""
        return parts[0] if len(parts) == 1 else self.call(aten.cat.default, parts, dim)


def _operator(name: str, turned: bool = False) -> "Callable[[Traced, Any], Traced]":
    """An operator of tensors, or of sizes alone; `turned`: the other operand comes first."""

    def method(self: "Traced", other: Any) -> "Traced":
        pair = (other, self) if turned else (self, other)
        numbers = all(is_size(v.node) if isinstance(v, Traced) else True for v in pair)
        return self._call(_FOR_SIZES[name] if numbers else getattr(aten, name), *pair)

    return method


class Traced:
    """The value of a node: a tensor, a size, or several of these, which are taken apart as a tuple is."""

    __slots__ = ("builder", "node")

    def __init__(self, builder: Builder, node: fx.Node) -> None:
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
        given: list[Any] = self.builder.untraced(args)
        named = {name: self.builder.untraced(value) for name, value in kwargs.items()}
        if not isinstance(function, torch._ops.OpOverload) and function not in _AS_THEY_ARE:
            function, given = _overload(function, given, named)
        return Traced(self.builder, self.builder.call(function, *given, **named))


def _overload(function: Any, args: list[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The overload that a function or method of PyTorch is for these arguments, and its arguments: sizes at
    the end may be one list, as in `x.reshape(2, 3)`."""

    def is_number(value: Any) -> bool:
        return is_size(value) if isinstance(value, fx.Node) else isinstance(value, int)

    is_packet = isinstance(function, torch._ops.OpOverloadPacket)
    packet = function if is_packet else getattr(aten, function.__name__)
    first = next((n for n, a in enumerate(args) if all(map(is_number, args[n:]))), len(args))
    for given in (args, [*args[:first], args[first:]]):
        target = implied(packet, given, kwargs)
        if target is not None:
            return target, given
    raise TypeError(f"no form of {packet} takes these arguments")
