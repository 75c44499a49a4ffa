"""From torch's exported program to our program graph.

Translates the signature, the shape environment and the higher-order regions of an ExportedProgram to the
terms of `ir/graph/program_graph.py`: inputs by what they stand for, writes as results, guards on sizes as
conditions.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.functions import FloorDiv, Mod

from attngraph.errors import CaptureError
from attngraph.ir.graph.call import argument
from attngraph.ir.graph.program_graph import Input, Level, Output, ProgramGraph, as_module

_KINDS = {
    "PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant", "USER_INPUT": "argument",
}  # fmt: skip
_READS_INSIDE = "export.access_subclass_inner_tensor.default"


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


def _size_of(value: Any) -> Any:
    """A size as a number or a sympy expression. (What a loop of Python's counts is a symbol of torch's whose
    expression is a number.)"""
    if isinstance(value, int):
        return value
    formula = value.node.expr
    return int(formula) if formula.is_Integer else formula


def arguments_of(graph: ProgramGraph) -> list[fx.Node]:
    """The inputs of a graph that are the call's arguments."""
    return [node for node, given in graph.given().items() if given.kind == "argument"]


def shapes_of(arguments: Sequence[fx.Node]) -> tuple[tuple[Any, ...], ...]:
    """Their shapes, in numbers and sympy expressions."""
    return tuple(tuple(map(_size_of, n.meta["val"].shape)) for n in arguments)


def conditions(program: ExportedProgram, env: ShapeEnv | None) -> Iterator[Any]:
    """Every relation between sizes that the trace assumes."""
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


def equal_sizes(conditions: Iterable[Any]) -> Iterator[frozenset[str]]:
    """Symbols that are equal by a condition from which torch does not see it: a * n = b * n."""
    for relation in conditions:
        if isinstance(relation, sympy.Eq) and not relation.has(FloorDiv, Mod):
            _, factors = sympy.factor_list(relation.lhs - relation.rhs)
            differences = [f for f, _ in factors if not f.is_positive]
            if len(differences) == 1 and differences[0].is_Add and len(differences[0].args) == 2:
                first, second = (abs(term) for term in differences[0].args)
                if first.is_Symbol and second.is_Symbol and differences[0].subs(first, second) == 0:
                    yield frozenset(map(str, (first, second)))


def program_graph(program: ExportedProgram, owner: nn.Module) -> ProgramGraph:
    """The exported graph with descriptions of its inputs and results; `owner` has the buffers.

    Raises:
        CaptureError: an executable cannot feed an input, or write back a result, of this kind.
    """
    signature, inputs = program.graph_signature, list[Input]()
    values: dict[str, Tensor] = {}
    constants: dict[str, Tensor] = {}
    written = {spec.target for spec in signature.output_specs if "MUTATION" in spec.kind.name}
    for spec in signature.input_specs:
        kind, name = _KINDS.get(spec.kind.name, ""), str(spec.target)
        placeholder = getattr(spec.arg, "name", "")
        if not kind:
            reason = "an object that is no tensor, a random generator for one, is an input of the graph"
            if spec.kind.name != "CUSTOM_OBJ":
                reason = f"an input of kind {spec.kind.name}"
            raise CaptureError(f"cannot capture the model: {reason}", reason)
        if kind == "argument":
            name = str(sum(given.kind == "argument" for given in inputs))
        elif kind == "constant":
            constants[name] = values[placeholder] = program.constants[name]
            if constants[name].requires_grad:
                raise CaptureError(
                    "the model uses a weight that is not one of its own, so no gradient would reach it.\n"
                    "What to do: register it as a parameter or a submodule.",
                    "a weight that is not the model's own",
                )
        else:
            name = _inside_of_wrapper(owner, name)
        if kind == "buffer" and name == spec.target and name not in written:
            buffer = owner.get_buffer(name)
            # A formula derived from its values would not give it a gradient.
            if not (buffer.requires_grad and torch.is_grad_enabled()):
                values[placeholder] = buffer
        inputs.append(Input(kind, name))
    values = {name: tensor for name, tensor in values.items() if not tensor.is_meta}  # meta tensors have none
    order = [spec.arg.name for spec in signature.input_specs if hasattr(spec.arg, "name")]
    results = program.graph.output_node().all_input_nodes
    orders = {n.name: memory_order(n.meta["val"]) for n in results if _is_tensor(n)}
    outputs: list[Output] = []
    for result in signature.output_specs:
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
        inner: dict[str, fx.Node] = {}
        for user in [u for u in node.users if str(u.target) == _READS_INSIDE and given.kind != "argument"]:
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


def write_out(graph: fx.Graph) -> None:
    """Write out what operations leave to their surroundings: the epsilon of an RMS norm, which in float64, in
    which proofs run graphs, would be another one (in 16-bit dtypes it differs between versions of torch, so
    those stay), and the dtype of tensors that are made with torch's default dtype, where the forward had set
    another one meanwhile."""
    for node in graph.nodes:
        value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
        if str(node.target) == "aten.rms_norm.default" and argument(node, "eps") is None:
            dtype = node.args[0].meta["val"].dtype
            if dtype in (torch.float32, torch.float64):
                weight = argument(node, "weight")
                node.args, node.kwargs = (*node.args[:2], weight, torch.finfo(dtype).eps), {}
        elif schema is not None and isinstance(value, Tensor) and value.dtype != torch.get_default_dtype():
            takes = any(a.name == "dtype" and a.kwarg_only for a in schema.arguments)
            if takes and value.is_floating_point() and not any(map(_is_tensor, node.all_input_nodes)):
                node.kwargs = {**node.kwargs, "dtype": node.kwargs.get("dtype") or value.dtype}


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the slowest in memory to the fastest; () if it is not dense, or
    if its sizes follow from data, where nobody can tell."""
    if free_unbacked_symbols(tensor):
        return ()
    hints = [s if isinstance(s, int) else s.node.hint for s in tensor.stride()]
    if None in hints:  # strides may follow from data where sizes do not
        return ()
    order = tuple(sorted(range(tensor.ndim), key=lambda d: (-hints[d], d)))
    return order if tensor.permute(order).is_contiguous() else ()
