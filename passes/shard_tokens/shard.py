"""ShardTokens: the tokens of whole sequences divided among ranks.

`meaning/placement/token_axis.py` finds which values a rank can compute for its own tokens; `twins.py` builds
them, and each is proved in float64, all ranks in one process, gradients included (`meaning/check/ranks.py`).
What mixes tokens in another way than attention is computed by every rank from all tokens, which are gathered,
and so are the model's results; the report says where and why. Never changes what the model computes, and
knows no model, module or parameter by name.

Ranks have equally many tokens, and about equally many pairs of a query and a key: a run of neighbours,
because then a window reaches over the fewest borders. Where that leaves ranks with unequal work (causal
masks), each rank has two runs, one as far from the beginning as the other is from the end, as far as the
number of tokens allows.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
from torch import fx

from attngraph.ir.graph import Axis, ProgramGraph, Ranks, is_size, source_of
from attngraph.ir.language import Expr, parse
from attngraph.ir.ops import nodes
from attngraph.ir.ops.collectives import SUM_GRADIENTS
from attngraph.ir.ops.token_collectives import ALL_TOKENS, FETCH_KEYS, TOKENS, Layout, needed_keys
from attngraph.ir.walk import reached
from attngraph.meaning import Meaning, is_part, size_expression
from attngraph.meaning.check.ranks import RankChecks
from attngraph.meaning.check.region import bytes_at, numbers_at, shape_at
from attngraph.meaning.masks.tiles import pairs_of_ranks
from attngraph.meaning.masks.words import describe
from attngraph.meaning.placement.demand import Unplaced
from attngraph.meaning.placement.elements import attention_of
from attngraph.meaning.placement.token_axis import QUERIES, TokenAxis
from attngraph.passes.build import Builder
from attngraph.passes.shard import Divide
from attngraph.passes.shard_tokens.prepare import equate_factors, measure_inputs, sum_losses
from attngraph.passes.shard_tokens.twins import Twins
from attngraph.report.ranks import ContextEntry, DividedTokens, FetchedEntry, WholeEntry

EVEN = 1.1
"""A rank may have this many times the mean of the pairs before tokens are divided in two runs."""


@dataclasses.dataclass(frozen=True)
class ShardTokens(Divide):
    """Divides the tokens of whole sequences, of each rank's part where heads are divided already."""

    group: str = "context"
    name: str = "shard-tokens"

    def divide(self, graph: ProgramGraph, ranks: Ranks, axis: Axis) -> list[str]:
        equate_factors(graph)
        measure_inputs(graph)
        sum_losses(graph)
        whole: list[WholeEntry] = []
        axes: list[DividedTokens] = []
        for size, attention in list(_token_sizes(graph)):
            try:
                axes.append(_divide(graph, size, axis, whole))
            except Unplaced as reason:
                whole.append(WholeEntry(source_of(attention), str(reason)))
        ranks.context = account(graph, axis, axes, whole)
        parts = ", ".join(f"{a.tokens} tokens of {a.attentions} attention(s)" for a in axes)
        return [f"{parts or 'no tokens'} divided among {axis.count} ranks"]


def _token_sizes(graph: ProgramGraph) -> Iterator[tuple[Expr, fx.Node]]:
    """The sizes that count queries of attentions, each with the first attention that has so many."""
    meaning, found = Meaning.of(graph), set[Expr]()
    for node in graph.attentions():
        view: Any = nodes.view(node)
        size = meaning.renamed(size_expression(view.q.meta["val"].shape[QUERIES]))
        if size not in found:
            found.add(size)
            yield size, node


def _divide(graph: ProgramGraph, size: Expr, axis: Axis, whole: list[WholeEntry]) -> DividedTokens:
    """Divide the tokens that one size counts, or Unplaced; what stays whole is added to `whole`."""
    meaning = Meaning.of(graph, complex_too=True, along_tokens=True)
    tokens = TokenAxis(graph, meaning, size, axis.group)
    if not any(map(attention_of, tokens.axes)):
        reasons = [r for n, r in tokens.whole.items() if attention_of(n)]
        raise Unplaced(next(iter(reasons), "no attention could be divided by tokens"))
    layout = choose_layout(graph, tokens, axis.count)
    twins = Twins(graph, tokens, layout, axis)
    proved = _working(tokens, _proved(graph, tokens, twins))
    total = graph.hints[str(size.value)]
    attentions = {a for n in proved if (a := attention_of(n)) is not None}
    of_ranks = tuple(pairs(graph, tokens, layout, total))
    found = DividedTokens(total, layout.count // axis.count, len(attentions), of_ranks)
    gathers = {n: r for n, r in tokens.whole.items() if any(o in proved for o in _operands(n))}
    _connect(graph, tokens, twins, proved)
    alive = set(graph.graph.nodes)
    whole += [WholeEntry(source_of(n), reason) for n, reason in gathers.items() if n in alive]
    return found


def _operands(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node is computed from; for one of several results, that all of them are."""
    source: Any = node.args[0] if is_part(node) else node
    return [n for n in source.all_input_nodes if not is_size(n)]


def _proved(graph: ProgramGraph, tokens: TokenAxis, twins: Twins) -> dict[fx.Node, fx.Node]:
    """The twin of every divided node for which it is proved that the ranks have its values and gradients."""
    checks, found = RankChecks(graph, twins.entering.learns), dict[fx.Node, fx.Node]()
    for node in [n for n in graph.graph.nodes if n in tokens.axes]:
        proof = Builder(graph, node)
        try:
            twin = twins.twin(node)
            problem = checks.same_value(node, twins.whole(proof, node, twin), _operands(node)).problem
            if problem:
                raise Unplaced(problem)
            found[node] = twin
        except Unplaced as reason:
            del tokens.axes[node]
            tokens.whole[node] = str(reason)
        proof.discard()
    return found


def _working(tokens: TokenAxis, proved: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """The divided values that are connected, through divided values, with an attention or a product. Others
    stand between values that every rank has whole: to send the results takes longer than to compute them."""
    around: dict[fx.Node, set[fx.Node]] = {node: set() for node in proved}
    for node in proved:
        for operand in _operands(node):
            if operand in proved:
                around[node].add(operand)
                around[operand].add(node)
    begins = (n for n in proved if attention_of(n) is not None or tokens.is_product(n))
    found = set(reached(begins, around.__getitem__))
    for node in proved.keys() - found:
        del tokens.axes[node]
    return {node: twin for node, twin in proved.items() if node in found}


def _connect(graph: ProgramGraph, tokens: TokenAxis, twins: Twins, proved: dict[fx.Node, fx.Node]) -> None:
    """Let twins follow each other, and gather what is needed whole elsewhere."""
    for (node, axes), own in twins.taken.items():
        if node in proved and tokens.axes[node] == axes:
            own.replace_all_uses_with(proved[node])
    for node, twin in proved.items():
        outside = [u for u in node.users if u not in proved and (u.users or u.op == "output")]
        if outside and not tokens.is_known(node):
            whole = twins.whole(Builder(graph, node), node, twin)
            for user in outside:
                user.replace_input_with(node, whole)
    graph.clean()


def account(
    graph: ProgramGraph, axis: Axis, axes: Sequence[DividedTokens], whole: Sequence[WholeEntry]
) -> ContextEntry:
    """The report's entry, with what ranks fetch of each other at the example's sizes. `axes`: how the tokens
    are divided, for each size that counts some."""
    summing = (n for n in graph.graph.nodes if n.target is SUM_GRADIENTS and str(n.args[-1]) == axis.group)
    sums = [bytes_at(n.meta["val"], graph.hints) for n in summing]
    return ContextEntry(axis.count, tuple(axes), tuple(_fetched(graph)), tuple(whole), (len(sums), sum(sums)))


def _fetched(graph: ProgramGraph) -> Iterator[FetchedEntry]:
    for node in graph.graph.nodes:
        args: Any = node.args
        if node.target is ALL_TOKENS:
            ranks = args[3]
            size = bytes_at(args[0].meta["val"], graph.hints) * (ranks - 1)
            yield FetchedEntry("all tokens of a value", source_of(node), (size,) * ranks, (0,) * ranks)
        if node.target is FETCH_KEYS:
            _, reads, sizes, program, chunks, ranks, _ = args
            layout, shape = Layout.of(chunks, ranks), shape_at(node.meta["val"], graph.hints)
            total = shape[TOKENS]
            needed = needed_keys(program, (), numbers_at(sizes, graph.hints), layout, total)
            each = bytes_at(node.meta["val"], graph.hints) // total
            owners = [int(needed[:, tokens].sum()) * each for tokens in layout.tokens(total)]
            yield FetchedEntry(
                "keys or values", source_of(node), tuple(int(n.sum()) * each for n in needed), tuple(owners),
                describe(parse(program)), bool(reads),
            )  # fmt: skip


# --- which tokens each rank has ---


def one_run(ranks: int) -> Layout:
    """Neighbouring tokens for each rank."""
    return Layout(tuple((rank,) for rank in range(ranks)))


def two_runs(ranks: int) -> Layout:
    """Early and late tokens for each rank."""
    return Layout(tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))


def choose_layout(graph: ProgramGraph, tokens: TokenAxis, ranks: int) -> Layout:
    """The layout for one size, which from then on must be one that can be divided so.

    Raises:
        Unplaced: the size is a number, or the tokens of the example cannot be divided equally.
    """
    size = tokens.space.tokens
    shapes = (getattr(node.meta.get("val"), "shape", ()) for node in graph.placeholders())
    symbols = [n.node.expr for shape in shapes for n in shape if not isinstance(n, int)]
    symbol = next((s for s in symbols if str(s) == size.value), None)
    total = graph.hints.get(str(size.value), 0)
    if size.op != "size" or symbol is None or not total:
        raise Unplaced(f"its {size!r} queries are no size of the model's inputs")
    if total % ranks:
        graph.conditions = (*graph.conditions, sympy.Ne(sympy.Mod(symbol, ranks), 0))
        raise Unplaced(f"{total} tokens cannot be divided equally among {ranks} ranks")
    found = one_run(ranks)
    uneven = _unevenness(graph, tokens, found, total)
    if uneven > EVEN:
        if total % (2 * ranks):
            graph.conditions = (*graph.conditions, sympy.Ne(sympy.Mod(symbol, 2 * ranks), 0))
        elif _unevenness(graph, tokens, two_runs(ranks), total) < uneven:
            found = two_runs(ranks)
    graph.conditions = (*graph.conditions, sympy.Eq(sympy.Mod(symbol, found.count), 0))
    return found


def pairs(graph: ProgramGraph, tokens: TokenAxis, layout: Layout, total: int) -> list[float]:
    """About how many pairs of a query and a key each rank computes, of all attentions whose queries and keys
    are these tokens."""
    every = []
    for node in graph.attentions():
        view = nodes.AttentionOp.of(node)
        keys = tokens.meaning.shape(view.keys[0])[2]
        divided = (n for n in (node, *node.users) if n in tokens.axes)
        if keys is tokens.space.tokens and node in map(attention_of, divided):
            sizes = numbers_at(view.sizes, graph.hints)
            every.append(pairs_of_ranks(view.program, sizes, layout, total))
    return [sum(of) for of in zip(*every, strict=True)] or [1.0] * layout.ranks


def _unevenness(graph: ProgramGraph, tokens: TokenAxis, layout: Layout, total: int) -> float:
    """How many times the mean of the pairs the busiest rank has."""
    found = pairs(graph, tokens, layout, total)
    return max(found) * len(found) / max(sum(found), 1.0)
