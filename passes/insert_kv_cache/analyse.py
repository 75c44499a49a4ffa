"""Whether a graph's logits are computed token by token, and what to say where they are not.

Used by `insert_kv_cache`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from attngraph.capture.program.functional import RECURRENT
from attngraph.errors import NoDecoderError
from attngraph.ir import budgets
from attngraph.ir.graph import ProgramGraph, op_name, source_of
from attngraph.ir.graph.formula import are_few, holds
from attngraph.ir.language import expr as E
from attngraph.meaning.algebra.sizes import size_expression
from attngraph.meaning.check.region import region
from attngraph.meaning.tokens.facts import Kind
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.insert_kv_cache.every_token import give_every_token
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
    for dim, what in enumerate(("sequences", "tokens")):
        number = _fixed_number(shape[dim])
        if number is not None and (dim == 0 or number != distinct):
            where = _fixed_at(graph, number)
            reason = f"it fixes how many {what} there are to {number}{where}."
            raise NoDecoderError(reason, dim == 1, fixes_rows=dim == 0)
    tokens = _fixed_number(shape[1])
    names = str(shape[1].node.expr) if tokens is None else tokens, str(shape[0].node.expr)
    found = Tokens(graph, *names, refuted=refuted)
    picked = give_every_token(graph, found)
    if picked:
        outcome.notes.append(f"every token has the result that the model gives for the last ({picked})")
        found = Tokens(graph, *names, refuted=refuted)
    if tokens is not None:
        outcome.notes.append(f"the graph is of {tokens} tokens; those of a step are any number")
    (result,) = graph.graph.output_node().args[0]  # type: ignore[union-attr, misc, str-unpack]
    if found[result].kind is Kind.MIXING and tokens is None:  # type: ignore[index]
        found = Tokens(graph, *names, histories=True, refuted=refuted, assume_causal=assume_causal)
    _require_token_wise(graph, ids, found)
    return found


def _fixed_number(extent: int | torch.SymInt) -> int | None:
    """The number, if the trace allows no other for this size."""
    if isinstance(extent, int):
        return extent
    return int(extent.node.expr) if extent.node.expr.is_number else None


def _fixed_at(graph: ProgramGraph, number: int) -> str:
    """Where a size became this number, as torch recorded it, or the first operation by single tokens."""
    fixed = _lines(graph, lambda c: isinstance(c, sympy.Eq) and number in c.args)
    for line in fixed:
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
    (result,) = graph.graph.output_node().args[0]  # type: ignore[union-attr, misc, str-unpack]
    assert isinstance(result, fx.Node)
    fact = tokens[result]
    if fact.kind is Kind.MIXING:
        culprit = tokens.cause(result)
        source = source_of(culprit) or "an unknown line"
        pair = tokens.witness(culprit, result)
        seen = f" Token {pair[0]} sees token {pair[1]}." if pair else ""
        name = culprit.name if culprit.op == "placeholder" else op_name(culprit)
        raise NoDecoderError(
            f"{_of_longer_alone(graph, ids)}"
            f"{name} at {source}: {_explained(tokens, culprit, pair is not None)}.{seen}"
            f"{_no_sum(tokens, culprit)}"
            f"{_untested(tokens)}\n"
            "A decoder needs every token to be computed from itself and earlier tokens alone, where only "
            "attention, windows of tokens, running sums and loops of equal steps look at earlier ones.",
            _runs_forwards(culprit) or _is_of_few_lengths(graph, ids),
        )
    follows = fact.kind in (Kind.TOKEN, Kind.ATTENTION, Kind.SCAN)
    if not follows or tokens.space.place(fact.axes, tokens.space.token) is None:
        raise NoDecoderError("its result is not computed token by token from the tokens.")


def _runs_forwards(node: fx.Node) -> bool:
    """Whether it is a recurrent network, which a trace for one number of tokens writes out as a loop."""
    return node.target in RECURRENT and not node.args[7]


def _is_of_few_lengths(graph: ProgramGraph, ids: fx.Node) -> bool:
    """Whether the trace holds for some numbers of tokens alone, as that of a loop over blocks may. (One that
    holds up to some number, as with a table of positions, is none.)"""
    name, limits = _limits(graph, ids)
    return are_few(limits, name)


def _limits(graph: ProgramGraph, ids: fx.Node) -> tuple[str, list[Any]]:
    """The name of the number of tokens, and the trace's conditions on it alone."""
    extent = ids.meta["val"].shape[1]
    name = str(extent if isinstance(extent, int) else extent.node.expr)
    return name, [c for c in graph.conditions if {str(s) for s in c.free_symbols} == {name}]


def _of_longer_alone(graph: ProgramGraph, ids: fx.Node) -> str:
    """That the model does something else with short sequences, as a choice of a few does, and where."""
    name, limits = _limits(graph, ids)
    shortest = next((n for n in range(2, 1 << 12) if all(holds(c, {name: n}) for c in limits)), 2)
    if shortest == 2:
        return ""
    asked = _lines(graph, lambda c: {str(s) for s in c.free_symbols} == {name} and not holds(c, {name: 2}))
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
        own = (reason for node, reason in reasons.items() if culprit in region([node], known))
        reason = next(own, None)
        if reason is not None and not reason.startswith(f"the operation {op_name(culprit)} "):
            found += f" It is no {what}: {reason}."
    return found


def _untested(tokens: Tokens) -> str:
    """That what follows the first operation that mixes tokens may treat each by itself after all."""
    if tokens.probe.left > 0:
        return ""
    return (
        f" Whether what follows it treats each token by itself is not known: after {budgets.PROBES} tests no "
        "more are made."
    )


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
