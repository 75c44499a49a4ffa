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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import _TorchDispatchModeKey
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from attngraph.capture.faster import calls
from attngraph.capture.faster.calls import Call, Made, NotDescribed, Result, follows_from_sizes
from attngraph.capture.lines import user_lines
from attngraph.ir.graph.call import BY_VALUES, described
from attngraph.ir.modes import autocast_of

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)


def equal_functions_traced_twice(noted: Callable[[], Any]) -> contextlib.AbstractContextManager[Any]:
    """Let the trace of the body repeat what it knows. `noted`: what the trace has noted so far that is no
    operation; a call that adds to it is not repeated."""
    mode = torch._guards.detect_fake_mode(())
    recording: Any = torch._ops._get_dispatch_mode_pre_dispatch
    proxies = recording(_TorchDispatchModeKey.PROXY)
    is_recorded = mode is not None and proxies is not None
    return _EqualFunctions(proxies.tracer, mode, noted) if is_recorded else contextlib.nullcontext()


class _EqualFunctions(TorchFunctionMode):
    """The calls of torch's functions in one trace.

    Attributes:
        known: calls by their keys; None where a call cannot be repeated.
        others: functions that do not give tensors.
    """

    def __init__(self, tracer: Any, mode: Any, noted: Callable[[], Any]) -> None:
        super().__init__()
        self.tracer, self.mode, self.noted = tracer, mode, noted
        self.known: dict[Any, Recording | None] = {}
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
        if known is None and key in self.known:
            return func(*args, **kwargs)
        if known is not None and known.is_confirmed:
            with contextlib.suppress(NotDescribed):
                return known.repeat(self.tracer, call)
            return func(*args, **kwargs)
        last, noted = self.tracer.graph._root.prev, self.noted()
        result = func(*args, **kwargs)
        several = isinstance(result, (list, tuple)) and bool(result)
        if not all(isinstance(each, Tensor) for each in (result if several else (result,))):
            self.others.add(func)
            return result
        self.known[key] = None
        with contextlib.suppress(NotDescribed), torch._C.DisableTorchFunction():
            after = Call.of(self.mode, args, kwargs)
            if noted == self.noted() and after is not None and after.key == call.key:
                found = Recording.of(self.tracer, last, call, result)
                if known is None or known.agrees(found):
                    found.is_confirmed = known is not None
                    self.known[key] = found
        return result


def _modes() -> Any:
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_cache_enabled(), autocast_of("cpu"), autocast_of("cuda"),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


# --- what one call recorded ---


@dataclasses.dataclass
class Recording:
    """What one call recorded. `operands`: the number of the operand that each node outside stands for;
    `made`: the node of each part of the result that is new. `is_confirmed`: whether two calls recorded it."""

    nodes: list[fx.Node]
    operands: dict[fx.Node, int]
    result: Result
    made: list[fx.Node | None]
    is_confirmed: bool = False

    @staticmethod
    def of(tracer: Any, last: fx.Node, call: Call, result: Any) -> "Recording":
        """Of a call since the node `last`; raises NotDescribed if operations do not say all that it did."""
        operands: dict[fx.Node, int] = {}
        for number, tensor in enumerate(call.tensors):
            operands.setdefault(_node_of(tracer, tensor), number)
        own, nodes = set(), []
        memory = {calls.memory_of(t) for t in call.tensors}
        if last._erased:
            raise NotDescribed
        node = last
        while (node := node.next) is not tracer.graph._root:
            own.add(node)
            if _stands_for_all(node):
                continue
            known = (n in own or n in operands or _stands_for_all(n) for n in node.all_input_nodes)
            if not _is_plain(node, memory) or not all(known):
                raise NotDescribed
            nodes.append(node)
        found = Result.of(call, result, gradients=True)
        made: list[fx.Node | None] = []
        for tensor, part in zip(calls.tensors_of(result), found.parts, strict=True):
            made.append(_node_of(tracer, tensor) if isinstance(part, Made) else None)
            if isinstance(part, Made):
                has_dtype_of_base = part.base is None or call.tensors[part.base].dtype == part.dtype
                if made[-1] not in own or not has_dtype_of_base:
                    raise NotDescribed
        return Recording(nodes, operands, found, made)

    def agrees(self, other: "Recording") -> bool:
        return len(self.nodes) == len(other.nodes) and self._told() == other._told()

    def _told(self) -> Any:
        number = {node: place for place, node in enumerate(self.nodes)}

        def told(node: fx.Node) -> Any:
            if node in number:
                return "node", number[node]
            return (node.op, layout(node)) if _stands_for_all(node) else ("operand", self.operands[node])

        def layout(node: fx.Node) -> Any:
            return _layout(node.meta.get("val"))

        def operands(node: fx.Node) -> Any:
            return described(fx.map_arg((node.args, node.kwargs), told))

        each = [(n.target, operands(n), layout(n), n.meta.get("stack_trace")) for n in self.nodes]
        return each, fx.map_arg(self.made, told), described(self.result.parts), self.result.kind

    def repeat(self, tracer: Any, call: Call) -> Any:
        """Record the same for other operands, and return the result of the call. If the trace does not follow
        an operand, nothing is recorded, and it raises NotDescribed."""
        operands = self.operands.items()
        copies = {node: _node_of(tracer, call.tensors[number]) for node, number in operands}
        stack = {
            key: (path, f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind))
            for key, (path, kind) in tracer.module_stack.items()
        }
        for node in self.nodes:
            made = tracer.graph.node_copy(node, lambda n: copies.get(n, n))
            made.meta["nn_module_stack"] = stack
            copies[node] = made
        found, parts = list[Any](), list[Any](self.result.parts)
        for part, own in zip(parts, self.made, strict=True):
            if own is None:
                found.append(call.tensors[part])
                continue
            with torch._C.DisableTorchFunction():
                made, copies[own].meta["val"] = _made(part, call)
            slot = proxy_tensor._ProxyTensor(fx.Proxy(copies[own], tracer), made.constant)
            proxy_tensor.set_proxy_slot(made, tracer, slot)
            found.append(made)
        return self.result.together(found)


def _made(part: Any, call: Call) -> tuple[Any, Any]:
    """A new tensor of a repeated call, and another tensor over the same memory for its node to show."""
    if part.wants_gradient:
        with proxy_tensor.disable_proxy_modes_tracing():
            made = part.differentiable(call)
            return made, proxy_tensor.extract_val(made)
    with calls.within_kernels(call.mode):
        memory = part.memory(call)
        return part.fake(call, memory), part.fake(call, memory)


def _node_of(tracer: Any, tensor: Tensor) -> fx.Node:
    """Raises NotDescribed if the trace does not follow the tensor, or knows its values."""
    slot: Any = proxy_tensor.get_proxy_slot(tensor, tracer, None)
    if slot is None or (slot.constant is not None and 0 not in slot.constant.shape):
        raise NotDescribed
    node: fx.Node = slot.proxy.node
    return node


def _stands_for_all(node: fx.Node) -> bool:
    """Whether a node need not be copied: a tensor that the trace itself holds, or a number that follows from
    the sizes of arguments."""
    value = node.meta.get("val")
    follows = isinstance(value, _SIZES) and follows_from_sizes(value.node.expr)
    return follows or node.op == "get_attr"


def _is_plain(node: fx.Node, memory: set[int]) -> bool:
    """Whether a node is an operation that gives tensors, and writes to none in the memory of operands."""
    target: Any = node.target
    if node.op != "call_function" or isinstance(node.meta.get("val"), _SIZES):
        return False
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or any(tag in target.tags for tag in BY_VALUES):
        return False
    for place, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            value = written.meta.get("val") if isinstance(written, fx.Node) else None
            if not isinstance(value, Tensor) or calls.memory_of(value) in memory:
                return False
    return True


def _layout(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_layout, value))
    about = (value.requires_grad, value.storage_offset()) if isinstance(value, Tensor) else ()
    return described((value, *about))
