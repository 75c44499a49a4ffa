"""OrderSums: sums get one order, so that a token's results are the same numbers, bit for bit, whatever other
rows and tokens there are, and wherever its keys lie (batch invariance).

Matches token programs, attentions (of encoders, and over a cache), products with the weights of experts and
sums over earlier tokens, and has their kernels add up the same pieces in the same order, which follows from
positions and the model's sizes alone: programs then end with the line `in order`. (Before it,
`fuse-token-wise` makes such programs even of single operations.) Right without it is an operation whose
element is read, chosen, or computed with one rounding at most, and what follows from the model's own tensors
alone. All else is named in the notes: a product that is PyTorch's own, or an exponential, whose last bit
differs between the body of a vector loop and its end. The order is right because kernels say so
(`codegen/cpu/c`), and tests search for a bit that differs.
"""

import collections
import dataclasses
import operator
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from attngraph.ir.graph import Level, ProgramGraph, Rate, op_name, source_of
from attngraph.ir.language import E, Expr, ScoreProgram
from attngraph.ir.language import token_program as tokens
from attngraph.ir.ops import in_order as _in_order  # noqa: F401  (registers its op)
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import source_for_short_queries
from attngraph.ir.ops.kernels import candidates
from attngraph.ir.ops.latent_attention import LatentNode
from attngraph.ir.ops.token_program import is_supported
from attngraph.ir.walk import reached
from attngraph.meaning import Meaning, Unliftable
from attngraph.meaning.placement.elements import grouped
from attngraph.passes.build import Builder
from attngraph.pipeline import Outcome

_ROUNDED = frozenset({"add", "sub", "mul", "div", "recip", "sqrt"})
"""Operations of which IEEE 754 says every bit."""
_CHOSEN = frozenset({
    "read", "const", "var", "size", "where", "min", "max", "abs", "neg", "and", "or", "not", "floor", "ceil",
    "trunc", "round", "sign", "isnan", "float", "int", "floordiv", "mod", *E.COMPARISONS,
})  # fmt: skip
"""Operations that round nothing."""
_SELECTS = frozenset({
    "split", "split_with_sizes", "chunk", "unbind", "last_tokens", "scatter", "histc", "topk", "sort", "max",
    "min", "amax", "amin", "unique", "empty", "empty_strided",
})  # fmt: skip
"""Operations without an element rule whose floating results are numbers that they were given."""


@dataclasses.dataclass(frozen=True)
class OrderSums:
    serves: ClassVar[tuple[Level, ...]] = (Level.FUSED, Level.CACHED)
    name: str = "order-sums"
    requires: Level = Level.CACHED
    yields: Level = Level.CACHED

    def run(self, graph: ProgramGraph) -> Outcome:
        if graph.gradients:
            return Outcome(["values are those of the graph without gradients"])
        once = graph.stages.get(Rate.PROMPT)
        parts = [part for part in (once, graph) if part is not None]
        values = (node.meta.get("val") for node in graph.graph.nodes)
        floats = (v for v in values if isinstance(v, Tensor) and v.is_floating_point())
        device = next((v.device.type for v in floats), "cpu")
        fixed, told = 0, [f"all of it: there is no {'C compiler' if device == 'cpu' else 'Triton for it'}"]
        if is_supported(_ANY, device):
            left = collections.Counter[str]()
            fixed = sum(_ordered_part(part, left) for part in parts)
            told = [f"{what}{f', {n} times' * (n > 1)}" for what, n in left.items()]
        graph.unordered = tuple(told)
        return Outcome([f"one order of sums in {fixed} operation(s)", *(f"in no order: {t}" for t in told)])


def _ordered_part(graph: ProgramGraph, left: "collections.Counter[str]") -> int:
    """Give the sums of a graph one order; returns in how many operations. `left`: gets what has none."""
    meaning = Meaning({}, graph.conditions)
    own = (n for n in graph.placeholders() if graph.given()[n].kind in OWN)
    given = set(graph.placeholders()).difference(own)
    varies = set(reached(given, lambda node: node.users))  # all else follows from the model's own tensors
    fixed = 0
    for node in [n for n in graph.graph.nodes if n in varies and n.op == "call_function"]:
        if _is_ordered(graph, node):
            fixed += 1
        elif not _is_exact(meaning, node):
            left[f"{op_name(node)} at {source_of(node) or 'an unknown line'}"] += 1
    return fixed


_ANY = tokens.parse("r0[t, 1]\nr1[] = r0[t, 0]\nreturn r1[t]")
"""A program that every C compiler serves."""
OWN = "parameter", "buffer", "constant", "weights"
"""Kinds of inputs that are the model's own, whatever the call."""
_OURS = torch.ops.attngraph


def _is_ordered(graph: ProgramGraph, node: fx.Node) -> bool:
    """Whether a node's sums have one order, as it is written now, or by what has taken its place."""
    found = nodes.view(node)
    if isinstance(found, nodes.Attention | nodes.CachedAttention | nodes.CachedLatentAttention):
        program = dataclasses.replace(found.program, in_order=True)
        if not _is_served(found, program):
            return False
        node.args = found.replace(program=program).args
        node.kwargs = {}
        return True
    if node.target is _OURS.token_program.default:
        node.args = (node.args[0], dataclasses.replace(tokens.parse(str(node.args[1])), in_order=True).text)
        return True
    if node.target is _OURS.running_sum.default:
        node.kwargs = {**node.kwargs, "in_order": True}
        return True
    experts = grouped(node)
    if experts is None:
        return False
    operands = experts.x, experts.weight, experts.ends
    new = Builder(graph, node).call(_OURS.grouped_in_order.default, *operands)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return True


def _is_served(found: Any, program: ScoreProgram) -> bool:
    """Whether there is code that computes an attention in order."""
    q = found.q.meta["val"]
    if isinstance(found, nodes.Attention):
        operands = q, found.k.meta["val"], found.v.meta["val"]
        return any(k.in_order and k.refuse(program, operands) is None for k in candidates(q.device.type))
    pages = tuple(getattr(found, name).meta["val"] for name in found.page_names)
    if isinstance(found, nodes.CachedLatentAttention):
        key_up, value_up = (None if up is None else up.meta["val"] for up in (found.key_up, found.value_up))
        pages = LatentNode(q, found.latent.meta["val"], key_up, value_up, found.values).shared(*pages)
        q = q.new_empty((*q.shape[:3], pages[0].shape[3]))
    reads = [read.meta["val"] for read in found.reads]
    return bool(source_for_short_queries(program, q, (pages[0], pages[1]), reads)[0])


def _is_exact(meaning: Meaning, node: fx.Node) -> bool:
    """Whether an operation's floating results are the same numbers wherever they are computed."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or node.target is operator.getitem:  # one of several results
        values = value if isinstance(value, (tuple, list)) else ()
        floats = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
        return op_name(node) in _SELECTS or not floats
    if not value.is_floating_point() or op_name(node) in _SELECTS:
        return True
    try:
        element = meaning.element(node, meaning.places(node)[1])
    except (Unliftable, KeyError, ValueError):
        return False
    return _rounds_once(element)


def _rounds_once(element: Expr) -> bool:
    floating = [n for n in E.walk(element) if n.kind not in ("int", "bool")]
    divided = {n.args[1] for n in floating if n.op == "mul" and len(n.args) == 2 and n.args[1].op == "recip"}
    rounded = [n for n in floating if n.op in _ROUNDED and n not in divided]
    return len(rounded) <= 1 and all(n.op in _CHOSEN or n.op in _ROUNDED for n in floating)
