"""Removes in-place ops and composite views from a traced program, if possible without a second trace.

`ExportedProgram.run_decompositions({})` does that for every program, but traces it twice more, which takes as
long as the first trace. Most programs need far less: ops that only make views (`flatten`, `mT`, `chunk`) can
be decomposed during the first trace, and a write to a tensor without aliases can be replaced by the
functional op. All other programs still go through torch. Used by `trace.py`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from attngraph.capture.exported import written_out
from attngraph.capture.replaced import replaced
from attngraph.ir.graph.infer import infer
from attngraph.ir.graph.program_graph import may_alias

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_FRESH = frozenset({aten.matmul.default, aten.linear.default, aten.softmax.int, aten.log_softmax.int})
"""Composite ops whose results never alias their operands, which their schemas do not state."""


@contextlib.contextmanager
def views_taken_apart() -> Iterator[None]:
    """Let torch.export decompose composite views while it traces."""
    traced = functools.partial(make_fx, decomposition_table=_composite_views())
    with replaced("torch.export._trace", "make_fx", traced):
        yield


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program as a pure function of its inputs; composite ops without side effects are not decomposed.
    May modify the given program."""
    found = _Writes(program)
    if not found.are_plain():
        taken_apart: ExportedProgram = program.run_decompositions(written_out())
        return taken_apart
    graph = program.graph
    for write, pure in found.pure.items():
        write.target = pure
        for version in found.versions(write):
            version.replace_all_uses_with(write, delete_user_cb=functools.partial(found.is_after, write))
    for node in graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
        node.target = aten.clone.default
        for user in [u for u in node.users if u.target is aten.detach.default]:
            user.replace_all_uses_with(node)
    graph.eliminate_dead_code()
    results: Any = graph.output_node().args[0]
    for spec, result in zip(program.graph_signature.output_specs, results, strict=True):
        if isinstance(result, fx.Node):
            spec.arg.name = result.name
    program.graph_module.recompile()
    return program


@functools.cache
def _composite_views() -> dict[Any, Callable[..., Any]]:
    """Decompositions of the composite ops that may return a view of an operand."""
    found: dict[Any, Callable[..., Any]] = {}
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        space, _, overload = name.partition("::")
        packet, _, which = overload.partition(".")
        if space != "aten" or not hasattr(aten, packet):
            continue
        op = getattr(getattr(aten, packet), which or "default")
        if may_alias(op) and not op._schema.is_mutable and _COMPOSITE not in op.py_kernels:
            found[op] = op.decompose
    found |= {op: op.decompose for op in written_out()}
    found[aten.dropout.default] = lambda x, p, train: NotImplemented if train and p != 0 else x
    return found


class _Writes:
    """The in-place ops of a program, each with its functional form (`pure`)."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.pure: dict[fx.Node, Any] = {}
        # The op or input that allocated each value's memory, and all values in the same memory.
        self._roots: dict[fx.Node, fx.Node] = {}
        self._sharing: dict[fx.Node, list[fx.Node]] = {}
        # The result of an in-place op is a new version of the value that it writes to.
        self._originals: dict[fx.Node, fx.Node] = {}
        self._place = {node: place for place, node in enumerate(program.graph.nodes)}

    def is_after(self, node: fx.Node, user: fx.Node) -> bool:
        return self._place[user] > self._place[node]

    def versions(self, write: fx.Node) -> list[fx.Node]:
        """The other nodes that stand for the value that is written to."""
        original, sharing = self._originals[write], self._sharing[self._roots[write]]
        return [node for node in sharing if node is not write and self._originals[node] is original]

    def are_plain(self) -> bool:
        """Whether every write can be replaced without torch's functionalisation; fills `pure`. False under
        autocast, whose casts appear only in a second trace."""
        if torch._C._is_any_autocast_enabled():
            return False
        if any("MUTATION" in spec.kind.name for spec in self.program.graph_signature.output_specs):
            return False
        return all(self._follow(node) for node in self.program.graph.nodes)

    def _follow(self, node: fx.Node) -> bool:
        op = node.target
        if node.op in ("placeholder", "output"):
            self._note(node, node)
        elif op is operator.getitem:
            source: Any = node.args[0]
            self._note(node, self._roots[source] if may_alias(source.target) else node)
        elif not isinstance(op, torch._ops.OpOverload):
            self._note(node, node)
            return _is_number(node)
        elif op._schema.is_mutable:
            pure, target = _pure(op), node.args[0]
            if pure is None or not isinstance(target, fx.Node):
                return False
            self._note(node, self._roots[target], self._originals[target])
            self.pure[node] = pure
            return self._is_plain(node)
        elif _is_composite(op):
            self._note(node, node)
            return op.namespace == "aten" and not may_alias(op) and not _hides_a_write(op)
        else:
            source = node.args[0] if may_alias(op) else node
            self._note(node, self._roots.get(source, node))
        return True

    def _note(self, node: fx.Node, root: fx.Node, original: fx.Node | None = None) -> None:
        self._roots[node], self._originals[node] = root, original or node
        self._sharing.setdefault(root, []).append(node)

    def _is_plain(self, write: fx.Node) -> bool:
        """Whether the program itself made the written tensor, no alias of it is used later, and the
        functional op's result has the same layout."""
        root = self._roots[write]
        others = [n for n in self._sharing[root] if self._originals[n] is not self._originals[write]]
        if not _is_fresh(root) or any(self.is_after(write, user) for n in others for user in n.users):
            return False
        made = infer(self.pure[write], write.args, write.kwargs)
        return _layout(made) == _layout(write.meta["val"])


def _pure(op: torch._ops.OpOverload) -> Any:
    """The functional form of an op that writes its result to its first operand."""
    name = op._schema.name.removeprefix("aten::")
    pure = getattr(getattr(aten, name.removesuffix("_"), None), op._overloadname, None)
    if pure is None or pure._schema.is_mutable:
        return None
    first, *others = op._schema.arguments
    writes = [a.alias_info is not None and a.alias_info.is_write for a in (first, *others)]
    same = [a.name for a in pure._schema.arguments] == [a.name for a in op._schema.arguments]
    return pure if same and writes[0] and not any(writes[1:]) else None


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The dtype of a tensor, and its sizes and strides in the traced call."""
    extents = [*tensor.shape, *tensor.stride()]
    return tensor.dtype, *(s if isinstance(s, int) else s.node.hint for s in extents)


def _is_fresh(node: fx.Node) -> bool:
    """Whether this op allocated its result in new memory."""
    op = node.target
    if op is operator.getitem:
        return _is_fresh(node.args[0])  # type: ignore[arg-type]
    if not isinstance(op, torch._ops.OpOverload):
        return False
    if op is aten.einsum.default:
        return len(node.args[1]) > 1  # type: ignore[arg-type]
    return op in _FRESH or not _is_composite(op)


def _is_number(node: fx.Node) -> bool:
    return node.op == "call_function" and not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _is_composite(op: torch._ops.OpOverload) -> bool:
    name = op.name()  # type: ignore[no-untyped-call]
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE) or _COMPOSITE in op.py_kernels


def _hides_a_write(op: torch._ops.OpOverload) -> bool:
    """Whether the op may write or alias although its schema declares it functional."""
    return op is aten.native_batch_norm.default or torch.Tag.maybe_aliasing_or_mutating in op.tags
