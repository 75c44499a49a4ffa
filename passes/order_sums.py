"""OrderSums: a decoder's sums get one order, so that a token's results are the same numbers, bit for bit,
whatever other rows and tokens there are, and wherever its keys lie (batch invariance).

Matches token programs, attentions over a cache, products with the weights of experts and sums over earlier
tokens, and has their kernels add up the same pieces in the same order, which follows from positions and the
model's sizes alone: programs then end with the line `in order`. An operation that computes a token's results
from the same token's elements becomes such a program too. Right without it is an operation whose element is
read, chosen, or computed with one rounding at most, and what follows from the model's own tensors alone. All
else is named in the notes: a product that is PyTorch's own, or an exponential, whose last bit differs between
the body of a vector loop and its end. The order is right because kernels say so (`codegen/cpu/c`), and tests
search for a bit that differs.
"""

import collections
import dataclasses
import operator

import torch
from torch import Tensor, fx

from attngraph.ir.graph import Level, ProgramGraph, Rate, op_name, source_of
from attngraph.ir.language import E, Expr
from attngraph.ir.language import token_program as tokens
from attngraph.ir.ops import in_order as _in_order  # noqa: F401  (registers its op)
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import source_for_short_queries
from attngraph.ir.ops.latent_attention import LatentNode
from attngraph.ir.ops.token_program import is_supported
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
    name: str = "order-sums"
    requires: Level = Level.CACHED
    yields: Level = Level.CACHED

    def run(self, graph: ProgramGraph) -> Outcome:
        assert graph.state is not None
        if not is_supported(_ANY):
            told = "all of it: there is no C compiler"
            graph.state = dataclasses.replace(graph.state, unordered=(told,))
            return Outcome([f"in no order: {told}"])
        fixed, left = 0, collections.Counter[str]()
        meaning = Meaning({}, graph.conditions)
        varies = {n for n in graph.placeholders() if graph.given()[n].kind not in OWN}
        for node in list(graph.graph.nodes):
            if varies.isdisjoint(node.all_input_nodes):
                continue  # it follows from the model's own tensors alone: there is one such value
            varies.add(node)
            found = _ordered(graph, meaning, node)
            if found is not None:
                varies.add(found)
                fixed += 1
            elif node.op == "call_function" and not _is_exact(meaning, node):
                left[f"{op_name(node)} at {source_of(node) or 'an unknown line'}"] += 1
        once = () if Rate.PROMPT not in graph.stages else graph.stages[Rate.PROMPT].graph.nodes
        if not all(_is_exact(meaning, node) for node in once if node.op == "call_function"):
            left["what is computed once for a prompt (an encoder)"] += 1
        graph.state = dataclasses.replace(graph.state, unordered=tuple(left))
        named = [f"in no order: {what}{f', {n} times' * (n > 1)}" for what, n in left.items()]
        return Outcome([f"one order of sums in {fixed} operation(s)", *named])


_ANY = tokens.parse("r0[t, 1]\nr1[] = r0[t, 0]\nreturn r1[t]")
"""A program that every C compiler serves."""
OWN = "parameter", "buffer", "constant", "weights"
"""Kinds of inputs that are the model's own, whatever the call."""
_OURS = torch.ops.attngraph


def _ordered(graph: ProgramGraph, meaning: Meaning, node: fx.Node) -> fx.Node | None:
    """The node whose sums have one order: itself, as it is written now, or what takes its place; None where
    there is none."""
    found = nodes.view(node)
    if isinstance(found, nodes.CachedAttention | nodes.CachedLatentAttention):
        if not _is_served(found):
            return None
        node.args = found.replace(program=dataclasses.replace(found.program, in_order=True)).args
        node.kwargs = {}
        return node
    if node.target is _OURS.token_program.default:
        text = str(node.args[1])
        node.args = (node.args[0], dataclasses.replace(tokens.parse(text), in_order=True).text)
        return node
    if node.target is _OURS.running_sum.default:
        node.kwargs = {**node.kwargs, "in_order": True}
        return node
    experts = grouped(node)
    if experts is not None:
        operands = experts.x, experts.weight, experts.ends
        return _replaced(node, Builder(graph, node).call(_OURS.grouped_in_order.default, *operands))
    if node.op != "call_function" or _is_exact(meaning, node):
        return None
    program = _alone(meaning, node)
    if program is None:
        return None
    builder, (text, given) = Builder(graph, node), program
    whole = builder.call(_OURS.token_program.default, list(given), text)
    whole.meta = {**node.meta, "val": [node.meta["val"]]}
    return _replaced(node, builder.call(operator.getitem, whole, 0))


def _is_served(found: nodes.CachedAttention | nodes.CachedLatentAttention) -> bool:
    """Whether there is code that computes an attention over a cache in order."""
    q = found.q.meta["val"]
    pages = tuple(getattr(found, name).meta["val"] for name in found.page_names)
    if isinstance(found, nodes.CachedLatentAttention):
        key_up, value_up = (None if up is None else up.meta["val"] for up in (found.key_up, found.value_up))
        pages = LatentNode(q, found.latent.meta["val"], key_up, value_up, found.values).shared(*pages)
        q = q.new_empty((*q.shape[:3], pages[0].shape[3]))
    program = dataclasses.replace(found.program, in_order=True)
    reads = [read.meta["val"] for read in found.reads]
    return bool(source_for_short_queries(program, q, (pages[0], pages[1]), reads)[0])


def _replaced(node: fx.Node, new: fx.Node) -> fx.Node:
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


def _alone(meaning: Meaning, node: fx.Node) -> tuple[str, tuple[fx.Node, ...]] | None:
    """One operation as a token program, whose tokens are the one dimension that is no number, and what it is
    given; None where an element follows from other tokens, or from what C does not compute."""
    value = node.meta["val"]
    if value.dtype != torch.float32 or value.device.type != "cpu":
        return None
    try:
        shape = meaning.shape(node)
        (token,) = (d for d, n in enumerate(shape) if n.op != "const")
        own = [tokens.index(f"i{d}", int(n.value)) for d, n in enumerate(shape) if d != token and n.value > 1]
        indices = iter(own)
        at = [
            tokens.TOKEN if d == token else E.ZERO if n.value == 1 else next(indices)
            for d, n in enumerate(shape)
        ]
        element = meaning.element(node, tuple(at))
        given: dict[fx.Node, tokens.Given] = {}

        def leaf(found: Expr, args: tuple[Expr, ...]) -> Expr:
            if found.op != "read":
                return E.with_args(found, args)
            given.setdefault(found.value, _given(meaning, found.value, args))
            return E.read(list(given).index(found.value), args, found.kind)

        element = E.rebuild(element, leaf)
        fold, over = "", None
        if element.op in ("sum", "amax"):
            over = tokens.index("j", int(element.args[0].args[0].value))
            fold, element = element.op, E.replaced(element.args[1], {element.args[0]: over})
        extents = tuple(None if d == token else int(n.value) for d, n in enumerate(shape))
        made = tokens.Definition(tuple(own), element, fold, over)
        result = tokens.Result(len(given), extents)
        program = tokens.TokenProgram(tuple(given.values()), (made,), (result,), in_order=True)
        text = tokens.parse(program.text).text
    except (Unliftable, KeyError, ValueError, TypeError):
        return None
    return (text, tuple(given)) if is_supported(tokens.parse(text)) else None


def _given(meaning: Meaning, node: fx.Node, args: tuple[Expr, ...]) -> tokens.Given:
    """What is read at these indices. Raises Unliftable: of another token."""
    extents = tuple(int(n.value) if n.op == "const" else None for n in meaning.shape(node))
    if any((a is tokens.TOKEN) != (n is None) for a, n in zip(args, extents, strict=True)):
        raise Unliftable("of another token")
    return tokens.Given(extents, str(node.meta["val"].dtype).removeprefix("torch."))


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
