"""The operations that one call of a module recorded in a trace, and copies of them for other tensors.

A recording knows its operands (tensors among the arguments, and the module's weights), the nodes between them
and the result, and how the result is put together. It can be repeated for a call whose operands have equal
layouts. Sizes are not copied: those of the first call stand for all, as they do in a trace. Used by
`equal_modules.py`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor

from attngraph.capture.attributes import containers
from attngraph.capture.equal_calls import BY_VALUES, Made, memory_of
from attngraph.capture.equal_formulas import follows_from_sizes
from attngraph.capture.module_state import Call
from attngraph.capture.structure import TreeSpec, flatten, is_value, unflatten

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MODES = frozenset({"_set_grad_enabled", "_enter_autocast", "_exit_autocast"})
"""Functions that a trace records besides operations."""
_Stack = dict[str, tuple[str, Any]]


class NotRepeatable(Exception):
    """The call did something else than plain operations on its operands."""


class Start:
    """Where a trace is before it calls a module."""

    def __init__(self, tracer: Any, module: nn.Module) -> None:
        self.last: fx.Node = tracer.graph._root.prev
        self.path = str(tracer.path_of_module(module))
        self.depth = len(tracer.module_stack)
        self.counts: dict[str, int] = dict(tracer.num_calls)

    def nodes(self, tracer: Any) -> Iterator[fx.Node]:
        """What was recorded since."""
        if self.last._erased:
            raise NotRepeatable("the trace was changed")
        node = self.last.next
        while node is not tracer.graph._root:
            yield node
            node = node.next


@dataclasses.dataclass
class _Result:
    """A leaf of a call's result: an operand, by its number; a new tensor, of a node; the same tensor as
    another leaf; or a plain value."""

    operand: int | None = None
    again: int | None = None
    node: fx.Node | None = None
    made: Made | None = None
    wants_gradient: bool = False
    value: Any = None


@dataclasses.dataclass
class Recording:
    """What one call recorded. `operands`: the number of the operand that each node outside stands for."""

    start: Start
    nodes: list[fx.Node]
    operands: dict[fx.Node, int]
    results: list[_Result]
    tree: TreeSpec
    calls: dict[str, int]

    @staticmethod
    def of(tracer: Any, start: Start, call: Call, args: Any, result: Any) -> Recording:
        """
        Raises:
            NotRepeatable: the operations do not say all that the call did.
        """
        operands: dict[fx.Node, int] = {}
        for number, tensor in enumerate(call.tensors):
            operands.setdefault(_node_of(tracer, tensor), number)
        own, nodes = set(), []
        memory = {memory_of(t) for t in call.tensors}
        for node in start.nodes(tracer):
            own.add(node)
            if _is_size(node):
                continue
            if not _is_plain(node, memory) or any(
                n not in own and n not in operands and not _is_size(n) for n in node.all_input_nodes
            ):
                raise NotRepeatable("it records something else than operations on its operands")
            nodes.append(node)
        leaves, tree = flatten(result)
        if not set(containers(result)).isdisjoint(containers(args)):
            raise NotRepeatable("a container of its arguments is among its results")
        results: list[_Result] = []
        for place, leaf in enumerate(leaves):
            same = next((n for n in range(place) if leaf is leaves[n] and isinstance(leaf, Tensor)), None)
            again = same is not None and results[same].made is not None
            results.append(_Result(again=same) if again else _result(tracer, call, own, memory, leaf))
        calls = {p: n - start.counts.get(p, 0) for p, n in tracer.num_calls.items()}
        return Recording(start, nodes, operands, results, tree, {p: n for p, n in calls.items() if n})

    def agrees(self, other: Recording) -> bool:
        """Whether another call recorded the same."""
        return len(self.nodes) == len(other.nodes) and self._told() == other._told()

    def _told(self) -> Any:
        number = {node: place for place, node in enumerate(self.nodes)}

        def told(value: Any) -> Any:
            if isinstance(value, fx.Node):
                if value in number:
                    return "node", number[value]
                if _is_size(value):
                    return "size", _formula(value.meta["val"])
                return "operand", self.operands[value]
            if isinstance(value, (list, tuple)):
                return tuple(map(told, value))
            if isinstance(value, dict):
                return tuple((k, told(v)) for k, v in value.items())
            return type(value), repr(value)

        each = [
            (n.target, told(n.args), told(n.kwargs), _layout(n.meta.get("val")), n.meta.get("stack_trace"),
             tuple(self._placed(n.meta.get("nn_module_stack") or {}, "", {}, {}).items()))
            for n in self.nodes
        ]  # fmt: skip
        results = [
            (r.operand, r.again, told(r.node), r.made and _layout_of_made(r.made), r.wants_gradient,
             type(r.value), repr(r.value))
            for r in self.results
        ]  # fmt: skip
        return each, results, self.tree

    def repeat(self, tracer: Any, module: nn.Module, call: Call) -> Any:
        """Record the same for another module and its operands. Returns the result of the call."""
        path = str(tracer.path_of_module(module))
        copies: dict[fx.Node, fx.Node] = {
            node: _node_of(tracer, call.tensors[number]) for node, number in self.operands.items()
        }
        around = {k: (p, _name(kind)) for k, (p, kind) in tracer.module_stack.items()}
        stacks: dict[int, _Stack] = {}
        for node in self.nodes:
            made = tracer.graph.node_copy(node, lambda n: copies.get(n, n))
            stack = made.meta.get("nn_module_stack") or {}
            if id(stack) not in stacks:
                stacks[id(stack)] = self._placed(stack, path, around, tracer.num_calls)
            made.meta["nn_module_stack"] = stacks[id(stack)]
            copies[node] = made
        for inner, count in self.calls.items():
            placed = self._path(inner, path)
            tracer.num_calls[placed] = tracer.num_calls.get(placed, 0) + count
        leaves: list[Any] = []
        with torch._C.DisableTorchFunction(), proxy_tensor.disable_proxy_modes_tracing():
            for result in self.results:
                again = result.again
                leaves.append(_made(tracer, call, result, copies) if again is None else leaves[again])
        return unflatten(leaves, self.tree)

    def _path(self, path: str, place: str) -> str:
        """The path of a submodule of the recorded module, in the one at another place."""
        own = self.start.path
        return place + path[len(own) :] if path == own or path.startswith(own + ".") else path

    def _placed(self, stack: _Stack, place: str, around: _Stack, counts: Mapping[str, int]) -> _Stack:
        """The modules that a node is in, where the recorded module is at another place."""
        found = dict(around)
        for key, (path, kind) in list(stack.items())[self.start.depth :]:
            placed = self._path(path, place)
            number = int(key.partition("@")[2] or 0) - self.start.counts.get(path, 0) + counts.get(placed, 0)
            found[f"{placed}@{number}" if number > 0 else placed] = placed, _name(kind)
        return found


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def _node_of(tracer: Any, tensor: Tensor) -> fx.Node:
    """
    Raises:
        NotRepeatable: the trace does not follow the tensor, or knows its values.
    """
    slot: Any = proxy_tensor.get_proxy_slot(tensor, tracer, None)
    if slot is None or slot.constant is not None:
        raise NotRepeatable("an operand or a result is no plain tensor of the trace")
    node: fx.Node = slot.proxy.node
    return node


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a size, or another number, that follows from the sizes of arguments."""
    value = node.meta.get("val")
    return isinstance(value, _SIZES) and follows_from_sizes(value.node.expr)


def _is_plain(node: fx.Node, memory: set[int]) -> bool:
    """Whether a node is an operation that gives tensors, and writes to none in the memory of operands."""
    target: Any = node.target
    if node.op != "call_function" or isinstance(node.meta.get("val"), _SIZES):
        return False
    if target is operator.getitem or getattr(target, "__name__", "") in _MODES:
        return True
    if not isinstance(target, torch._ops.OpOverload) or any(tag in target.tags for tag in BY_VALUES):
        return False
    for place, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            value = written.meta.get("val") if isinstance(written, fx.Node) else None
            if not isinstance(value, Tensor) or memory_of(value) in memory:
                return False
    return True


def _result(tracer: Any, call: Call, own: set[fx.Node], memory: set[int], leaf: Any) -> _Result:
    if not isinstance(leaf, Tensor):
        if not is_value(leaf) or (isinstance(leaf, _SIZES) and not follows_from_sizes(leaf.node.expr)):
            raise NotRepeatable("a result is no tensor or number")
        return _Result(value=leaf)
    number = call.number(leaf)
    if number is not None:
        return _Result(operand=number)
    node = _node_of(tracer, leaf)
    is_new = memory_of(leaf) not in memory and leaf.storage_offset() == 0
    if type(leaf) is not FakeTensor or node not in own or not is_new:
        raise NotRepeatable("a result is a view, or no tensor of its own")
    memory.add(memory_of(leaf))
    made = Made(leaf.dtype, leaf.fake_device, tuple(leaf.shape), tuple(leaf.stride()), 0, None)
    return _Result(node=node, made=made, wants_gradient=leaf.requires_grad)


def _made(tracer: Any, call: Call, result: _Result, copies: dict[fx.Node, fx.Node]) -> Any:
    if result.operand is not None:
        return call.tensors[result.operand]
    if result.node is None or result.made is None:
        return result.value
    made = result.made.tensor(call)
    if result.wants_gradient:
        made = made.requires_grad_().clone()  # one that no code may write to would be refused
    proxy = fx.Proxy(copies[result.node], tracer)
    return proxy_tensor.track_tensor_tree(made, proxy, constant=None, tracer=tracer)


def _layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        return value.dtype, value.device, value.requires_grad, tuple(map(_formula, sizes))
    return tuple(map(_layout, value)) if isinstance(value, (list, tuple)) else None


def _layout_of_made(made: Made) -> Any:
    return made.dtype, made.device, tuple(map(_formula, (*made.shape, *made.stride)))


def _formula(size: Any) -> Any:
    return size if isinstance(size, (int, float, bool)) else size.node.expr
