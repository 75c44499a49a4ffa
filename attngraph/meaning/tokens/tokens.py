"""Which dimension of each value is the token axis, and which operations mix tokens.

Every value of a graph is one of these:

    fixed        computed from weights and other inputs alone: the same whatever the tokens are
    position     a formula of the token's position in its sequence (position ids, RoPE's angles)
    token-wise   what it holds for a token is computed from that token alone (and its position)
    attention    a token looks at others, through a mask that hides all later ones
    scan         computed from the last tokens, or from something that is carried from token to token
    mixing       anything else

Element rules say what one element reads; a value is token-wise where the row and the token that it reads in
every operand are its own. Where the operands mix tokens, the formula of all operations since values that do
not is judged (`looks_back.py`). Only where data choose the tokens, the operations are run on all of them and
on some in another order, and must give each token the same (`token_probe.py`). Token-wise computations can be
run on any selection of tokens, which is what a decoder does.
"""

import bisect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph, is_size
from attngraph.ir.language import E, Expr
from attngraph.ir.ops import nodes
from attngraph.meaning.algebra import M, size_expression
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Unliftable, is_part, tried
from attngraph.meaning.tokens import opaque
from attngraph.meaning.tokens.attentions import attention_fact, part_fact
from attngraph.meaning.tokens.looks_back import HistoryFinder, LooksBack, NotShown
from attngraph.meaning.tokens.loops import LoopFinder
from attngraph.meaning.tokens.recurrence import SumFinder
from attngraph.meaning.tokens.token_probe import TokenProbe
from attngraph.meaning.tokens.windows import WindowFinder

from attngraph.meaning.tokens.facts import (  # isort: skip
    ENTRIES, Axes, Fact, Facts, Finder, Indices, Kind, Space, outside_reads, place_text, read_token,
)  # fmt: skip


class Tokens:
    """The token-axis analysis of one graph.

    Args:
        graph: fused.
        token, row: the symbolic sizes that count tokens and sequences (row None: no batch). The tokens' may
            be a number that is a size of nothing else.
        histories: whether a value may be computed from all earlier tokens, where nothing else is found.
        assume_causal: whether such a value is taken to be one where that cannot be shown.
    """

    def __init__(
        self, graph: ProgramGraph, token: str | int, row: str | None, histories: bool = False,
        refuted: Mapping[fx.Node, str] = MappingProxyType({}), assume_causal: bool = False,
    ) -> None:  # fmt: skip
        self.graph = graph
        self.meaning = Meaning.of(graph, True, True)
        rows = None if row is None else E.var("b", self.meaning.named(E.size(row)))
        size = self.meaning.named(E.size(str(token)))
        self.space = Space(E.var("t", size), rows)
        self.facts = Facts(self.meaning, self.space)
        self.traced = token if isinstance(token, int) else graph.hints.get(str(size.value), 0)
        """How many tokens the traced sequences have."""
        self.probe = TokenProbe(graph, self.facts)
        self._summed: set[fx.Node] = set()
        """Values that are sums over tokens, and what is computed from them: these are not looked at again."""
        self.looks_back = LooksBack(self.facts, self._element)
        self._of_tokens: set[fx.Node] = set()
        """What is computed from the tokens, not from places and fixed values alone."""
        self._windows = WindowFinder(self.facts)
        self.sums = SumFinder(graph, self.facts, self.traced, refuted)
        self.loops = LoopFinder(self.facts, self.traced)
        anew = HistoryFinder(self.facts, self.probe, self.looks_back, assume_causal)
        self._histories: Finder | None = anew.find if histories else None
        self.assumed: Mapping[fx.Node, str] = anew.assumed
        """Values that are taken not to look at later tokens, with why that could not be shown."""
        for node in graph.graph.nodes:
            if node.op != "output" and not is_size(node):
                self.facts[node] = self._fact(node)
                if self.facts[node].is_of_token or not self._of_tokens.isdisjoint(node.all_input_nodes):
                    self._of_tokens.add(node)

    def __getitem__(self, node: fx.Node) -> Fact:
        return self.facts[node]

    def token_dim(self, node: fx.Node) -> int | None:
        """The dimension of a value that holds the tokens."""
        return self.space.place(self.facts[node].axes, self.space.token)

    def row_dim(self, node: fx.Node) -> int | None:
        """The dimension of a value that holds the sequences."""
        return self.space.place(self.facts[node].axes, self.space.row)

    def depends_on_tokens(self, node: fx.Node) -> bool:
        return self.facts[node].kind is not Kind.FIXED

    def most_tokens(self) -> int | None:
        """The longest sequence for which every table that is read at a token's position has an entry."""
        found: list[int] = []
        for node, fact in self.facts.items():
            if fact.kind is not Kind.POSITION or not self.meaning.is_tensor(node):
                continue
            at = self.space.indices(fact.axes, self.meaning.shape(node))
            element = fact.formula or tried(self.meaning.element, node, at)
            if element is None or self.token_dim(node) is None:
                continue
            found += [n for read in E.walk(element) if read.op == "read" for n in self._entries(read)]
            if ENTRIES in node.meta:
                found += self._places(element, node.meta[ENTRIES])
        return min(found, default=None)

    def _entries(self, read: Expr) -> list[int]:
        """For how many tokens a fixed table has entries, if it is read at the position plus a number."""
        table = self.facts.get(read.value)
        if table is None or table.kind is not Kind.FIXED:
            return []
        places = zip(self.meaning.shape(read.value), read.args, strict=True)
        limits = [(index, int(extent.value)) for extent, index in places if extent.op == "const"]
        return [n for index, extent in limits for n in self._places(index, extent)]

    def _places(self, index: Expr, entries: int) -> list[int]:
        """For how many tokens there are so many entries, if the index grows with the position alone."""
        place = self.meaning.lift(index, lambda r: self.facts[r.value].kind is Kind.POSITION)
        token, most = self.space.token, 2 * entries
        growing = {"add", "max", "min", "var", "const"}
        if place.free != {token} or not {n.op for n in E.outside(place, "var")} <= growing:
            return []

        def is_beyond(at: int) -> bool:
            found = M.substitute(place, {token: E.const(at)})
            return found.op == "const" and int(found.value) >= entries

        return [bisect.bisect_left(range(most), True, key=is_beyond)] if is_beyond(most) else []

    def cause(self, node: fx.Node) -> fx.Node:
        """The first mixing node that this one is mixing because of."""
        while True:
            earlier = [n for n in node.all_input_nodes if n in self.facts and self.facts.mixes(n)]
            if not earlier:
                return node
            node = earlier[0]

    # --- one node ---

    def _fact(self, node: fx.Node) -> Fact:
        if node.op == "placeholder":
            return self._input(node)
        whole: Any = node.args[0] if is_part(node) else node
        attention = nodes.whole(whole)
        if attention is not None:
            if whole is node:
                found = attention_fact(self.facts, attention)
            else:
                found = part_fact(self.meaning, node, self.facts[whole])
            if found.kind is not Kind.MIXING or not self.meaning.is_tensor(node):
                return found
            # What the formula of an attention of another form shows: each token by itself, or looking back.
            by_algebra = self._by_region(node, self.meaning.shape(node))
            return by_algebra or self._scanned(node, self._histories) or found
        if not self.meaning.is_tensor(node):
            return self._several(node)
        shape = self.meaning.shape(node)
        sizes = [size_expression(n.meta["val"]) for n in node.all_input_nodes if is_size(n)]
        counted = any(map(self.space.counts, (*shape, *map(self.meaning.renamed, sizes))))
        if not counted and all(self.facts[n].is_shared for n in node.all_input_nodes if n in self.facts):
            return Fact(Kind.FIXED, ((),) * len(shape))
        found = self._by_rule(node, shape)
        if found.kind is Kind.MIXING:
            found = (
                self._scanned(node, self._windows.fold)
                or self._by_formula(node, shape)
                or self._scanned(node, self._windows.window)
                or self._by_region(node, shape)
                or self._scanned(node, self.sums.find)
                or self._scanned(node, self.loops.find)
                or self._scanned(node, self._histories)
                or found
            )
        return found

    def _by_region(self, node: fx.Node, shape: Indices) -> Fact | None:
        """Token-wise by the formula of the operations before, or by trial where data choose the tokens."""
        if not self._summed.isdisjoint(node.all_input_nodes):
            self._summed.add(node)
        if node in self._summed or self.probe.is_long(node, self._resolved()):
            return None
        for axes in self.space.candidates(shape):
            if self._counts_unseen(shape, axes):
                continue
            try:
                formula = self.looks_back.formula(node, axes)
            except NotShown:
                return self._by_trial(node, shape)
            kind, _ = self._judge(formula, axes)
            if kind is not None:
                return Fact(kind, axes, "by the formula of the operations before it")
            if self._is_chosen_by_data(formula):
                return self._by_trial(node, shape)
            sums = (n for n in E.walk(formula) if n.op in E.BINDERS)
            over_tokens = any(self.space.counts_tokens(n.args[0].args[0]) for n in sums)
            if over_tokens and node.meta["val"].is_floating_point():
                self._summed.add(node)
                return None
        return None

    def _is_chosen_by_data(self, formula: Expr) -> bool:
        """Whether data choose tokens that a formula reads, or an unknown function reads all of them."""
        reads = E.reads(formula)
        indices = {index for read in reads for index in read.args}
        return any(n.op == "read" for index in indices for n in E.walk(index)) or any(
            v.args and v not in self.space.both and self.space.counts(v.args[0]) for v in formula.free
        )

    def _scanned(self, node: fx.Node, find: Finder | None) -> Fact | None:
        """What a finder finds of a value from earlier tokens, for the first axes for which it does."""
        shape = self.meaning.shape(node)
        for axes in self.space.candidates(shape) if find is not None else ():
            if self.space.place(axes, self.space.token) is None or self._counts_unseen(shape, axes):
                continue
            if find is not None and (scan := find(node, axes)) is not None:
                return Fact(Kind.SCAN, axes, scan.reason, scan=scan)
        return None

    def _several(self, node: fx.Node) -> Fact:
        """An op of several results is judged by each of them."""
        if all(self.facts[n].is_shared for n in node.all_input_nodes if n in self.facts):
            return Fact(Kind.FIXED)
        results = node.meta.get("val")
        of_each = isinstance(results, (list, tuple)) and len(results) == self.traced
        if self.space.is_of_one_length and of_each:
            return Fact(
                Kind.MIXING, reason="how many results it has follows from how many tokens there are, and a "
                "decoder's graph is one for any number"
            )  # fmt: skip
        return Fact(Kind.MIXING, reason="it has several results")

    def _input(self, node: fx.Node) -> Fact:
        shape = self.meaning.shape(node)
        if not any(self.space.counts(extent) for extent in shape):
            return Fact(Kind.FIXED, ((),) * len(shape))
        axes = next(self.space.candidates(shape))
        if sum(extent is self.space.tokens for extent in shape) > 1:
            return Fact(Kind.MIXING, reason="an input with two token axes")
        has_token = self.space.place(axes, self.space.token) is not None
        return Fact(Kind.TOKEN if has_token else Kind.FIXED, axes, "an input")

    def _by_rule(self, node: fx.Node, shape: Indices) -> Fact:
        """By the node's element rule, or because it is pointwise."""
        problem, problem_is_known = "no rule says what its elements are computed from", False
        for axes in self.space.candidates(shape):
            at = self.space.indices(axes, shape)
            try:
                element = self._element(node, at)
            except Unliftable as why_not:
                problem = str(why_not) or problem
                break
            kind, why = self._judge(element, axes)
            if kind is not None and not self._counts_unseen(shape, axes):
                return Fact(kind, axes)
            problem = problem if kind is not None or problem_is_known else why
            problem_is_known = True
        return Fact(Kind.MIXING, reason=problem)

    def _counts_unseen(self, shape: Indices, axes: Axes) -> bool:
        """Whether a dimension is as long as there are tokens or sequences, but does not run over them."""
        return any(
            self.space.counts(extent) and not set(digits) & self.space.both
            for extent, digits in zip(shape, axes, strict=True)
        )

    def _element(self, node: fx.Node, at: Indices) -> Expr:
        try:
            return self.meaning.element(node, at)
        except Unliftable as why_not:
            try:
                return opaque.element(self.meaning, node, at)
            except Unliftable:
                raise why_not from None

    def _judge(self, element: Expr, axes: Axes) -> tuple[Kind | None, str]:
        """The kind of a value with these axes whose element equals this; or None, and why it has none."""
        found = Kind.POSITION if self.space.place(axes, self.space.token) is not None else Kind.FIXED
        for node in E.walk(element):
            if node.op != "read" or not isinstance(node.value, fx.Node):
                continue
            fact = self.facts.known(node.value)  # the largest few of a value stay so in its formula
            if fact is None:
                return None, "computed from a value that mixes tokens"
            if fact.is_shared:
                if any(self.space.moves(index) for index in node.args):
                    return None, "reads a table at the token's place"
                continue
            if not self.space.follows(fact.axes, node.args):
                return None, self._reads_others(fact, node.args)
            if fact.is_of_token:
                found = Kind.TOKEN
        for node in outside_reads(element):
            if node in self.space.both:
                own = "the token's place", "the sequence's place in the batch"
                return None, f"computed from {own[node is self.space.row]}"
            if self.space.is_count(node):
                return None, "depends on how many tokens or sequences there are"
        return found, ""

    def _reads_others(self, fact: Fact, at: Indices) -> str:
        place = self.space.place(fact.axes, self.space.token)
        if place is None and any(self.space.moves(index) for index in at):
            return "reads a table at the token's place"
        if place is None or self.space.follows_digits(fact.axes[place], at[place]):
            return "a sequence reads another one of the batch"
        index = at[place]
        if self.space.moves(index):
            reach = self.space.reach(index)
            if reach is None:
                return f"token t reads token {place_text(index, self.space.tokens)}"
            ends = {n: f"token t {'-' if n < 0 else '+'} {abs(n)}" if n else "token t" for n in reach}
            return f"token t reads {' to '.join(ends.values())}"
        if M.sub(index, self.space.tokens) is E.const(-1):
            return "only the last token is read; return the logits of all tokens"
        own = [v for v in index.free if v.args[0] is not self.space.tokens]
        if len(index.free) == len(own) == 1 and str(own[0].value).startswith("own"):
            dim = str(own[0].value).removeprefix("own")
            return f"its dimension {dim} holds tokens, but has not as many places as there are tokens"
        return read_token(index, self.space.tokens)

    def _by_formula(self, node: fx.Node, shape: Indices) -> Fact | None:
        """As a formula of the token's position and of fixed tensors, through all ops that compute it."""

        def follows_place(node: fx.Node) -> bool:
            """Or it may be a table repeated for each sequence."""
            fact = self.facts[node]
            return not (fact.kind is Kind.FIXED and fact.is_shared) and node not in self._of_tokens

        if not self._of_tokens.isdisjoint(node.all_input_nodes):
            return None
        for axes in self.space.candidates(shape):
            if self.space.place(axes, self.space.token) is None:
                continue
            read = tried(self.meaning.read, node, self.space.indices(axes, shape))
            if read is None:
                return None
            lifted = self.meaning.lift(read, lambda r: r.value is node or follows_place(r.value))
            if self._is_formula(lifted):
                return Fact(Kind.POSITION, axes, "a formula of the token's place", lifted)
        return None

    def _is_formula(self, element: Expr) -> bool:
        """Whether an element depends only on its token's position and on fixed tensors without a batch."""
        reads = [self.facts.get(n.value) for n in E.reads(element)]
        if any(f is None or not f.is_shared for f in reads):
            return False
        if any(n.op in E.BINDERS or n.op in ("raw", "random") for n in E.walk(element)):
            return False
        rows = self.space.row is not None and self.space.row in element.free
        return not rows and not any(map(self.space.is_count, E.outside(element, "var")))

    def _by_trial(self, node: fx.Node, shape: Indices) -> Fact | None:
        """Token-wise by a test: running it on some of the tokens (or sequences)."""
        resolved = self._resolved()
        for axes in self.space.candidates(shape):
            if not any(axes) or self._counts_unseen(shape, axes):
                continue
            steps = self.probe.is_token_wise(node, axes, resolved)
            if steps:
                leaves = self.probe.region(node, resolved)[1]
                facts = [self.facts[n] for n in leaves if n in self.facts]
                kinds = {Kind.TOKEN if f.is_of_token else f.kind for f in facts}
                order = (Kind.TOKEN, Kind.POSITION, Kind.FIXED)
                kind = next((k for k in order if k in kinds), Kind.POSITION)
                return Fact(kind, axes, f"shown by trial with {steps} operation(s) before it")
        return None

    def _resolved(self) -> dict[fx.Node, Axes]:
        return {n: f.axes for n, f in self.facts.items() if f.kind is not Kind.MIXING}

    # --- for the error message ---

    def witness(self, node: fx.Node, result: fx.Node) -> tuple[int, int] | None:
        """A pair (t, later) for which token t of the result changes when a later token does; for an attention
        node, one that its mask does not hide, if it is such a pair. Found by running the operations."""
        causality = self.facts[node].causality
        first = None if causality is None else causality.witness
        return self.probe.witness(result, self._resolved(), first)
