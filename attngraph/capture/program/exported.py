"""From torch's exported program to our program graph.

Translates the signature, the shape environment and the higher-order regions of an ExportedProgram to the
terms of `ir/graph/program_graph.py`: inputs by what they stand for, writes as results, guards on sizes as
conditions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
import torch._functorch.predispatch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from attngraph.capture.instead import replaced
from attngraph.errors import CaptureError
from attngraph.ir.graph.program_graph import Input, Level, Output, ProgramGraph, as_module
from attngraph.ir.graph.source import source_of

_WRITTEN_OUT = frozenset(
    {
        "absolute", "negative", "multiply", "subtract", "divide", "true_divide", "greater", "greater_equal",
        "less", "less_equal", "not_equal", "clip", "float_power", "concatenate", "hstack", "vstack",
        "row_stack", "dstack", "column_stack", "atleast_1d", "atleast_2d", "atleast_3d", "fliplr", "flipud",
        "meshgrid", "broadcast_tensors", "take_along_dim", "ger", "linalg_matmul", "linalg_multi_dot",
        "chain_matmul", "linalg_vecdot", "cosine_similarity", "special_softmax", "special_log_softmax",
        "special_logsumexp", "special_expit", "special_exp2", "special_erf", "special_erfc",
        "special_expm1", "special_log1p", "special_round", "fix", "relu6", "selu", "isfinite", "isclose",
        "isreal", "diag",
    }
)  # fmt: skip
"""Ops that are aliases or plain compositions of other ops, in eager mode too."""

for _name in ("lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting"):
    # Entering and leaving a level of torch.vmap affects every node in between.
    fx.has_side_effect(getattr(torch._functorch.predispatch, _name))


def hints(arguments: Sequence[fx.Node], computed: Iterable[fx.Node] = ()) -> dict[str, int]:
    """The sizes of the example inputs, by symbol. A data-dependent size (how many tokens a mask selects) is
    unknown before the graph runs; its hint is the largest of the other sizes."""
    extents = [s for n in arguments for s in n.meta["val"].shape if not isinstance(s, int)]
    found = {str(s.node.expr): int(s.node.hint) for s in extents if s.node.expr.is_Symbol}
    largest = max((int(s) for n in arguments for s in n.meta["val"].shape if isinstance(s, int)), default=1)
    largest = max([largest, *found.values()])
    for node in computed:
        value = node.meta.get("val")
        for extent in (value,) if isinstance(value, torch.SymInt) else getattr(value, "shape", ()):
            if not isinstance(extent, int):
                for symbol in extent.node.expr.free_symbols:
                    found.setdefault(str(symbol), largest)
    return found


def size_of(value: Any) -> Any:
    """A size as a number or a sympy expression. (What a loop of Python's counts is a symbol of torch's whose
    expression is a number.)"""
    if isinstance(value, int):
        return value
    formula = value.node.expr
    return int(formula) if formula.is_Integer else formula


def shape_env(arguments: Sequence[fx.Node]) -> Any:
    """Torch's shape environment of these inputs; None if there is none."""
    modes = [getattr(n.meta["val"], "fake_mode", None) for n in arguments]
    return next((m.shape_env for m in modes if m is not None), None)


def conditions(program: ExportedProgram, arguments: Sequence[fx.Node]) -> Iterator[Any]:
    """Every relation between sizes that the trace assumes."""
    env = shape_env(arguments)
    if env is None:
        return
    for guard in env.guards:
        relation = env.simplify(guard.expr)
        if relation not in (True, sympy.true):
            yield relation
    for symbol, limits in program.range_constraints.items():
        if isinstance(symbol, sympy.Symbol):
            if limits.lower.is_Integer:
                yield sympy.Ge(symbol, max(int(limits.lower), 0))
            if limits.upper.is_Integer:
                yield sympy.Le(symbol, int(limits.upper))


def complete_users(module: fx.GraphModule) -> None:
    """Let each node know all its users. torch.export forgets some: with gradients off, the views of a tensor
    that is then written under `torch.no_grad()`."""
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            for operand in node.all_input_nodes:
                operand.users.setdefault(node, None)


def switches_gradients_on(module: fx.GraphModule) -> CaptureError | None:
    """The refusal of a trace without gradients in which the forward switches them on: its results may have
    gradients, and a graph is called as its caller says."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return None  # in inference mode nothing has gradients
    for node in module.graph.nodes:
        if "wrap_with_set_grad_enabled" in str(node.target) and node.args[0]:
            inner = getattr(module, str(node.args[1].target))
            line = next(filter(None, map(source_of, inner.graph.nodes)), "")
            what = "forward() switches gradients on, which its caller has switched off"
            return CaptureError(
                f"{what}{f', at {line}' if line else ''}. The results of a graph have none then.\n"
                "What to do: call the model with gradients, or compile without strict=True.",
                what,
                line,
                lasting=False,
            )
    return None


def inline_grad_regions(module: fx.GraphModule) -> None:
    """Inline the body of every `with torch.no_grad()` region, and detach its results and what it writes to
    tensors, which has the same effect in a pure function."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or "wrap_with_set_grad_enabled" not in str(node.target):
            continue
        enabled, body, *inputs = node.args
        inner = getattr(module, str(body.target))
        inline_grad_regions(inner)
        copies: dict[fx.Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), inputs, strict=True))
        with module.graph.inserting_before(node):
            for step in inner.graph.nodes:
                if step.op not in ("placeholder", "output"):
                    copies[step] = module.graph.node_copy(step, copies.__getitem__)
                    if not enabled and getattr(getattr(step.target, "_schema", None), "is_mutable", False):
                        _detach_what_is_written(copies[step])
            results = fx.map_arg(inner.graph.output_node().args[0], copies.__getitem__)
            if not enabled:
                results = [_detached(module.graph, r) for r in results]
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _detach_what_is_written(write: fx.Node) -> None:
    """Cut gradients of all operands but the one that is written to."""
    target, *others = write.args
    with write.graph.inserting_before(write):
        found = fx.map_arg((others, write.kwargs), lambda n: _detached(write.graph, n))
    write.args, write.kwargs = (target, *found[0]), found[1]


@functools.cache
def written_out() -> dict[Any, Callable[..., Any]]:
    """Decompositions of the ops that are aliases or compositions of ops with element rules."""
    known = torch.export.default_decompositions()
    return {op: known[op] for op in known if _is_written_out(str(op))}


def _is_written_out(op: str) -> bool:
    namespace, name, *_ = op.split(".")
    return namespace == "aten" and name in _WRITTEN_OUT


def batches_left_first() -> contextlib.AbstractContextManager[Any]:
    """While it is active, torch.vmap leaves a level with the batch as the first dimension and moves it then
    (`out_dims`): torch.export cannot record the other way."""
    leave = torch._functorch.vmap._remove_batch_dim  # type: ignore[attr-defined]

    def first(value: Tensor, level: int, size: Any, dim: int) -> Tensor:
        left: Tensor = leave(value, level, size, 0)
        return left.movedim(0, dim)

    return replaced("torch._functorch.vmap", "_remove_batch_dim", first)


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
        mode = next(m for v in values if (m := getattr(v, "fake_mode", None)) is not None)
        run = fx.Interpreter(fx.GraphModule(module, part)).run
        # The Python dispatcher decomposes composite ops; the C++ one may make numbers of symbolic sizes.
        with mode, fx.traceback.preserve_node_meta(), enable_python_dispatcher(), _levels_left():
            traced = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
        _write_numbers(traced.graph)
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


def _write_numbers(graph: fx.Graph) -> None:
    """Write numbers of a certain dtype, which torch's batching rules make of Python's, as operations."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        if not isinstance(node.args[0], fx.Node):
            node.target = torch.ops.aten.scalar_tensor.default


def _vmapped(graph: fx.Graph) -> list[fx.Node]:
    """The first nodes of a graph from entering the outermost level of torch.vmap to leaving it."""
    found: list[fx.Node] = []
    level = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if _enters_vmap(node) else ""
        level += name.endswith("increment_nesting")
        if level or name:
            found.append(node)
        level -= name.endswith("decrement_nesting")
        if found and not level and name.endswith("decrement_nesting"):
            return found
    return found


def _enters_vmap(node: fx.Node) -> bool:
    """Whether the node enters or leaves a level of torch.vmap, which affects every node in between."""
    return getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return node
    made: fx.Node = graph.call_function(torch.ops.aten.detach.default, (node,))
    made.meta = dict(node.meta)
    return made


def program_graph(program: ExportedProgram, owner: nn.Module) -> ProgramGraph:
    """The exported graph with descriptions of its inputs and results; `owner` has the buffers.

    Raises:
        CaptureError: an executable cannot feed an input, or write back a result, of this kind.
    """
    kinds = {
        "PARAMETER": "parameter",
        "BUFFER": "buffer",
        "CONSTANT_TENSOR": "constant",
        "USER_INPUT": "argument",
    }
    inputs: list[Input] = []
    values: dict[str, Tensor] = {}
    constants: dict[str, Tensor] = {}
    arguments = 0
    written = {spec.target for spec in program.graph_signature.output_specs if "MUTATION" in spec.kind.name}
    for spec in program.graph_signature.input_specs:
        kind = kinds.get(spec.kind.name)
        if kind is None:
            reason = "an object that is no tensor, a random generator for one, is an input of the graph"
            if spec.kind.name != "CUSTOM_OBJ":
                reason = f"an input of kind {spec.kind.name}"
            raise CaptureError(f"cannot capture the model: {reason}", reason)
        name = (
            _inside_of_wrapper(owner, str(spec.target))
            if kind in ("parameter", "buffer")
            else str(spec.target)
        )
        placeholder = getattr(spec.arg, "name", "")
        if kind == "argument":
            name, arguments = str(arguments), arguments + 1
        elif kind == "constant":
            constants[name] = values[placeholder] = program.constants[name]
            if constants[name].requires_grad:
                raise CaptureError(
                    "the model uses a weight that is not one of its own, so no gradient would reach it.\n"
                    "What to do: register it as a parameter or a submodule.",
                    "a weight that is not the model's own",
                )
        elif (
            kind == "buffer"
            and name == spec.target
            and not (name in written or _wants_gradient(owner.get_buffer(name)))
        ):
            values[placeholder] = owner.get_buffer(name)
        inputs.append(Input(kind, name))
    values = {name: tensor for name, tensor in values.items() if not tensor.is_meta}  # meta tensors have none
    outputs: list[Output] = []
    order = [spec.arg.name for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")]
    orders = {
        n.name: memory_order(n.meta["val"])
        for n in program.graph.output_node().all_input_nodes
        if isinstance(n.meta.get("val"), Tensor)
    }
    for result in program.graph_signature.output_specs:
        match result.kind.name:
            case "USER_OUTPUT":
                outputs.append(Output("value", order=orders.get(result.arg.name, ())))
            case "BUFFER_MUTATION":
                outputs.append(Output("buffer", str(result.target)))
            case "USER_INPUT_MUTATION":
                outputs.append(Output("argument", inputs[order.index(str(result.target))].name))
            case other:
                raise CaptureError(f"cannot capture a result of kind {other}", other)
    inputs = _taken_apart(program.graph, inputs, constants, values)
    return ProgramGraph(
        as_module(program.graph), Level.CAPTURED, tuple(inputs), tuple(outputs), constants, values,
        torch.is_grad_enabled(),
    )  # fmt: skip


def _taken_apart(
    graph: fx.Graph, inputs: Sequence[Input], constants: dict[str, Tensor], values: dict[str, Tensor]
) -> list[Input]:
    """The inputs, with the tensors inside of a weight that wraps others (integers and their scales, say) in
    its place: a graph reads plain tensors, whose memory and versions are known."""
    found: list[Input] = []
    waiting = list(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))[::-1]
    while waiting:
        node, given = waiting.pop()
        reading = [] if given.kind == "argument" else [u for u in node.users if _reads_inside(u)]
        inner: dict[str, fx.Node] = {}
        for user in reading:
            name = str(user.args[1])
            if name not in inner:
                with graph.inserting_after(next(reversed(inner.values()), node)):
                    inner[name] = graph.placeholder(f"{node.name}_{name}")
                inner[name].meta = {key: user.meta[key] for key in ("val", "tensor_meta") if key in user.meta}
                if given.kind == "constant":
                    constants[f"{given.name}.{name}"] = getattr(constants[given.name], name)
                if node.name in values:
                    values[inner[name].name] = getattr(values[node.name], name)
            user.replace_all_uses_with(inner[name])
            graph.erase_node(user)
        if inner and not node.users:
            values.pop(node.name, None)
            if given.kind == "constant":
                constants.pop(given.name)
            graph.erase_node(node)
        else:
            found.append(given)
        parts = [(part, Input(given.kind, f"{given.name}.{name}")) for name, part in inner.items()]
        waiting += reversed(parts)
    return found


def _inside_of_wrapper(owner: nn.Module, name: str) -> str:
    """The name of a tensor inside of a weight that wraps it, which torch may name as if the weight were
    parametrized: `parametrizations.<weight>.original<number>`."""
    before, marker, rest = name.rpartition("parametrizations.")
    module = owner.get_submodule(before.removesuffix(".")) if marker else owner
    if not marker or hasattr(module, "parametrizations"):
        return name
    weight, _, original = rest.partition(".original")
    return f"{before}{weight}.{list(_names_inside(getattr(module, weight)))[int(original)]}"


def _names_inside(tensor: Any) -> Iterator[str]:
    """The names of the plain tensors inside of one that wraps others, in torch's order."""
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        deeper = _names_inside(part) if is_traceable_wrapper_subclass(part) else iter(("",))
        yield from (f"{name}.{below}" if below else name for below in deeper)


def _reads_inside(node: fx.Node) -> bool:
    return str(node.target) == "export.access_subclass_inner_tensor.default"


def write_epsilons(graph: fx.Graph) -> None:
    """Write out the epsilon of an RMS norm that leaves it to its dtype. Proofs run graphs in float64, where
    it would be another one. (In 16-bit dtypes it differs between versions of torch, so those stay.)"""
    for node in graph.nodes:
        if str(node.target) == "aten.rms_norm.default" and _argument(node, 3, "eps") is None:
            dtype = node.args[0].meta["val"].dtype
            if dtype in (torch.float32, torch.float64):
                weight = _argument(node, 2, "weight")
                node.args, node.kwargs = (*node.args[:2], weight, torch.finfo(dtype).eps), {}


def write_dtypes(graph: fx.Graph) -> None:
    """Write out the dtype of tensors that are made with torch's default dtype, where the forward had set
    another one meanwhile."""
    for node in graph.nodes:
        value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
        if schema is None or not isinstance(value, Tensor) or value.dtype == torch.get_default_dtype():
            continue
        takes = any(a.name == "dtype" and a.kwarg_only for a in schema.arguments)
        if takes and value.is_floating_point() and not any(_is_tensor(n) for n in node.all_input_nodes):
            node.kwargs = {**node.kwargs, "dtype": node.kwargs.get("dtype") or value.dtype}


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _wants_gradient(buffer: Tensor) -> bool:
    """Whether a buffer needs a gradient, which a formula derived from its values would not give it."""
    return buffer.requires_grad and torch.is_grad_enabled()


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the slowest in memory to the fastest; () if it is not dense, or
    if its sizes follow from data, where nobody can tell."""
    if free_unbacked_symbols(tensor):
        return ()
    hints = [s if isinstance(s, int) else s.node.hint for s in tensor.stride()]
    order = tuple(sorted(range(tensor.ndim), key=lambda d: (-hints[d], d)))
    return order if tensor.permute(order).is_contiguous() else ()
