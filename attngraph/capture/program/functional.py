"""A traced program as a pure function of plain operations: without writes, and without regions.

Writes are taken out by torch's own functionalisation, which traces the program twice more. Ops that only make
views (`flatten`, `mT`, `chunk`) are decomposed during the first trace.

A region without gradients becomes part of the graph, its results detached. What is written in place there, or
to what `detach()` or `.data` gives, gradients pass by: in eager mode such a write changes the values of a
tensor, while gradients flow through the tensor as if nothing had been written. A graph in which a write gives
a new value cannot say that, so a graph for training is refused where a write is hidden from gradients that
flow. Regions of torch.vmap are traced again.
"""

import collections
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.predispatch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from attngraph.capture.instead import replaced
from attngraph.capture.lines import refused
from attngraph.errors import CaptureError
from attngraph.ir.graph import may_alias, source_of
from attngraph.meaning.algebra.sizes import example_number

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_WRITTEN_OUT = frozenset(
    {"absolute", "negative", "multiply", "subtract", "divide", "true_divide", "greater", "greater_equal",
    "less", "less_equal", "not_equal", "clip", "float_power", "concatenate", "hstack", "vstack",
    "row_stack", "dstack", "column_stack", "atleast_1d", "atleast_2d", "atleast_3d", "fliplr", "flipud",
    "meshgrid", "broadcast_tensors", "take_along_dim", "ger", "linalg_matmul", "linalg_multi_dot",
    "chain_matmul", "linalg_vecdot", "cosine_similarity", "special_softmax", "special_log_softmax",
    "special_logsumexp", "special_expit", "special_exp2", "special_erf", "special_erfc",
    "special_expm1", "special_log1p", "special_round", "fix", "relu6", "selu", "isfinite", "isclose",
    "isreal", "diag"}
)  # fmt: skip
"""Ops that are aliases or plain compositions of other ops, in eager mode too."""
_UNSAID = (
    "type_as", "broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d", "sum_to_size",
)  # fmt: skip
"""Composite ops whose results may be views of operands, which their schemas do not state."""
_OWN_OPS = ("aten", "attngraph")
"""Libraries whose composite ops have element rules or kernels of their own."""
RECURRENT = [aten.gru.input, aten.lstm.input, aten.rnn_tanh.input, aten.rnn_relu.input]
"""Operations that are loops over tokens."""
_UNDIFFERENTIATED = frozenset(
    getattr(aten, f"logical_{name}_").default for name in ("not", "and", "or", "xor")
)
"""Writes in place that gradients pass by, although they are enabled."""

for _name in ("lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting"):
    # Entering and leaving a level of torch.vmap affects every node in between.
    fx.has_side_effect(getattr(torch._functorch.predispatch, _name))


@contextlib.contextmanager
def views_taken_apart() -> Iterator[None]:
    """Let torch.export decompose composite views, and composite ops of other libraries, while it traces."""
    # Of torchao, say, whose integers with scales are then torch's operations, which have element rules.
    others = {op: op.decompose for op in _composites(of_torch=False)}
    traced = functools.partial(make_fx, decomposition_table=_composite_views() | others)
    with replaced("torch.export._trace", "make_fx", traced):
        yield


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program as a pure function of its inputs; composite ops without side effects are not decomposed.

    Raises:
        CaptureError: a write through strides to a part of a tensor.
    """
    found: ExportedProgram = program.run_decompositions(written_out())
    # What torch writes there has a wrong derivative.
    for node in found.graph.find_nodes(op="call_function", target=aten.as_strided_scatter.default):
        whole, written, *given = node.args
        named = {**dict(zip(_STRIDES, given, strict=False)), **node.kwargs}
        if not is_dense(whole.meta["val"]):
            raise refused("forward() writes through as_strided to a part of a tensor", source_of(node))
        node.target = torch.ops.attngraph.strided_scatter.default
        node.args = (whole, written, *map(named.get, _STRIDES[:2]), named.get(_STRIDES[2]) or 0)
        node.kwargs = {}
    return found


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill its memory, in whatever order."""
    sizes = [s if isinstance(s, int) else s.node.hint for s in tensor.shape]
    strides = [s if isinstance(s, int) else s.node.hint for s in tensor.stride()]
    expected = 1
    for stride, size in sorted((t, s) for t, s in zip(strides, sizes, strict=True) if s != 1):
        if stride != expected:
            return False
        expected *= size
    return True


_STRIDES = "size", "stride", "storage_offset"


def _fill_diagonal(x: Tensor, value: Any, wrap: bool = False) -> Any:
    """A write to the diagonal of a matrix, which need not be one through strides."""
    if x.ndim != 2 or wrap:
        return NotImplemented
    x.diagonal().fill_(value)
    return x


def _unrolled(unroll: Callable[..., Any], x: Any, *args: Any) -> Any:
    """A recurrent network as operations on each token, in a trace for one number of tokens alone; one
    operation in other traces, and where it also runs backwards."""
    number, is_backwards = example_number(), args[6]
    return unroll(x, *args) if number and number in x.shape[:2] and not is_backwards else NotImplemented


def _composites(of_torch: bool) -> Iterator[Any]:
    """The composite ops of torch, or of other libraries, that write to no operand."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        space, _, overload = name.partition("::")
        packet, _, which = overload.partition(".")
        wanted = space == "aten" if of_torch else space not in _OWN_OPS
        if wanted and hasattr(getattr(torch.ops, space), packet):
            op = getattr(getattr(getattr(torch.ops, space), packet), which or "default")
            if not op._schema.is_mutable:
                yield op


@functools.cache
def written_out() -> dict[Any, Callable[..., Any]]:
    """Decompositions of the ops that are aliases or compositions of ops with element rules."""
    known = torch.export.default_decompositions()
    return {op: known[op] for op in known if op.namespace == "aten" and op._opname in _WRITTEN_OUT}


@functools.cache
def _composite_views() -> dict[Any, Callable[..., Any]]:
    """Decompositions of the composite ops that may return a view of an operand."""
    ops = _composites(of_torch=True)
    found = {op: op.decompose for op in ops if may_alias(op) and _COMPOSITE not in op.py_kernels}
    found |= {op: op.decompose for op in written_out()}
    found |= {op: op.decompose for name in _UNSAID for op in [getattr(aten, name).default]}
    found[aten.einsum.default] = lambda equation, operands, **order: (
        aten.einsum.default.decompose(equation, operands, **order) if len(operands) == 1 else NotImplemented
    )
    found[aten.fill_diagonal_.default] = _fill_diagonal
    found[aten.dropout.default] = lambda x, p, train: NotImplemented if train and p != 0 else x
    loops = get_decompositions(RECURRENT).items()
    return found | {op: functools.partial(_unrolled, unroll) for op, unroll in loops}


# --- regions without gradients ---


def complete_users(module: fx.GraphModule) -> None:
    """Let each node know all its users. torch.export forgets some: with gradients off, the views of a tensor
    that is then written under `torch.no_grad()`."""
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            for operand in node.all_input_nodes:
                operand.users.setdefault(node, None)


def inline_grad_regions(module: fx.GraphModule) -> None:
    """Inline the body of every `with torch.no_grad()` region, and detach its results and what it writes to
    tensors, which has the same effect in a pure function."""

    def detached(node: fx.Node) -> fx.Node:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return node
        made: fx.Node = module.graph.call_function(aten.detach.default, (node,))
        made.meta = dict(node.meta)
        return made

    for node in list(module.graph.nodes):
        if node.op != "call_function" or "wrap_with_set_grad_enabled" not in str(node.target):
            continue
        enabled, body, *inputs = node.args
        inner = getattr(module, str(body.target))
        inline_grad_regions(inner)
        copies: dict[fx.Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), inputs, strict=True))
        with module.graph.inserting_before(node):
            results: Any = module.graph.graph_copy(inner.graph, copies)
            for step in () if enabled else inner.graph.nodes:
                if getattr(getattr(step.target, "_schema", None), "is_mutable", False):
                    target, *others = copies[step].args  # gradients of all others are cut
                    with module.graph.inserting_before(copies[step]):
                        cut = fx.map_arg((others, copies[step].kwargs), detached)
                    copies[step].args, copies[step].kwargs = (target, *cut[0]), cut[1]
            if not enabled:
                results = list(map(detached, results))
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


# --- gradients that do not see a write ---

_PASSED_BY = (
    "gradients pass by what forward() writes in place under torch.no_grad(), to x.detach() or x.data, or by "
    "logical_not_() and the like"
)


def hidden_from_gradients(program: ExportedProgram, arguments: Sequence[Tensor]) -> CaptureError | None:
    """The refusal of a trace in which a write is hidden from gradients that flow, or which has gradients that
    its caller switched off; None if there is none. `program`: with its writes and its regions without
    gradients. `arguments`: the example's tensors, in the order of the program's inputs."""
    if not torch.is_grad_enabled():
        return _switches_gradients_on(program.graph_module)
    given = iter(arguments)
    inputs = []
    for spec in program.graph_signature.input_specs:
        kind = spec.kind.name
        tensor = next(given, None) if kind == "USER_INPUT" else program.state_dict.get(str(spec.target))
        inputs.append(_Value(isinstance(tensor, Tensor) and tensor.requires_grad))
    try:
        _follow(program.graph_module, inputs, True)
    except CaptureError as problem:
        return problem
    return None


@dataclasses.dataclass
class _Value:
    """The memory of a value and of all its views: whether gradients flow through it. `shown`: of what it is
    an alias whose writes gradients do not see."""

    flows: bool = False
    shown: "_Value | None" = None

    @property
    def hides(self) -> bool:
        return self.shown is not None and (self.shown.flows or self.shown.hides)


def _follow(module: fx.GraphModule, inputs: Sequence[_Value], enabled: bool) -> Any:
    """Follow gradients through a graph; what it says of the results."""
    placeholders = module.graph.find_nodes(op="placeholder")
    found = collections.defaultdict(_Value, zip(placeholders, inputs, strict=True))
    for node in module.graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], found.__getitem__)
        if node.op != "call_function" or node in found:  # a result of a region is known
            continue
        if "wrap_with_set_grad_enabled" in str(node.target):
            enables, body, *given = node.args
            values = [found[n] if isinstance(n, fx.Node) else _Value() for n in given]
            results = _follow(getattr(module, str(body.target)), values, bool(enables))
            found.update((user, results[user.args[1]]) for user in node.users)
            continue
        operands = [found[n] for n in node.all_input_nodes]
        own = found[node.args[0]] if node.args and isinstance(node.args[0], fx.Node) else _Value()
        flows = enabled and any(v.flows for v in operands)
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            if own.hides or (own.flows and (not enabled or node.target in _UNDIFFERENTIATED)):
                raise refused(
                    _PASSED_BY, source_of(node), "compute a new tensor (masked_fill for masked_fill_), call "
                    "the model under torch.no_grad()", then="A graph has no such writes.",
                )  # fmt: skip
            own.flows = own.flows or flows
            found[node] = own
        elif node.target is aten.detach.default:
            found[node] = _Value(shown=own)
        elif may_alias(node.target) or node.target is operator.getitem:
            found[node] = own
        else:
            value = node.meta.get("val")
            found[node] = _Value(flows and (not isinstance(value, Tensor) or value.is_floating_point()))
    return ()


def _switches_gradients_on(module: fx.GraphModule) -> CaptureError | None:
    """The refusal of a trace without gradients in which the forward switches them on: its results may have
    gradients, and a graph is called as its caller says."""
    for node in module.graph.nodes:
        switches = "wrap_with_set_grad_enabled" in str(node.target) and node.args[0]
        if switches and not torch.is_inference_mode_enabled():  # in which nothing has gradients
            inner = getattr(module, str(node.args[1].target))
            line = next(filter(None, map(source_of, inner.graph.nodes)), "")
            what = "forward() switches gradients on, which its caller has switched off"
            then = "The results of a graph have none then."
            return refused(what, line, "call the model with gradients", then=then)
    return None


# --- torch.vmap ---


def inline_vmap(module: fx.GraphModule) -> None:
    """Where torch.export recorded entering and leaving levels of torch.vmap, trace what stands in between
    again, so that only ops on whole batches remain. Everything else stays as it was recorded."""
    for inner in module.children():
        if isinstance(inner, fx.GraphModule):
            inline_vmap(inner)
    while inside := _vmapped(module.graph):
        own = set(inside)
        given = list(dict.fromkeys(n for node in inside for n in node.all_input_nodes if n not in own))
        made = [node for node in inside if any(user not in own for user in node.users)]
        part = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {node: part.placeholder(node.name) for node in given}
        for node in inside:
            copies[node] = part.node_copy(node, copies.__getitem__)
        part.output([copies[node] for node in made])
        part.eliminate_dead_code()
        values = [node.meta["val"] for node in given]
        every = (node.meta.get("val") for node in module.graph.nodes)
        mode = next(m for v in every if (m := getattr(v, "fake_mode", None)) is not None)
        run = fx.Interpreter(fx.GraphModule(module, part)).run
        # The Python dispatcher decomposes composite ops; the C++ one may make numbers of symbolic sizes.
        with mode, fx.traceback.preserve_node_meta(), enable_python_dispatcher(), _levels_left():
            traced = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
        # torch's batching rules make numbers of a certain dtype of Python's.
        for node in traced.graph.find_nodes(op="call_function", target=aten._to_copy.default):
            if not isinstance(node.args[0], fx.Node):
                node.target = aten.scalar_tensor.default
        inputs = traced.graph.find_nodes(op="placeholder")
        inlined: dict[fx.Node, Any] = dict(zip(inputs, given, strict=True))
        with module.graph.inserting_before(inside[0]):
            results = module.graph.graph_copy(traced.graph, inlined)
        for node, result in zip(made, results, strict=True):  # type: ignore[arg-type]
            for user in [user for user in node.users if user not in own]:
                user.replace_input_with(node, result)
        for node in reversed(inside):
            module.graph.erase_node(node)
    module.recompile()


@contextlib.contextmanager
def _levels_left() -> Iterator[None]:
    """Leave the levels of torch.vmap that a failed trace entered."""
    functorch = torch._C._functorch
    before = functorch.maybe_current_level()
    try:
        yield
    finally:
        while functorch.maybe_current_level() != before:
            functorch._vmap_decrement_nesting()


def _vmapped(graph: fx.Graph) -> list[fx.Node]:
    """The first nodes of a graph from entering the outermost level of torch.vmap to leaving it."""
    found: list[fx.Node] = []
    level = 0
    for node in graph.nodes:
        of_vmap = getattr(node.target, "__module__", "") == "torch._functorch.predispatch"
        name = getattr(node.target, "__name__", "") if of_vmap else ""
        leaves = name.endswith("decrement_nesting")
        level += name.endswith("increment_nesting")
        if level or name:
            found.append(node)
        level -= leaves
        if leaves and not level:
            break
    return found
