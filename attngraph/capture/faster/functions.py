"""Within one trace, equal calls of torch's functions are traced twice, and repeated after that.

What a function of torch records follows from its arguments (tensors by their layouts, and by which of them
are the same or share memory) and from torch's modes. The layers of a model call the same functions from the
same lines. Where all of that is equal to an earlier call's, and two earlier calls recorded the same
operations, these operations are copied with the other tensors in their places. Sizes are not copied: those of
the first call stand for all, as they do in a trace. Python runs for every layer as it would, so whatever it
reads or changes needs no thought here. A call that records anything but plain operations on its operands, or
gives anything but tensors, is always traced.
"""

import contextlib
import dataclasses
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import _TorchDispatchModeKey
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from attngraph.capture.faster import calls
from attngraph.capture.faster.calls import Call, Made, NotDescribed
from attngraph.capture.faster.formulas import follows_from_sizes
from attngraph.capture.lines import user_lines

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)


class NotRepeatable(Exception):
    """The call did something else than plain operations on its operands."""


@contextlib.contextmanager
def equal_functions_traced_twice(noted: Callable[[], Any]) -> Iterator[None]:
    """Let the trace of the body repeat what it knows. `noted`: what the trace has noted so far that is no
    operation; a call that adds to it is not repeated."""
    mode = torch._guards.detect_fake_mode(())
    recording: Any = torch._ops._get_dispatch_mode_pre_dispatch
    proxies = recording(_TorchDispatchModeKey.PROXY)
    if mode is None or proxies is None:
        yield
        return
    with _EqualFunctions(proxies.tracer, mode, noted):
        yield


@dataclasses.dataclass
class _Known:
    """Calls with equal keys: what the last one recorded, and whether two recorded the same."""

    recording: "Recording"
    is_confirmed: bool = False


class _EqualFunctions(TorchFunctionMode):
    """The calls of torch's functions in one trace.

    Attributes:
        known: calls by their keys; None where a call cannot be repeated.
        others: functions that do not give tensors.
    """

    def __init__(self, tracer: Any, mode: Any, noted: Callable[[], Any]) -> None:
        super().__init__()
        self.tracer, self.mode, self.noted = tracer, mode, noted
        self.known: dict[Any, _Known | None] = {}
        self.others: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.others:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            call = Call.of(self.mode, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        key = func, call.key, _modes(), user_lines(sys._getframe(1))
        known = self.known.get(key)
        if known is not None and known.is_confirmed:
            with contextlib.suppress(NotRepeatable):
                return known.recording.repeat(self.tracer, call)
            return func(*args, **kwargs)
        if known is None and key in self.known:
            return func(*args, **kwargs)
        last, noted = self.tracer.graph._root.prev, self.noted()
        result = func(*args, **kwargs)
        if not _is_of_tensors(result):
            self.others.add(func)
            return result
        try:
            if noted != self.noted():
                raise NotRepeatable
            with torch._C.DisableTorchFunction():
                after = Call.of(self.mode, args, kwargs)
                if after is None or after.key != call.key:
                    raise NotRepeatable
                found = Recording.of(self.tracer, last, call, result)
                if known is not None and not known.recording.agrees(found):
                    raise NotRepeatable
            self.known[key] = _Known(found, known is not None)
        except NotRepeatable:
            self.known[key] = None
        return result


def _is_of_tensors(result: Any) -> bool:
    if isinstance(result, (list, tuple)):
        return bool(result) and all(isinstance(each, Tensor) for each in result)
    return isinstance(result, Tensor)


def _modes() -> Any:
    """The state of torch that operations depend on."""
    autocast = tuple(
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_cache_enabled(), autocast, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


# --- what one call recorded ---


@dataclasses.dataclass(frozen=True)
class _Result:
    """A tensor of a call's result: an operand, by its number, or a new one, of a node."""

    operand: int | None = None
    node: fx.Node | None = None
    made: Made | None = None
    wants_gradient: bool = False


@dataclasses.dataclass
class Recording:
    """What one call recorded. `operands`: the number of the operand that each node outside stands for;
    `kind`: the class of a result of several tensors."""

    nodes: list[fx.Node]
    operands: dict[fx.Node, int]
    results: list[_Result]
    kind: Any

    @staticmethod
    def of(tracer: Any, last: fx.Node, call: Call, result: Any) -> "Recording":
        """
        Args:
            last: the last node before the call.

        Raises:
            NotRepeatable: the operations do not say all that the call did.
        """
        operands: dict[fx.Node, int] = {}
        for number, tensor in enumerate(call.tensors):
            operands.setdefault(_node_of(tracer, tensor), number)
        own, nodes = set(), []
        memory = {calls.memory_of(t) for t in call.tensors}
        for node in _since(tracer, last):
            own.add(node)
            if _stands_for_all(node):
                continue
            if not _is_plain(node, memory) or any(
                n not in own and n not in operands and not _stands_for_all(n) for n in node.all_input_nodes
            ):
                raise NotRepeatable
            nodes.append(node)
        kind, tensors = calls.taken_apart(result)
        results = [_result(tracer, call, own, t) for t in tensors]
        if not calls.own_memories(tensors, [r.made for r in results]):
            raise NotRepeatable
        return Recording(nodes, operands, results, kind)

    def agrees(self, other: "Recording") -> bool:
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
                if value.op == "get_attr":
                    return "held", _layout(value.meta.get("val"))
                return "operand", self.operands[value]
            if isinstance(value, (list, tuple)):
                return tuple(map(told, value))
            if isinstance(value, dict):
                return tuple((k, told(v)) for k, v in value.items())
            return type(value), repr(value)

        each = [
            (n.target, told(n.args), told(n.kwargs), _layout(n.meta.get("val")), n.meta.get("stack_trace"))
            for n in self.nodes
        ]
        results = [
            (r.operand, told(r.node), r.made and (_layout_of_made(r.made), r.made.base), r.wants_gradient)
            for r in self.results
        ]
        return each, results, self.kind

    def repeat(self, tracer: Any, call: Call) -> Any:
        """Record the same for other operands. Returns the result of the call.

        Raises:
            NotRepeatable: the trace does not follow an operand; nothing was recorded.
        """
        copies: dict[fx.Node, fx.Node] = {
            node: _node_of(tracer, call.tensors[number]) for node, number in self.operands.items()
        }
        stack = {key: (path, _name(kind)) for key, (path, kind) in tracer.module_stack.items()}
        for node in self.nodes:
            made = tracer.graph.node_copy(node, lambda n: copies.get(n, n))
            made.meta["nn_module_stack"] = stack
            copies[node] = made
        with torch._C.DisableTorchFunction():
            if any(result.wants_gradient for result in self.results):
                with proxy_tensor.disable_proxy_modes_tracing():
                    found = [_differentiable(result, call) for result in self.results]
            else:
                with calls.within_kernels(call.mode):
                    found = [_without_gradient(result, call) for result in self.results]
        for result, (made, shown) in zip(self.results, found, strict=True):
            if result.node is not None:
                node = copies[result.node]
                node.meta["val"] = shown
                slot = proxy_tensor._ProxyTensor(fx.Proxy(node, tracer), made.constant)
                proxy_tensor.set_proxy_slot(made, tracer, slot)
        return calls.put_together(self.kind, [made for made, _ in found])


def _since(tracer: Any, last: fx.Node) -> Iterator[fx.Node]:
    """What was recorded since."""
    if last._erased:
        raise NotRepeatable
    node = last.next
    while node is not tracer.graph._root:
        yield node
        node = node.next


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def _node_of(tracer: Any, tensor: Tensor) -> fx.Node:
    """
    Raises:
        NotRepeatable: the trace does not follow the tensor, or knows its values.
    """
    slot: Any = proxy_tensor.get_proxy_slot(tensor, tracer, None)
    if slot is None or (slot.constant is not None and 0 not in slot.constant.shape):
        raise NotRepeatable
    node: fx.Node = slot.proxy.node
    return node


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a size, or another number, that follows from the sizes of arguments."""
    value = node.meta.get("val")
    return isinstance(value, _SIZES) and follows_from_sizes(value.node.expr)


def _stands_for_all(node: fx.Node) -> bool:
    """Whether a node need not be copied: a size, or a tensor that the trace itself holds."""
    return _is_size(node) or node.op == "get_attr"


def _is_plain(node: fx.Node, memory: set[int]) -> bool:
    """Whether a node is an operation that gives tensors, and writes to none in the memory of operands."""
    target: Any = node.target
    if node.op != "call_function" or isinstance(node.meta.get("val"), _SIZES):
        return False
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or any(tag in target.tags for tag in calls.BY_VALUES):
        return False
    for place, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            value = written.meta.get("val") if isinstance(written, fx.Node) else None
            if not isinstance(value, Tensor) or calls.memory_of(value) in memory:
                return False
    return True


def _result(tracer: Any, call: Call, own: set[fx.Node], leaf: Any) -> _Result:
    if type(leaf) is not FakeTensor:
        raise NotRepeatable
    number = call.number(leaf)
    if number is not None:
        return _Result(operand=number)
    node = _node_of(tracer, leaf)
    try:
        made = Made.of(call, leaf)
    except NotDescribed as problem:
        raise NotRepeatable from problem
    if node not in own or (made.base is not None and call.tensors[made.base].dtype != made.dtype):
        raise NotRepeatable
    return _Result(node=node, made=made, wants_gradient=leaf.requires_grad)


def _without_gradient(result: _Result, call: Call) -> tuple[Any, Any]:
    """A result of a repeated call, and another tensor over the same memory for the node to show."""
    if result.made is None:
        operand = call.tensors[result.operand or 0]
        return operand, operand
    memory = result.made.memory(call)
    return result.made.fake(call, memory), result.made.fake(call, memory)


def _differentiable(result: _Result, call: Call) -> tuple[Any, Any]:
    """The same, where some result has a gradient."""
    if not result.wants_gradient or result.made is None:
        with calls.within_kernels(call.mode):
            return _without_gradient(result, call)
    made = result.made.differentiable(call)
    return made, proxy_tensor.extract_val(made)


def _layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        return value.dtype, value.device, value.requires_grad, tuple(map(_formula, sizes))
    return tuple(map(_layout, value)) if isinstance(value, (list, tuple)) else None


def _layout_of_made(made: Made) -> Any:
    return made.dtype, made.device, tuple(map(_formula, (*made.shape, *made.stride, made.offset)))


def _formula(size: Any) -> Any:
    return size if isinstance(size, (int, float, bool)) else size.node.expr
