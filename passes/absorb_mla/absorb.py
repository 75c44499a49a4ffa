"""AbsorbMLA: attention whose keys and values are projected from one narrow latent attends to the latent
instead.

Matches a fused attention whose keys and values are, for each head, a linear projection of a tensor that all
heads share and that is narrower than they are (`meaning/attention/latent.py`): multi-head latent attention,
however it is written. Right because a matrix can stand on either side of a dot product, q . (W c) = (W^T q)
. c, and before or after a weighted sum; every claim is checked in float64 in both forms. The projections
become operands of `attngraph::latent_attention`, which multiplies in the order that is cheaper at each call
(`ir/ops/cost.py`), so that a decoder caches the latent and not the keys. "fold" always absorbs, and
multiplies the projections with the adjacent weights in advance (`fold_weights.py`). A bias of the keys is the
same for all keys of a query and cancels in the softmax; one of the values is added to the result. Refuses,
with the reason, where something stands between the projection and the attention, where a bias does not
cancel, where nothing would be saved, and where gradients may flow.
"""

import dataclasses
import itertools
import operator
from typing import Any

import torch
from torch import fx

from attngraph.ir.choices import ABSORB
from attngraph.ir.graph import Level, ProgramGraph, Rate, move_to_stage, source_of
from attngraph.ir.language import DOT, SCORE, E, Keep, Score, ScoreProgram
from attngraph.ir.ops import cost
from attngraph.ir.ops.cost import LatentSizes
from attngraph.ir.ops.nodes import Attention, AttentionOp, LatentAttention
from attngraph.meaning import M, Meaning, size_expression
from attngraph.meaning.attention.latent import Latent, Stretch, find_latent
from attngraph.meaning.check.check import Checks
from attngraph.meaning.check.region import region
from attngraph.meaning.masks.fold import low_fill
from attngraph.passes.absorb_mla.join_heads import join_heads
from attngraph.passes.build import Builder, Refused
from attngraph.passes.proposal import Proposal
from attngraph.pipeline import Outcome
from attngraph.report.entries import LatentEntry

from attngraph.passes.absorb_mla.fold_weights import (  # isort: skip
    Folded, fold_query, fold_result, of_each_head, projection_of,
)  # fmt: skip

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class AbsorbMLA:
    """`absorb` is "auto" (by cost), "always", "never" or "fold"; `keeps`: the graph will become a decoder's,
    which caches what attention looks at."""

    absorb: str = "auto"
    keeps: bool = False
    name: str = "absorb-mla"
    requires: Level = Level.FUSED
    yields: Level = Level.FUSED

    def __post_init__(self) -> None:
        if self.absorb not in ABSORB:
            raise ValueError(f"absorb must be one of {', '.join(ABSORB)}, found {self.absorb!r}.")

    def run(self, graph: ProgramGraph) -> Outcome:
        outcome = Outcome()
        if self.absorb == "never" or graph.gradients:
            return outcome
        absorption = _Absorption(graph, self)
        outcome.notes += [note for node in graph.attentions() if (note := absorption.try_on(node))]
        graph.clean()
        needed = [value for value in absorption.products if value.users]  # a bias of keys may cancel
        if needed:
            products = {f"folded{number}": value for number, value in enumerate(needed)}
            move_to_stage(graph, Rate.WEIGHTS, products)
        return outcome


@dataclasses.dataclass(frozen=True)
class _Change:
    """`new` replaces `old`. `products` of weights are computed in the stage of weights; `sources`: what both
    are computed from, besides latents and projections."""

    old: fx.Node
    new: fx.Node
    entry: LatentEntry
    products: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]


class _Absorption:
    """One run of the pass on one graph."""

    def __init__(self, graph: ProgramGraph, options: AbsorbMLA) -> None:
        self.graph, self.options = graph, options
        self.meaning = Meaning.of(graph)
        self.checks = Checks(graph)
        self.products: list[fx.Node] = []

    def try_on(self, node: fx.Node) -> str:
        """Absorb one attention; returns what was done, or why not ("" where no user would expect it)."""
        source = source_of(node)
        with Proposal(self.graph, node, self.checks, survives=True) as proposal:
            view = AttentionOp.of(node)
            if not isinstance(view, Attention) or view.kernel or any(u.args[1] != 0 for u in node.users):
                raise Refused("the model itself says how it is computed", tell=False)
            weights = join_heads(proposal, self.meaning, node)
            change = self._absorb(proposal, node, self._examine(node))
        if proposal.done:
            self.products += (*change.products, *weights)
            for dead in (*node.users, node):
                if not dead.users:
                    self.graph.graph.erase_node(dead)
            return f"latent attention at {source}: {change.entry.describe()}"
        if not proposal.tell:
            return ""
        about = LatentEntry(reason=proposal.problem)
        node.meta["attention"] = dataclasses.replace(node.meta["attention"], latent=about)
        return f"left expanded at {source}: {proposal.problem}"

    def _examine(self, node: fx.Node) -> Latent:
        """The latent of an attention; Refused where there is none, or nothing would be right or saved."""
        view = Attention.of(node)
        found = find_latent(self.meaning, view.k, view.v)
        if found.width >= _width(view):
            raise Refused(f"a latent of {found.width} values saves nothing", tell=False)
        first, *more = found.keys
        is_shared = not more and first.source.base is found.values.source.base
        if not found.values.up and found.projected is None and is_shared:
            raise Refused("its values are a part of its keys already", tell=False)
        if found.projected and found.projected.bias and not _ignores_shift(view.program):
            raise Refused("a bias of its keys does not cancel: the scores are not only shifted by it")
        if found.values.bias and (view.program.sink is not None or view.program.changes_weights):
            raise Refused("a bias of its values is weighed by weights that do not add up to one")
        if {base.meta["val"].dtype for base in found.bases} != {view.q.meta["val"].dtype}:
            raise Refused("its latent and its queries differ in dtype")
        return found

    def _absorb(self, proposal: Proposal, node: fx.Node, found: Latent) -> _Change:
        """Propose to replace the attention; Refused where it would be slower, or differs."""
        given = self._operands(proposal, node, found)
        is_plain = given.key_up is None and given.value_up is None  # values become a part of the keys
        build = self._folded if is_plain or self.options.absorb == "fold" else self._latent
        change = build(proposal, node, given, found)
        # As functions of the tensors that both are computed from.
        leaves = [*change.sources, *found.bases, *Attention.of(node).reads]
        proposal.check(change.old, change.new, leaves, "an absorbed node would not compute the same: ")
        proposal.replace(change.old, change.new)
        return change

    def _operands(self, builder: Builder, node: fx.Node, found: Latent) -> LatentAttention:
        """The attention with latents side by side, and the query's parts in the keys' order."""
        view = Attention.of(node)
        q, keys = view.q, sorted(found.keys, key=lambda s: s.up is None)  # projected parts come first
        offsets: dict[object, int] = {}
        parts: list[fx.Node] = []
        at = 0
        for stretch in (*keys, found.values):
            if stretch.of not in offsets:
                part = builder.view(stretch.source.base, stretch.source.steps)
                offsets[stretch.of], at = at, at + int(part.meta["val"].shape[3])
                parts.append(part)
        shared = builder.side_by_side(parts, -1)
        ups = (None if s is None else s.up for s in (found.projected, found.values))
        key_up, value_up = (None if up is None else builder.scaled(up) for up in ups)
        count = found.values.width if value_up is None else int(value_up.meta["val"].shape[2])
        if any(a.start + a.width != b.start for a, b in itertools.pairwise(keys)):
            q = builder.call(aten.cat.default, [_part(builder, q, s.start, s.width) for s in keys], -1)
        return LatentAttention(
            q=q, latent=shared, key_up=key_up, value_up=value_up, values=(offsets[found.values.of], count),
            reads=view.reads, sizes=view.sizes, program=view.program, absorb=self.options.absorb,
        )  # fmt: skip

    def _latent(self, builder: Builder, node: fx.Node, given: LatentAttention, found: Latent) -> _Change:
        """With `latent_attention`, which chooses the order of multiplication at each call."""
        (old,) = node.users
        entry = self._decide(given)
        new = builder.attention(given)
        new.meta["attention"] = dataclasses.replace(node.meta["attention"], latent=entry)
        return _Change(old, self._with_bias(builder, new, found.values), entry, (), (Attention.of(node).q,))

    def _folded(self, proposal: Proposal, node: fx.Node, given: LatentAttention, found: Latent) -> _Change:
        """Absorbed in plain operations, with products of weights computed in advance where possible."""
        view = Attention.of(node)
        (old,) = node.users
        sizes = given.traced_sizes()
        query, sources, wasted = given.q, [view.q], 0
        done: list[Folded] = []
        apart: list[str] = []
        if given.key_up is not None:
            with proposal.attempt() as attempt:
                done.append(self._of_weights(fold_query(attempt, self.meaning, given.q, given.key_up)))
                query, sources = done[-1].value, []
                # The model's own projection of the query remains, for the part that is not folded.
                wasted = 2 * sizes.heads * sizes.nope * done[-1].width if sizes.shared else 0
            if attempt.problem:
                apart.append(attempt.problem)
                query = _each_head(proposal, _part(proposal, given.q, 0, sizes.nope), given.key_up)
            if sizes.shared:
                rest = _part(proposal, given.q, sizes.nope, sizes.shared)
                query = proposal.call(aten.cat.default, [query, rest], -1)
        keys = _part(proposal, given.latent, 0, sizes.latent + sizes.shared)
        values = _part(proposal, given.latent, *given.values)
        whole = proposal.attention(view.replace(q=query, k=keys, v=values))
        mixed = result = proposal.call(operator.getitem, whole, 0)
        if given.value_up is not None:
            with proposal.attempt() as attempt:
                if found.values.bias is not None:
                    raise Refused("a bias of its values is added before they are projected")
                to = projection_of(self.meaning, old)
                proposal.anchor = attempt.anchor = to.node
                done.append(self._of_weights(fold_result(attempt, mixed, given.value_up, to)))
                old, result = to.node, done[-1].value
            if attempt.problem:
                apart.append(attempt.problem)
                turned = proposal.call(aten.transpose.int, given.value_up, 1, 2)
                result = self._with_bias(proposal, _each_head(proposal, mixed, turned), found.values)
        before, after = (sum(f.before for f in done), sum(f.after for f in done))
        entry = LatentEntry(sizes.width, _width(view))
        if given.key_up is not None or given.value_up is not None:
            entry = LatentEntry(
                sizes.width, sizes.expanded_width, "fold", None, 0.0, sizes.pair_absorbed,
                sizes.pair_expanded, sizes.up, parameters=(before, after),
                operations=(2 * before, 2 * after + wasted), apart="; ".join(apart),
            )  # fmt: skip
        whole.meta["attention"] = dataclasses.replace(node.meta["attention"], latent=entry)
        products = tuple(p for f in done for p in f.products)
        return _Change(old, result, entry, products, (*sources, *(n for f in done for n in f.sources)))

    def _of_weights(self, folded: Folded) -> Folded:
        """`folded`, if its products depend on weights alone; else Refused."""
        known = self.graph.given()
        for node in region(folded.products, []):
            if node in known and known[node].kind == "argument":
                raise Refused("its projections follow an input of the model")
        return folded

    def _with_bias(self, builder: Builder, new: fx.Node, values: Stretch) -> fx.Node:
        if values.bias is None:
            return new
        bias = builder.view(values.bias.base, values.bias.steps)  # [1, G, 1, V]
        heads = int(new.meta["val"].shape[1])
        return builder.trace(lambda new, bias: new + of_each_head(bias, heads, 1), new, bias)  # type: ignore[no-any-return]

    def _decide(self, given: LatentAttention) -> LatentEntry:
        """The costs of both orders of multiplication; Refused where absorbing would be slower."""
        sizes, q, latent = given.traced_sizes(), given.q.meta["val"], given.latent.meta["val"]
        device, itemsize, few = q.device.type, q.dtype.itemsize, None
        if self.options.absorb == "auto":
            self._require_gain(sizes, device, itemsize, q.shape[2], latent.shape[2])
            few = cost.crossover(sizes, device, itemsize)
        return LatentEntry(
            sizes.width, sizes.expanded_width, self.options.absorb, few, sizes.crossover, sizes.pair_absorbed,
            sizes.pair_expanded, sizes.up,
        )  # fmt: skip

    def _require_gain(self, sizes: LatentSizes, device: str, itemsize: int, queries: Any, keys: Any) -> None:
        if sizes.width >= sizes.kv_heads * (sizes.nope + sizes.shared):
            plain = f"a latent of {sizes.width} values is no narrower than the keys: plain heads"
            raise Refused(plain, tell=False)
        if self.options.keeps:
            if not cost.keeping_pays(sizes, device, itemsize):
                raise Refused(
                    f"{sizes.width} values per token could be kept for {sizes.expanded_width}, at "
                    f"{sizes.pair_absorbed / sizes.pair_expanded:.1f} times the operations: too slow here",
                    tell=sizes.width * 2 < sizes.expanded_width,
                )
        elif len({self.meaning.renamed(size_expression(extent)) for extent in (queries, keys)}) == 1:
            raise Refused(
                f"there are as many queries as keys, so absorbing would take "
                f"{sizes.pair_absorbed / sizes.pair_expanded:.1f} times the operations for nothing"
            )


def _part(builder: Builder, node: fx.Node, start: int, width: int) -> fx.Node:
    return builder.call(aten.narrow.default, node, 3, start, width)


def _each_head(builder: Builder, x: fx.Node, weight: fx.Node) -> fx.Node:
    """Each head of x `[B, H, S, m]` times its own matrix of weight `[G, m, n]`."""
    heads = int(x.meta["val"].shape[1])
    return builder.trace(lambda x, weight: x @ of_each_head(weight, heads), x, weight)  # type: ignore[no-any-return]


def _width(attention: Attention) -> int:
    """The number of elements per token in the original keys and values."""
    return sum(int(n.meta["val"].shape[1]) * int(n.meta["val"].shape[3]) for n in attention.keys)


def _ignores_shift(program: ScoreProgram) -> bool:
    """Whether adding a number to all dots of a row changes nothing in what the program makes of them."""
    if program.sink is not None:
        return False
    value = DOT
    for statement in program.statements:
        if isinstance(statement, Score):
            value = M.substitute(M.canonical(statement.value), {SCORE: value})
        elif isinstance(statement, Keep) and not (statement.is_hard or low_fill(statement.fill)):
            return False
    terms = E.parts(value, "add")
    own = [t for t in terms if any(n is DOT for n in E.walk(t))]
    return len(own) == 1 and M.coefficient(own[0])[1] is DOT
