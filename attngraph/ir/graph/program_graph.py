"""The program graph: an fx graph with everything it depends on as an input, a level, and its stages.

Weights, buffers and constants are placeholders, so a graph is a pure function: it can be run, checked
and compared on other values, and it never holds a copy of a weight. The runtime feeds the user's own
tensors at every call. A level states invariants of the graph, which `verify.py` checks after every pass.

A graph may be split into stages by how often they run: values that depend only on weights are computed when a
weight changes, values that depend only on the prompt once per prompt, the rest at every call. A stage is a
separate graph; its results are inputs of the graphs that run more often. The state of a decoder's graph is
what one call keeps for the next.
"""

import dataclasses
import enum
import itertools
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._sympy.symbol import SymT, symbol_is_type

from attngraph.ir.graph.formula import holds
from attngraph.ir.graph.ranks import Ranks
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import CachePlan
from attngraph.ir.walk import operands_first, reached


class Level(enum.IntEnum):
    """How far a graph has been compiled."""

    CAPTURED = 0
    CANONICAL = 1
    FUSED = 2
    CACHED = 3
    LOWERED = 4


class Rate(enum.Enum):
    """How often a stage runs. The value is the `Input.kind` under which the graph takes its results; of the
    last one, under which it takes results of the graph."""

    WEIGHTS = "weights"  # when a weight has changed
    PROMPT = "prompt"  # once for each prompt
    LOOK = "look"  # when somebody looks at a result that waits


RESULTS = "value", "attribute"
"""The kinds of outputs that are results of a call: what it returns, and what attributes are set to. They may
wait until somebody looks at them."""

BEFORE = Rate.WEIGHTS, Rate.PROMPT
"""The stages that run before the graph."""


@dataclasses.dataclass(frozen=True)
class Input:
    """What a placeholder stands for: `kind` is "parameter", "buffer", "constant" or "argument"; `name`
    is the qualified name in the user's model, or the number of the argument leaf. The result of a stage has
    the stage's `Rate` as its kind and the result's name. A decoder's graph also has "pages" of a store,
    "carried" values of the rows, and "rows", which map tokens to sequences. A graph for several ranks has a
    rank's "shard" of parameters, and "places", numbers that differ by rank (`ranks.py`)."""

    kind: str
    name: str

    @property
    def label(self) -> str:
        """The name as the user knows it, without the wrapper that the model was captured in."""
        return self.name.removeprefix("model.")


@dataclasses.dataclass(frozen=True)
class Output:
    """What a result is: a "value" returned to the caller (of a stage: to the inputs of that name), the new
    contents of a "buffer" or "argument", a tensor of what an "attribute" of the model is set to, the
    condition of a "check" that must be true, or of a decoder's that each token is "shown" a key, new entries
    for the "pages" of a store, the next of a "carried" value, or what the stage "look" takes. Of that stage
    it may be what a fused value of the graph stands for and is "tied" to (`ir/ops/others.py`); `name` is the
    number.

    `order`: the dimensions of the model's own result from slowest to fastest in memory, because the caller
    may rely on its layout; empty if it is not dense. `place`: of a result that the stage "look" computes, its
    number among the values and attributes of the call, and `look`, the number of what is computed together.
    """

    kind: str
    name: str = ""
    order: tuple[int, ...] = ()
    place: int | None = None
    look: int | None = None


@dataclasses.dataclass
class ProgramGraph:
    """One captured computation.

    Attributes:
        inputs, outputs: one for each placeholder and each result, in order.
        constants: tensors made by the model's code itself, by name.
        values: tensors whose contents are known when compiling (buffers and constants), by placeholder.
        assumed: placeholders whose contents a rewrite relied on; the executable guards them.
        gradients: whether gradients may flow (captured with grad mode on).
        conditions: sympy relations between sizes that the trace assumes.
        hints: the sizes of the example inputs, by symbol.
        stages: the graphs that run less often and whose results this one takes.
        state: what a decoder's graph keeps from one call to the next.
        ranks: whom the graph is for, if several ranks run it together.
        unordered: operations whose sums have no fixed order; None where none was asked for.
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
    stages: "dict[Rate, ProgramGraph]" = dataclasses.field(default_factory=dict)
    state: CachePlan | None = None
    ranks: Ranks | None = None
    unordered: tuple[str, ...] | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    def given(self) -> dict[fx.Node, Input]:
        """What each placeholder stands for, in their order."""
        return dict(zip(self.placeholders(), self.inputs, strict=True))

    def pages(self) -> dict[str, fx.Node]:
        """The inputs that are pages of a decoder's stores, by the name of the store."""
        return {given.name: node for node, given in self.given().items() if given.kind == "pages"}

    def results(self) -> list[Any]:
        """The nodes of the results, in their order."""
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def add_input(self, given: Input, value: Any, name: str = "") -> fx.Node:
        """A placeholder more, the last, of this fake value."""
        placeholders = self.placeholders()
        after, before = self.graph.inserting_after, self.graph.inserting_before
        with after(placeholders[-1]) if placeholders else before(next(iter(self.graph.nodes))):
            node: fx.Node = self.graph.placeholder(name or f"{given.kind}_{len(placeholders)}")
        node.meta["val"] = value
        self.inputs = (*self.inputs, given)
        return node

    def empty(self, shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
        """A tensor without data; None in the shape is a new symbolic size."""
        mode, sizes = self.fake_mode(), list[Any]()
        with mode:
            for extent in shape:
                sizes.append(mode.shape_env.create_unbacked_symint() if extent is None else extent)
                torch._check(extent is not None or sizes[-1] >= 2)
            return torch.empty(sizes, dtype=dtype, device=device)

    def op_count(self) -> int:
        """The number of nodes that compute: inputs, the output and size queries are not counted."""
        return sum(1 for n in self.graph.nodes if n.op == "call_function" and not is_size(n))

    def admits(self, sizes: Mapping[str, int]) -> bool:
        """Whether the graph is valid for these sizes; conditions on symbols not given are not checked."""
        return all(holds(condition, sizes) for condition in self.conditions)

    def attentions(self) -> list[fx.Node]:
        """The attentions over whole sequences, in order. Each has its report entry as `meta["attention"]`."""
        return [n for n in self.graph.nodes if nodes.whole(n) is not None]

    def copy(self) -> "ProgramGraph":
        """A copy with its own nodes; tensors and metadata are shared."""
        made = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            copies[node] = made.node_copy(node, copies.__getitem__)
        return dataclasses.replace(
            self, module=as_module(made), assumed=set(self.assumed), stages=dict(self.stages)
        )

    def fake_mode(self) -> Any:
        inputs = (n for n in self.graph.nodes if n.op == "placeholder")  # found early: they come first
        modes = (getattr(n.meta.get("val"), "fake_mode", None) for n in inputs)
        return next((m for m in modes if m is not None), None)

    def known_values(self) -> dict[fx.Node, Tensor]:
        return {n: self.values[n.name] for n in self.placeholders() if n.name in self.values}

    def reach(self, level: Level) -> None:
        """Put the graph and its stages at a level; `verify.py` checks what it promises."""
        self.level = level
        for stage in self.stages.values():
            stage.reach(level)

    def drop_inputs(self, unneeded: Callable[[fx.Node, Input], bool]) -> None:
        """Remove the placeholders for which `unneeded` is true; they must have no users."""
        kept: list[Input] = []
        for node, given in self.given().items():
            if unneeded(node, given):
                self.graph.erase_node(node)
            else:
                kept.append(given)
        self.inputs = tuple(kept)
        self.module.recompile()

    def written(self) -> fx.GraphModule:
        """The module with its Python code written now: Dynamo cannot trace one that writes it when called."""
        _LazyGraphModule.force_recompile(self.module)
        return self.module

    def clean(self) -> None:
        """Remove unused nodes and inputs, and recompile the module."""
        self.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or is_assertion(n))
        self.module.recompile()


def as_module(graph: fx.Graph) -> fx.GraphModule:
    """A graph as a module, whose Python code is written when it is first called: passes change a graph many
    times, and none calls it."""
    return _LazyGraphModule({}, graph)


def move_to_stage(graph: ProgramGraph, rate: Rate, values: Mapping[str, fx.Node]) -> None:
    """Move the computation of `values` to a stage; in the graph an input of the given name replaces each.
    Inputs that only the stage needs move with it."""
    part, before = part_of(graph, values), graph.stages.get(rate)
    first = 0 if before is None else len(before.outputs)
    graph.stages[rate] = part if before is None else _joined(before, part, rate)
    for number, (name, value) in enumerate(values.items(), start=first):
        made = graph.add_input(Input(rate.value, name), value.meta["val"], f"{rate.value}_{number}")
        value.replace_all_uses_with(made)
    moved = set(part.inputs)
    graph.clean()
    graph.drop_inputs(lambda node, given: given in moved and not node.users)


def _joined(stage: ProgramGraph, part: ProgramGraph, rate: Rate) -> ProgramGraph:
    """The stage, which computes the results of another part as well, and may give that what it takes."""
    results: list[Any] = stage.results()
    made = {Input(rate.value, o.name): n for o, n in zip(stage.outputs, results, strict=True)}
    made |= {given: node for node, given in stage.given().items()}
    copies: dict[fx.Node, fx.Node] = {}
    for node, given in part.given().items():
        copies[node] = made[given] if given in made else stage.add_input(given, node.meta["val"], node.name)
    end = stage.graph.output_node()
    with stage.graph.inserting_before(end):
        for node in part.graph.nodes:
            if node.op == "call_function":
                copies[node] = stage.graph.node_copy(node, copies.__getitem__)
    end.args = ((*results, *(copies[n] for n in part.results())),)
    stage.outputs += part.outputs
    stage.clean()
    return stage


def part_of(
    graph: ProgramGraph, values: Mapping[str, fx.Node], given: Mapping[fx.Node, Input] = MappingProxyType({})
) -> ProgramGraph:
    """A separate graph that computes these values of a graph, with only the inputs that they need. `given`:
    values that are inputs of it too."""
    needed = computed_from(values.values(), given)
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    known = {**dict(zip(graph.placeholders(), graph.inputs, strict=False)), **given}
    taken = [node for node in (*graph.placeholders(), *given) if node in needed]
    for node in (*taken, *(n for n in graph.graph.nodes if n in needed and n not in known)):
        is_input = node in known and node.op != "placeholder"
        copies[node] = made.placeholder(node.name) if is_input else made.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    made.output(tuple(copies[value] for value in values.values()))
    inputs = tuple(known[node] for node in taken)
    kinds = {given.kind for given in inputs}
    return dataclasses.replace(
        graph, module=as_module(made), inputs=inputs,
        outputs=tuple(Output("value", name) for name in values), assumed=set(graph.assumed),
        stages={rate: stage for rate, stage in graph.stages.items() if rate.value in kinds}, state=None,
    )  # fmt: skip


def computed_from(values: Iterable[fx.Node], until: Container[fx.Node] = ()) -> set[fx.Node]:
    """The values and all that they are computed from; `until`: what is known besides."""
    return set(reached(values, lambda node: () if node in until else node.all_input_nodes))


def replace_in_other_users(node: fx.Node, made: fx.Node) -> None:
    """Let what is made from a node take its place in all its other users."""
    node.replace_all_uses_with(made, lambda user: user is not made)


def keep_sizes(old: fx.Node, new: fx.Node) -> None:
    """Let a node that takes the place of an equal one have its sizes: what follows was inferred from these,
    and other formulas of the same numbers need not be known to be equal."""
    before = old.meta["val"]
    if not isinstance(before, Tensor):
        return
    after = new.meta["val"]
    if [str(n) for n in before.shape] != [str(n) for n in after.shape]:
        with after.fake_mode:
            about: dict[str, Any] = {"dtype": after.dtype, "device": after.device}
            new.meta["val"] = torch.empty_strided(before.shape, after.stride(), **about)


def is_size(node: fx.Node) -> bool:
    """Whether the node is a number (a size), not a tensor."""
    value = node.meta.get("val")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_empty(node: fx.Node) -> bool:
    """Whether the node is a tensor of no elements, as for a batch of no sequences."""
    extents = getattr(node.meta.get("val"), "shape", ())
    return any(isinstance(extent, int) and extent == 0 for extent in extents)


def is_measured(node: fx.Node) -> bool:
    """Whether the node is a number that follows from the contents of tensors, such as how many tokens chose
    an expert."""
    return is_size(node) and bool(measured_sizes(node))


def measured_sizes(node: fx.Node) -> set[Any]:
    """The sizes that only data know in a node's value: those of its shape, or of the number that it is."""
    value = node.meta.get("val")
    numbers = value.shape if isinstance(value, Tensor) else [value] if is_size(node) else []
    formulas = (n.node.expr for n in numbers if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)))
    found = reached(formulas, lambda formula: formula.args)
    return {s for s in found if s.is_Symbol and symbol_is_type(s, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))}


def makes_a_size(node: fx.Node) -> bool:
    """Whether a size that only data know is known from this node on: of the rows that a mask selects, say."""
    made_by = node.all_input_nodes[0] if node.target is operator.getitem else node
    return not measured_sizes(node) <= {s for n in made_by.all_input_nodes for s in measured_sizes(n)}


def is_random(target: Any, args: Sequence[Any]) -> bool:
    """Whether a call draws random numbers. A dropout that is switched off does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    given = dict(zip((a.name for a in target._schema.arguments), args, strict=False))
    return bool(given.get("train", True)) and 0.0 not in (given.get("dropout_p"), given.get("p"))


_KEPT = ("aten._assert_scalar.", "aten._assert_async.", "aten._functional_assert_async.")
"""Assertions: they have no users, but dead-code elimination must keep them."""


def is_assertion(node: fx.Node) -> bool:
    """Whether the node raises an error for certain values, and does nothing else."""
    return str(node.target).startswith(_KEPT)


def dependence(graph: fx.Graph) -> nx.DiGraph:
    """A read-only view of the graph for questions about it as a graph: an edge from each value to each
    node that uses it."""
    view = nx.DiGraph()
    view.add_nodes_from(graph.nodes)
    view.add_edges_from((node, user) for node in graph.nodes for user in node.users)
    return view


def sort(graph: fx.Graph) -> None:
    """Sort the nodes topologically; nodes already in a valid order keep it."""
    for before, node in itertools.pairwise(operands_first(graph.nodes, lambda node: node.all_input_nodes)):
        before.append(node)


def may_alias(op: Any) -> bool:
    """Whether an op's result may alias its first operand, according to the op's schema. Schemas of composite
    ops need not declare it."""
    is_torchs = isinstance(op, torch._ops.OpOverload)
    return is_torchs and any(argument.alias_info is not None for argument in op._schema.arguments)


def memory_of(node: fx.Node) -> fx.Node:
    """The node that allocated the memory of this node's value, found by following views."""
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
