"""The program graph: an fx graph with everything it depends on as an input, and a level.

Weights, buffers and constants are placeholders, so a graph is a pure function: it can be run, checked
and compared on other values, and it never holds a copy of a weight. The executable feeds the user's
own tensors at every call. A level says which ops may occur; `verify` holds a pass to it.
"""

from __future__ import annotations

import dataclasses
import enum
import fractions
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import networkx as nx
import sympy
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._sympy.printers import PythonPrinter

from attngraph.errors import VerificationError
from attngraph.ir.ops.cached_attention import CachePlan


class Level(enum.IntEnum):
    """How far a graph has come."""

    CAPTURED = 0
    CANONICAL = 1
    FUSED = 2
    CACHED = 3
    LOWERED = 4


_ATTENTION = ("attngraph.attention.default", "attngraph.latent_attention.default")


@dataclasses.dataclass(frozen=True)
class Input:
    """What a placeholder stands for: `kind` is "parameter", "buffer", "constant" or "argument"; `name`
    is the qualified name in the user's model, or the number of the argument leaf. "ahead" is a value that
    weights alone give. A graph that decodes also has "pages" of a store, "fixed" values of its prelude, and
    "rows": which tokens are whose."""

    kind: str
    name: str

    @property
    def label(self) -> str:
        """The name as the user knows it, without the wrapper that the model was captured in."""
        return self.name.removeprefix("model.")


@dataclasses.dataclass(frozen=True)
class Output:
    """What a result is: "value" for the caller, the new contents of a "buffer" or "argument", or what goes
    to the "pages" of a store.

    `order`: its dimensions from the slowest in memory to the fastest as the model itself returns it, on
    which the caller may rely; empty where it is not dense.
    """

    kind: str
    name: str = ""
    order: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Pooling:
    """A parameter with fewer entries along `dim` than the model's: entry n is the mean of the entries
    `groups[n]`."""

    dim: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def saved(self) -> int:
        return sum(len(group) - 1 for group in self.groups)

    def apply(self, parameter: Tensor) -> Tensor:
        means = [parameter.index_select(self.dim, _index(g, parameter)).mean(self.dim) for g in self.groups]
        return torch.stack(means, self.dim)


def _index(places: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(places, device=like.device)


@dataclasses.dataclass
class ProgramGraph:
    """One captured computation.

    Attributes:
        inputs, outputs: one for each placeholder and each result, in order.
        constants: tensors made by the model's code itself, by name.
        values: tensors whose contents are known when compiling (buffers and constants), by placeholder.
        assumed: placeholders whose contents a rewrite relied on; the executable guards them.
        gradients: whether gradients may flow (captured with grad mode on).
        conditions: sympy relations between sizes that the trace took for granted.
        hints: the sizes of the example inputs, by symbol.
        cache: what a graph that decodes keeps between calls.
        prelude: computes what such a graph takes as "fixed", once for each prompt.
        ahead: computes what a graph takes as "ahead", from weights alone.
        pooled: parameters, by name, of which the graph takes means of entries instead of the entries.
    """

    module: fx.GraphModule
    level: Level
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: dict[str, Tensor]
    values: dict[str, Tensor]
    gradients: bool
    conditions: tuple[Any, ...] = ()
    hints: dict[str, int] = dataclasses.field(default_factory=dict)
    assumed: set[str] = dataclasses.field(default_factory=set)
    cache: CachePlan | None = None
    prelude: ProgramGraph | None = None
    ahead: ProgramGraph | None = None
    pooled: dict[str, Pooling] = dataclasses.field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    def op_count(self) -> int:
        """Computing nodes: no inputs, no output, no size queries."""
        return sum(1 for n in self.graph.nodes if n.op == "call_function" and not is_size(n))

    def admits(self, sizes: Mapping[str, int]) -> bool:
        """Whether the graph is valid for these sizes; symbols that are not named are not judged."""
        return all(holds(condition, sizes) for condition in self.conditions)

    def attentions(self) -> list[fx.Node]:
        """The attention nodes, in order. Each carries its report entry as `meta["attention"]`."""
        return [n for n in self.graph.nodes if n.op == "call_function" and str(n.target) in _ATTENTION]

    def copy(self) -> ProgramGraph:
        """The same computation in nodes of its own; tensors and facts are shared."""
        made = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            copies[node] = made.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
        return dataclasses.replace(self, module=fx.GraphModule({}, made), assumed=set(self.assumed))

    def fake_mode(self) -> Any:
        modes = [getattr(n.meta.get("val"), "fake_mode", None) for n in self.placeholders()]
        return next((m for m in modes if m is not None), None)

    def known_values(self) -> dict[fx.Node, Tensor]:
        return {n: self.values[n.name] for n in self.placeholders() if n.name in self.values}

    def clean(self) -> None:
        """Drop what nothing uses, and make the module match the graph."""
        self.graph.eliminate_dead_code(is_impure_node=_is_kept)
        self.module.recompile()


def part_of(graph: ProgramGraph, values: Sequence[fx.Node]) -> ProgramGraph:
    """A graph of its own that computes these values of a graph, from the inputs that they need."""
    needed: set[fx.Node] = set()
    stack = list(values)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    known = dict(zip(graph.placeholders(), graph.inputs, strict=False))
    for node in graph.graph.nodes:
        if node in needed:
            copies[node] = made.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
    made.output(tuple(copies[value] for value in values))
    inputs = tuple(known[node] for node in graph.placeholders() if node in needed)
    outputs = tuple(Output("value") for _ in values)
    module = fx.GraphModule({}, made)
    return dataclasses.replace(
        graph,
        module=module,
        inputs=inputs,
        outputs=outputs,
        assumed=set(graph.assumed),
        cache=None,
        prelude=None,
    )


def holds(condition: Any, sizes: Mapping[str, int]) -> bool:
    """Whether a sympy relation is true (or cannot be judged) for these sizes."""
    names, test = _compiled(condition)
    return any(name not in sizes for name in names) or bool(test(*(sizes[name] for name in names)))


@functools.lru_cache(maxsize=1 << 14)
def _compiled(condition: Any) -> tuple[tuple[str, ...], Callable[..., Any]]:
    """The names in a relation, and the relation as a function of their numbers: sympy needs a thousand times
    as long to put numbers in and simplify. Names of symbols do not become part of the code."""
    symbols = sorted(condition.free_symbols, key=str)
    names = tuple(map(str, symbols))
    if any(not _is_printed(f) for f in condition.atoms(sympy.Function)):
        return names, lambda *sizes: condition.subs(dict(zip(symbols, sizes, strict=True))) is not sympy.false
    printer = _PlacesForNames({symbol: f"_{place}" for place, symbol in enumerate(symbols)})
    code = f"lambda {', '.join(printer.places.values())}: {printer.doprint(condition)}"
    return names, eval(code, {"math": math, "torch": torch, "Fraction": fractions.Fraction})


def _is_printed(formula: Any) -> bool:
    """Whether torch's printer knows the function; it writes others down as if Python had them."""
    return hasattr(PythonPrinter, f"_print_{type(formula).__name__}")


class _PlacesForNames(PythonPrinter):
    """Torch's printer of formulas as Python, for places in place of names, with exact quotients."""

    def __init__(self, places: Mapping[Any, str]) -> None:
        super().__init__()
        self.places = places

    def _print_Symbol(self, symbol: Any) -> str:  # noqa: N802
        return self.places[symbol]

    def _print_Rational(self, number: Any) -> str:  # noqa: N802
        return f"Fraction({number.p}, {number.q})"

    def _print_Pow(self, power: Any) -> str:  # noqa: N802
        base, exponent = map(self._print, power.args)
        return f"(Fraction({base}) ** ({exponent}))" if power.exp.is_negative else super()._print_Pow(power)


def is_size(node: fx.Node) -> bool:
    """Whether the node is a number (a size), not a tensor."""
    value = node.meta.get("val")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


_KEPT = ("aten._assert_scalar.", "aten._assert_async.", "aten._functional_assert_async.")
"""Operations that are there for what they raise."""


def _is_kept(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or str(node.target).startswith(_KEPT)


def dependence(graph: fx.Graph) -> nx.DiGraph:
    """A read-only view of the graph for questions about it as a graph: an edge from each value to each
    node that uses it."""
    view = nx.DiGraph()
    view.add_nodes_from(graph.nodes)
    view.add_edges_from((node, user) for node in graph.nodes for user in node.users)
    return view


def sort(graph: fx.Graph) -> None:
    """Put every node after what it is computed from; nodes that stand right stay in their order."""
    order: dict[fx.Node, None] = {}
    for root in list(graph.nodes):
        stack = [(root, False)]
        while stack:
            node, visited = stack.pop()
            if visited:
                order[node] = None
            elif node not in order:
                stack.append((node, True))
                stack.extend((n, False) for n in reversed(node.all_input_nodes))
    for before, node in itertools.pairwise(order):
        before.append(node)


def may_alias(op: Any) -> bool:
    """Whether an op's result may lie in its first operand's memory, as torch's schema of the op says. The
    schemas of composite ops need not say."""
    is_torchs = isinstance(op, torch._ops.OpOverload)
    return is_torchs and any(argument.alias_info is not None for argument in op._schema.arguments)


def memory_of(node: fx.Node) -> fx.Node:
    """The node whose memory this one's value may share: through views, to what made it."""
    while node.target is operator.getitem or may_alias(node.target):
        (source, *_) = node.args
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def op_name(node: fx.Node) -> str:
    """`softmax` for aten.softmax.int, `attention` for attngraph.attention.default."""
    name = str(node.target) if not callable(node.target) or "." in str(node.target) else ""
    parts = name.split(".")
    return parts[1] if len(parts) >= 2 and "<" not in name else getattr(node.target, "__name__", name)


_FORBIDDEN: dict[Level, tuple[str, ...]] = {
    Level.CAPTURED: (),
    Level.CANONICAL: ("aten._assert_tensor_metadata",),
    Level.FUSED: ("aten._assert_tensor_metadata",),
    Level.CACHED: ("aten._assert_tensor_metadata",),
    Level.LOWERED: ("aten._assert_tensor_metadata",),
}


def verify(graph: ProgramGraph) -> None:
    """Hold a graph to the rules of its level: well-formed, shapes as inferred anew, only ops that the
    level allows, every attention with a kernel once lowered.

    Raises:
        VerificationError: naming the node and the rule.
    """
    graph.graph.lint()
    if len(graph.placeholders()) != len(graph.inputs):
        raise VerificationError(f"{len(graph.placeholders())} placeholders for {len(graph.inputs)} inputs")
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            raise VerificationError(f"{node}: a graph holds no attributes, every tensor is an input")
        if node.op != "call_function":
            continue
        if str(node.target).startswith(_FORBIDDEN[graph.level]):
            raise VerificationError(f"{node}: {node.target} may not occur at level {graph.level.name}")
        is_attention = str(node.target).startswith("attngraph.attention")
        if graph.level is Level.LOWERED and is_attention and not node.args[6]:
            raise VerificationError(f"{node}: no kernel was chosen for it")
        if isinstance(node.meta.get("val"), Tensor) and not _is_inferred(node):
            _check_shape(node)
            _note_inferred(node)  # so that only what a pass changed is inferred anew


def accept(graph: fx.Graph) -> None:
    """Take the values that a trace has just inferred for what they are: `verify` looks at what changes."""
    for node in graph.nodes:
        if node.op == "call_function":
            _note_inferred(node)


def _note_inferred(node: fx.Node) -> None:
    node.meta["inferred"] = (_spelling(node), [n.meta.get("val") for n in node.all_input_nodes])


def _is_inferred(node: fx.Node) -> bool:
    """Whether the op and its operands, with their values, are those that the value was inferred from."""
    spelling, values = node.meta.get("inferred", ("", ()))
    now = [n.meta.get("val") for n in node.all_input_nodes]
    return spelling == _spelling(node) and all(a is b for a, b in zip(values, now, strict=True))


def _spelling(node: fx.Node) -> tuple[str, str, str]:
    return str(node.target), str(node.args), str(node.kwargs)


def infer(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any = None) -> Any:
    """The fake result of an op on nodes' fake values; `mode` is used where no argument is a tensor."""
    values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    tensors = [v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, Tensor)]
    mode = getattr(tensors[0], "fake_mode", None) if tensors else mode
    if mode is None:
        return target(*values[0], **values[1])
    # Composite ops fix symbolic sizes to numbers unless Python's own dispatcher takes them apart, and
    # whatever is inferred after the trace must not add to what the trace took for granted.
    with mode, enable_python_dispatcher(), mode.shape_env.suppress_guards(), torch.no_grad():
        return target(*values[0], **values[1])


def _check_shape(node: fx.Node) -> None:
    recorded = node.meta["val"]
    try:
        found = infer(node.target, node.args, node.kwargs, getattr(recorded, "fake_mode", None))
    except (RuntimeError, ValueError, TypeError) as problem:
        raise VerificationError(
            f"{node}: {node.target} cannot be applied to its operands: {problem}"
        ) from problem
    if found.dtype != recorded.dtype or len(found.shape) != len(recorded.shape):
        raise VerificationError(
            f"{node}: recorded as {recorded.dtype}{list(recorded.shape)}, "
            f"but {node.target} gives {found.dtype}{list(found.shape)}"
        )
    for mine, theirs in zip(recorded.shape, found.shape, strict=True):
        if isinstance(mine, int) and isinstance(theirs, int) and mine != theirs:
            raise VerificationError(
                f"{node}: recorded as {list(recorded.shape)}, but {node.target} gives {list(found.shape)}"
            )
