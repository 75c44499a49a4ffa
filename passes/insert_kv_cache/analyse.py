"""Whether a graph's logits are computed token by token, and what to say where they are not.

Used by `insert_kv_cache`.
"""

import bisect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from attngraph.capture.program.functional import RECURRENT
from attngraph.errors import NoDecoderError
from attngraph.ir import budgets
from attngraph.ir.graph import ProgramGraph, are_few, computed_from, holds, is_size, op_name, source_of
from attngraph.ir.language import expr as E
from attngraph.meaning.algebra.sizes import size_expression
from attngraph.meaning.check.region import region
from attngraph.meaning.tokens.facts import Kind
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.insert_kv_cache.every_token import give_every_token
from attngraph.passes.insert_kv_cache.join_pieces import BY_INDEX
from attngraph.pipeline import Outcome

aten = torch.ops.aten


def analyse(
    graph: ProgramGraph, ids: fx.Node, distinct: int, outcome: Outcome, refuted: Mapping[fx.Node, str],
    assume_causal: bool = False,
) -> Tokens:  # fmt: skip
    """The analysis: tokens are the second dimension of the input, the sequences of the batch the first.
    `refuted` says of values why they are no sums over earlier tokens, though they look like some.
    `assume_causal`: values of which that is not known are taken not to see later tokens.

    Raises:
        NoDecoderError: the input has another shape, or a token sees a later one.
    """
    shape = ids.meta["val"].shape
    rank = len(shape) - (1 if ids.meta["val"].is_floating_point() else 0)
    if rank != 2:
        raise NoDecoderError(f"its tokens have shape {tuple(shape)}, not [batch, tokens].")
    # A number where the trace allows no other for this size.
    sizes = [n if isinstance(n, int) else int(n.node.expr) if n.node.expr.is_number else None for n in shape]
    for dim, what in enumerate(("sequences", "tokens")):
        number = sizes[dim]
        if number is not None and (dim == 0 or number != distinct):
            reason = f"it fixes how many {what} there are to {number}{_fixed_at(graph, number)}."
            raise NoDecoderError(reason, dim == 1, fixes_rows=dim == 0)
    tokens = sizes[1]
    names = str(shape[1].node.expr) if tokens is None else tokens, str(shape[0].node.expr)
    found = Tokens(graph, *names, refuted=refuted)
    picked = give_every_token(graph, found)
    if picked:
        outcome.notes.append(f"every token has the result that the model gives for the last ({picked})")
        found = Tokens(graph, *names, refuted=refuted)
    if tokens is not None:
        outcome.notes.append(f"the graph is of {tokens} tokens; those of a step are any number")
    if found[graph.results()[0]].kind is Kind.MIXING and tokens is None:
        found = Tokens(graph, *names, histories=True, refuted=refuted, assume_causal=assume_causal)
    _require_token_wise(graph, ids, found)
    return found


def longer_trace(graph: ProgramGraph, length: str) -> int:
    """How many tokens a trace needs where this one holds for a few tokens alone, because of what it divides
    their number by: for all quotients to be more than 1, and on the other side of what was asked of them. 0
    where it holds for longer sequences, or where none is known to help."""

    own = [c for c in graph.conditions if _is_of(length, c)]
    quotients = {f for c in graph.conditions for f in c.atoms(FloorDiv) if _is_of(length, f)}
    numbers = {int(n) for f in quotients for n in f.args[1:] if n.is_Integer}
    traced = graph.hints.get(length, 0)

    def admits(condition: Any, near: int) -> bool:
        """Whether one of a few numbers of tokens is: a quotient may have to leave a rest."""
        return any(holds(condition, {length: n}) for n in (near, near + 1, near + 2))

    def bound_of(condition: Any) -> int:
        return bisect.bisect_left(lengths, True, traced, key=lambda n: not admits(condition, n))

    lengths = range(budgets.LEAST_TOKENS)
    few = [c for c in own if not admits(c, budgets.LEAST_TOKENS)]
    if not numbers or not few:
        return 0
    # A number of tokens that is less than one block is asked for without a quotient: where another quotient
    # ends the trace, the next one is long enough for blocks of all that the trace had tokens for.
    bound = max(bound_of(c) for c in [c for c in few if c.atoms(FloorDiv)] or few)
    wanted = max(2 * max(numbers), bound + max(numbers), 2 * bound) + 1
    return wanted if wanted <= budgets.LEAST_TOKENS else 0


def _is_of(size: str, formula: Any) -> bool:
    """Whether this is the one size in a formula, or a relation."""
    return {str(s) for s in formula.free_symbols} == {size}


def _fixed_at(graph: ProgramGraph, number: int) -> str:
    """Where a size became this number, as torch recorded it, or the first operation by single tokens."""
    for line in _lines(graph, lambda c: isinstance(c, sympy.Eq) and number in c.args):
        return f", at {line}"
    one_by_one = (n for n in graph.graph.nodes if n.target in (aten.unbind.int, aten.select.int))
    return next((f", at {op_name(n)} at {source_of(n)}" for n in one_by_one if source_of(n)), "")


def _lines(graph: ProgramGraph, is_meant: Callable[[Any], bool]) -> Iterator[str]:
    """The lines of the model that asked for these relations between sizes, as torch recorded them."""
    for guard in getattr(getattr(graph.fake_mode(), "shape_env", None), "guards", ()):
        found = re.search(r"([^\s(]+:\d+)", str(getattr(guard.sloc, "maybe_user_loc", None)))
        if found and is_meant(guard.expr):
            yield found[1]


def _require_token_wise(graph: ProgramGraph, ids: fx.Node, tokens: Tokens) -> None:
    """Raise NoDecoderError, with operation, line and tokens, unless the logits are token-wise."""
    (result,) = graph.results()
    fact = tokens[result]
    if fact.kind is Kind.MIXING:
        culprit = tokens.cause(result)
        source = source_of(culprit) or "an unknown line"
        pair = tokens.witness(culprit, result)
        seen = f" Token {pair[0]} sees token {pair[1]}." if pair else ""
        name = culprit.name if culprit.op == "placeholder" else op_name(culprit)
        # A trace for one number of tokens writes out a recurrent network as a loop. It may be that this one
        # holds for some numbers of tokens alone, as that of a loop over blocks. (One that holds up to some
        # number, as with a table of positions, is none.)
        size, limits = _limits(graph, ids)
        by_number = (culprit.target in RECURRENT and not culprit.args[7]) or are_few(limits, size)
        untested = (
            " Whether what follows it treats each token by itself is not known: after "
            f"{budgets.PROBES} tests no more are made."
        ) * (tokens.probe.left <= 0)
        raise NoDecoderError(
            f"{_of_longer_alone(graph, ids)}"
            f"{name} at {source}: {_explained(tokens, culprit, pair is not None)}.{seen}"
            f"{_no_sum(tokens, culprit)}{untested}\n"
            "A decoder needs every token to be computed from itself and earlier tokens alone, where only "
            "attention, windows of tokens, running sums and loops of equal steps look at earlier ones.",
            by_number,
        )
    if not fact.is_of_token or tokens.token_dim(result) is None:
        raise NoDecoderError("its result is not computed token by token from the tokens.")


def _limits(graph: ProgramGraph, ids: fx.Node) -> tuple[str, list[Any]]:
    """The name of the number of tokens, and the trace's conditions on it alone."""
    extent = ids.meta["val"].shape[1]
    name = str(extent if isinstance(extent, int) else extent.node.expr)
    return name, [c for c in graph.conditions if _is_of(name, c)]


def _of_longer_alone(graph: ProgramGraph, ids: fx.Node) -> str:
    """That the model does something else with short sequences, as a choice of a few does, and where."""
    name, limits = _limits(graph, ids)
    shortest = next((n for n in range(2, 1 << 12) if all(holds(c, {name: n}) for c in limits)), 2)
    if shortest == 2:
        return ""
    asked = _lines(graph, lambda c: _is_of(name, c) and not holds(c, {name: 2}))
    where = next((f" ({line})" for line in asked), "")
    return (
        f"the model does something else with sequences of fewer than {shortest} tokens{where}, and a decoder "
        "begins with such. In longer ones, "
    )


def _no_sum(tokens: Tokens, culprit: fx.Node) -> str:
    """Why what follows the first operation that mixes tokens is no carried sum, and no loop."""
    known = [n for n, f in tokens.facts.items() if f.kind is not Kind.MIXING]
    found = ""
    for what, reasons in (
        ("sum over earlier tokens that can be carried", tokens.sums.why_not),
        ("loop of equal steps", tokens.loops.why_not),
    ):
        reason = next((why for node, why in reasons.items() if culprit in region([node], known)), None)
        if reason is not None and not reason.startswith(f"the operation {op_name(culprit)} "):
            found += f" It is no {what}: {reason}."
    return found


def _explained(tokens: Tokens, culprit: fx.Node, sees_later: bool) -> str:
    """Why the first operation that mixes tokens is no obstacle that could be passed by."""
    reason, value = tokens[culprit].reason, culprit.meta.get("val")
    if culprit.target in RECURRENT and culprit.args[7]:
        return "it runs over the tokens in both directions"
    if sees_later:
        causality = tokens[culprit].causality
        return f"it sees later tokens ({causality.masks})" if causality and causality.masks else reason
    if culprit.target in (aten.conv1d.default, aten.convolution.default):
        return (
            "no value that follows it is computed, for each token, from the last tokens alone, with zeros "
            "before the first"
        )
    if isinstance(value, torch.Tensor):
        extents = [tokens.meaning.renamed(size_expression(n)) for n in value.shape]
        if sum(tokens.space.tokens in E.walk(n) for n in extents) > 1:
            return (
                f"{reason}: it has a value for each pair of tokens, and a decoder keeps values of single "
                "tokens (a mask that data choose is such a value)"
            )
    return reason


def require_no_places(tokens: Tokens, nodes: Iterable[fx.Node]) -> None:
    """Raise if one of these values takes tokens by an index that follows from their places, which among
    packed tokens would be others, whatever is computed from it.

    Raises:
        NoDecoderError: with the operation and its line.
    """
    for node in nodes:
        for source, dim, index in _indexed(node):
            axes = tokens[source].axes if source in tokens.facts else ()
            along = -len(axes) <= dim < len(axes) and tokens.space.token in axes[dim]
            sizes = {n for n in index.graph.nodes if is_size(n)} if along else ()
            if along and all(n.op != "placeholder" for n in computed_from([index], sizes)):
                raise NoDecoderError(
                    f"{op_name(node)} at {source_of(node)}: it takes tokens by an index that follows from "
                    "their places. Slice them, or leave the index out where it is a token's own place."
                )


def _indexed(node: fx.Node) -> Iterator[tuple[fx.Node, int, fx.Node]]:
    """The tensor that is read by an index, the dimension, and the index."""
    if node.target not in BY_INDEX:
        return
    source, *given = node.args[:3]
    pairs: list[tuple[Any, Any]] = [tuple(given)] if len(given) > 1 else []  # type: ignore[list-item]
    if node.target is aten.index.Tensor:
        pairs = list(enumerate(given[0]))  # type: ignore[arg-type]
    elif node.target is aten.take_along_dim.default:
        pairs = [(given[1], given[0])] if len(given) > 1 else []
    for dim, index in pairs:
        if isinstance(source, fx.Node) and isinstance(dim, int) and isinstance(index, fx.Node):
            yield source, dim, index
