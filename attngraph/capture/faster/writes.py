"""Replaces the in-place ops of a traced program by functional ones, on its graph.

`ExportedProgram.run_decompositions({})` does that for every program, but traces it twice more, which takes
as long as the first trace. Most programs need far less: writes to tensors that the program itself made. A
write to a tensor gives the tensor a new version. A write to a view gives a new version to all that share the
memory: what was written is put into the tensor that the view shows a part of, and so on up to the tensor
that was allocated; any other view that is used later is made again from the new version.
"""

import operator
import sys
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from attngraph.capture.program.functional import is_dense
from attngraph.ir.graph import infer_once, may_alias

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_FRESH = frozenset({aten.matmul.default, aten.linear.default, aten.softmax.int, aten.log_softmax.int})
"""Composite ops whose results never alias their operands, which their schemas do not state."""
_PARTS: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: torch.ops.attngraph.strided_scatter.default,
}  # fmt: skip
"""Views of a part of a tensor, with the op that puts a new part into the tensor."""


def functional(program: ExportedProgram) -> ExportedProgram | None:
    """The program, modified, as a pure function of its inputs; None if torch has to make it one."""
    found = _Writes(program)
    if not found.are_plain():
        return None
    graph = program.graph
    found.replace()
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


class _Writes:
    """In-place ops of a program. `are_plain` looks whether all can be replaced; then `replace` does it."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self._pure: dict[fx.Node, Any] = {}
        self._results: dict[fx.Node, Any] = {}
        # The value that each view is made from; the value that the result of an in-place op is.
        self._sources: dict[fx.Node, fx.Node] = {}
        self._written: dict[fx.Node, fx.Node] = {}
        # The arguments of views by strides, as views of what was allocated; () if they are not known.
        self._strided: dict[fx.Node, tuple[Any, ...]] = {}
        # Results of composite ops that may share the memory of these values without saying so.
        self._perhaps: dict[fx.Node, list[fx.Node]] = {}
        # All views of an allocated value; writes to views of which nothing else is used later.
        self._sharing: dict[fx.Node, list[fx.Node]] = {}
        self._alone: set[fx.Node] = set()
        self._place = {node: place for place, node in enumerate(program.graph.nodes)}
        # The latest version of every allocated tensor, and of every view with the version that it was made
        # from.
        self._versions: dict[fx.Node, fx.Node] = {}
        self._views: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}

    # --- whether ---

    def are_plain(self) -> bool:
        """Whether every write can be replaced. False under autocast, whose casts appear only in a second
        trace."""
        if torch._C._is_any_autocast_enabled():
            return False
        if any("MUTATION" in spec.kind.name for spec in self.program.graph_signature.output_specs):
            return False
        return all(self._follow(node) for node in self.program.graph.nodes)

    def _follow(self, node: fx.Node) -> bool:
        op = node.target
        if node.op in ("placeholder", "output"):
            return True
        if op is operator.getitem:
            source: Any = node.args[0]
            if may_alias(source.target):
                self._note(node, source)
            return True
        if not isinstance(op, torch._ops.OpOverload):
            of_numbers = not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
            return node.op == "call_function" and of_numbers
        if op._schema.is_mutable:
            return self._follow_write(node, op)
        if _is_composite(op):
            if not _is_fresh(node):
                for operand in node.all_input_nodes:
                    self._perhaps.setdefault(self._root(operand), []).append(node)
            # These may write or alias although their schema declares them functional.
            hides = op is aten.native_batch_norm.default or torch.Tag.maybe_aliasing_or_mutating in op.tags
            return op.namespace == "aten" and not may_alias(op) and not hides
        if may_alias(op) and isinstance(node.args[0], fx.Node):
            self._note(node, node.args[0])
        if op is aten.as_strided.default:  # it counts in the memory of the tensor that was allocated
            root, offset = self._root(node), node.meta["val"].storage_offset()
            given = [*node.args[1:], *node.kwargs.values()]
            if not isinstance(offset, int) and len(given) > 2 and given[2] is not None:
                offset = given[2]
            known = isinstance(offset, (int, fx.Node))
            self._sources[node], self._strided[node] = root, (root, *given[:2], offset) if known else ()
        return True

    def _note(self, view: fx.Node, source: fx.Node) -> None:
        self._sources[view] = self._own(source)
        self._sharing.setdefault(self._root(view), []).append(view)

    def _follow_write(self, node: fx.Node, op: torch._ops.OpOverload) -> bool:
        pure, target = _pure(op), node.args[0]
        if pure is None or not isinstance(target, fx.Node):
            return False
        target = self._own(target)
        self._written[node], self._pure[node] = target, pure
        root, whole = target, True
        while root in self._sources:
            if root.target not in _PARTS and not _is_whole(root):
                self._alone.add(node)
            whole = whole and root.target not in _PARTS
            root = self._sources[root]
        others = list(self._perhaps.get(root, ()))
        if node in self._alone:
            others += [n for n in (root, *self._sharing[root], *self._written)
                       if self._own(n) is not target and self._root(n) is root]  # fmt: skip
        if any(self._strided.get(view) == () for view in self._sharing.get(root, ())):
            return False
        used_later = any(self._place[user] > self._place[node] for n in others for user in n.users)
        if used_later or not _is_fresh(root):
            return False
        made = self._results[node] = _inferred(pure, node)
        kept = target.meta["val"]
        if whole or node in self._alone:
            return _layout(made) == _layout(kept)
        return made.dtype == kept.dtype and made.shape == kept.shape and is_dense(root.meta["val"])

    def _own(self, node: fx.Node) -> fx.Node:
        """The value itself, where this is the result of an in-place op."""
        return self._written.get(node, node)

    def _root(self, node: fx.Node) -> fx.Node:
        """The op or input that allocated the value's memory."""
        node = self._own(node)
        while node in self._sources:
            node = self._sources[node]
        return node

    # --- replacing ---

    def replace(self) -> None:
        """Replace the writes; the graph may keep what is no longer used."""
        if not self._pure:
            return
        written = set(map(self._root, self._written))
        for node, args in self._strided.items():
            if args[0] in written:
                node.args, node.kwargs = args, {}
        for node in list(self.program.graph.nodes):
            with self.program.graph.inserting_before(node):
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), self._latest)
            if node in self._written:
                self._replace(node)
            elif node in self._sources:
                self._views[node] = self._latest(self._sources[node]), node

    def _latest(self, node: fx.Node) -> fx.Node:
        """The node that is the latest version of a value."""
        node = self._own(node)
        if node not in self._sources:
            return self._versions.get(node, node)
        source = self._latest(self._sources[node])
        made_from, made = self._views.get(node, (source, node))
        if made_from is not source:
            made = self.program.graph.node_copy(node, lambda n: source if n is node.args[0] else n)
            made.meta = dict(node.meta)
            self._views[node] = source, made
        return made

    def _replace(self, write: fx.Node) -> None:
        """Make the write functional, and give new versions to what it is a part of."""
        value, target = write, self._own(write)
        write.target = self._pure[write]
        write.meta["val"] = self._results[write]
        graph, following = self.program.graph, write.next
        if write in self._alone:
            self._views[target] = self._latest(self._sources[target]), write
            return
        while target in self._sources:
            source = self._latest(self._sources[target])
            with graph.inserting_before(following):
                made = _put_back(graph, target, source, value)
            if made is not value:
                made.meta = {**write.meta, "val": _inferred(made.target, made)}
            value, target = made, self._sources[target]
        self._versions[target] = value


def _inferred(op: Any, node: fx.Node) -> Any:
    """What an op gives with a node's arguments, of which one is a tensor at least."""
    values = (n.meta.get("val") for n in node.all_input_nodes)
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    return infer_once(op, node.args, node.kwargs, mode)


def _put_back(graph: fx.Graph, view: fx.Node, source: fx.Node, value: fx.Node) -> fx.Node:
    """The tensor that a view shows, where the view has a new value."""
    given: list[object] = [0, None, None, 1]  # dim, start, end, step
    given[: len(view.args) - 1] = view.args[1:]
    is_all = not view.kwargs and given[1:] in ([None, None, 1], [0, None, 1], [0, sys.maxsize, 1])  # `[:]`
    is_slice = view.target is aten.slice.Tensor
    if (is_slice and is_all) or view.target in (aten.alias.default, aten.detach.default):
        return value
    if view.target in _PARTS:
        return graph.call_function(_PARTS[view.target], (source, value, *view.args[1:]), dict(view.kwargs))
    if view.target in _SELF_INVERSE:
        return graph.call_function(view.target, (value, *view.args[1:]))
    if view.target is aten.permute.default:
        order = [int(n) % len(view.args[1]) for n in view.args[1]]  # type: ignore[union-attr, arg-type]
        return graph.call_function(view.target, (value, [order.index(n) for n in range(len(order))]))
    shape: list[Any] = list(source.meta["val"].shape)
    for dim, extent in enumerate(source.meta["val"].shape):
        if not isinstance(extent, int):
            shape[dim] = graph.call_function(aten.sym_size.int, (source, dim))
            shape[dim].meta["val"] = extent
    return graph.call_function(aten.view.default, (value, shape))


_SELF_INVERSE = frozenset({aten.transpose.int, aten.t.default})
_RESHAPED = frozenset({aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims})


def _is_whole(view: fx.Node) -> bool:
    """Whether this is a view of the whole of a tensor, and the tensor can be made from the view."""
    if view.target is aten.detach.default:  # the tensor's gradient would be lost
        return not view.args[0].meta["val"].requires_grad  # type: ignore[union-attr]
    also = (aten.permute.default, aten.alias.default)
    return view.target in also or view.target in _SELF_INVERSE or view.target in _RESHAPED


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
    op: Any = node.target
    if op is operator.getitem:
        return _is_fresh(node.args[0])  # type: ignore[arg-type]
    if op is aten.einsum.default:
        return len(node.args[1]) > 1  # type: ignore[arg-type]
    return isinstance(op, torch._ops.OpOverload) and (op in _FRESH or not _is_composite(op))


def _is_composite(op: torch._ops.OpOverload) -> bool:
    name = op.name()  # type: ignore[no-untyped-call]
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE) or _COMPOSITE in op.py_kernels
