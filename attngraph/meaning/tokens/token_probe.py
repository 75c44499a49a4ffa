"""Does a computation treat each token by itself? Tried by running it, where data choose the tokens it reads.

Algebra follows every other operation (`tokens.py`). What sorts tokens by expert, computes in that order and
restores the order is run instead: the nodes between values whose axes are known and the one in question, in
float64 on random inputs, once on all tokens of two sequences, then on selections of them, fewer and in
another order. Such operations know tokens by their data and by numbers alone, so a trial has more tokens than
these numbers reach (`numbers.py`).
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import ProgramGraph, is_measured, is_size
from attngraph.ir.language import E, Expr
from attngraph.ir.ops.collectives import COLLECTIVES
from attngraph.ir.walk import reached
from attngraph.meaning.algebra.sizes import size_expression
from attngraph.meaning.check.comparison import compare, elementwise
from attngraph.meaning.check.region import bytes_in_float64, fingerprint, region
from attngraph.meaning.check.sample import Sample
from attngraph.meaning.rule import tried
from attngraph.meaning.tokens.facts import Axes, Facts, Space
from attngraph.meaning.tokens.numbers import is_whole, reach

ROWS, TOKENS = 2, 5
EQUAL = elementwise(1e-10)
LOUD = 15.0
"""Values are also tried so many times as large: whole numbers of the data up to this one, and scores beside
which a mask's moderate number hides nothing."""
SEEN = elementwise(1e-6)
"""A larger difference than this shows that a token is seen; a smaller one may be the rounding of a model that
computes a part of itself in float32."""
Pick = tuple[int, int]
"""A sequence of the batch and a token in it."""


Result = tuple[Tensor, Tensor] | Exception
"""A value on all tokens and on a selection of them, or why it cannot be run like this."""


class TokenProbe:
    """Test runs on one graph, at most `budgets.PROBES`: a graph that needs more is taken to mix tokens."""

    def __init__(self, graph: ProgramGraph, facts: Facts) -> None:
        self.graph, self.space, self.meaning = graph, facts.space, facts.meaning
        self.of_sizes = facts.of_sizes
        self.values = graph.known_values()
        self.tokens = int(facts.space.tokens.value) if facts.space.is_of_one_length else TOKENS
        """How many tokens each sequence of a test has."""
        self.left = budgets.PROBES
        self.known: dict[Any, int] = {}
        self._latest: tuple[fx.Node | None, dict[Any, Callable[[int], Result]]] = None, {}
        """The runs made for the node that was asked for last, which serve all axes that it may have."""

    def is_token_wise(self, node: fx.Node, axes: Axes, resolved: Mapping[fx.Node, Axes]) -> int:
        """How many operations were run to see that the node treats each token (and each sequence) by
        itself; 0 if it does not, or if that cannot be tested. If its region begins with integers or masks of
        places, further attempts compute them as the model does, and what else follows from them: random ones
        may be invalid indices, contradict each other, or hide all of a row."""
        computed: set[fx.Node] = set()
        for _ in range(budgets.PROBE_ATTEMPTS):
            known = {n: a for n, a in resolved.items() if n not in computed}
            found = self._is_token_wise(node, axes, known)
            more = {n for n in self.region(node, known)[1] if n.op == "call_function" and n not in computed
                    and (is_whole(n) or self._is_one_number(n) or _follows_from(n, computed)
                         or (getattr(n.meta.get("val"), "dtype", None) == torch.bool
                             and self.of_sizes(n)))}  # fmt: skip
            if found or not more:
                return found
            computed |= more
        return 0

    def _is_token_wise(self, node: fx.Node, axes: Axes, resolved: Mapping[fx.Node, Axes]) -> int:
        order, leaves = self.region(node, resolved)
        known = [axes, *(resolved.get(n, ()) for n in leaves)]
        has_tokens = [self.space.place(a, self.space.token) is not None for a in known]
        if not has_tokens[0] and any(has_tokens):
            return 0  # of all tokens of a sequence together
        # A value per sequence can only be combined with tokens of one sequence.
        per_sequence = any(any(a) and not has for a, has in zip(known, has_tokens, strict=True))
        of_one_row = per_sequence and any(self.space.row in d for a in known for d in a)
        tokens, selections = self._within_reach(order), self._selections(of_one_row)
        if not self.space.is_of_one_length and tokens <= reach(order, self.values, self.of_sizes):
            return 0
        found = self._probe(node, axes, resolved, tokens, selections)
        if found and any(is_whole(n) and n not in self.values for n in leaves):
            found = min(found, self._probe(node, axes, resolved, tokens, selections, LOUD))
        return found

    def _probe(
        self, node: fx.Node, axes: Axes, resolved: Mapping[fx.Node, Axes], tokens: int,
        selections: Sequence[Sequence[Pick]], louder: float = 1.0,
    ) -> int:  # fmt: skip
        """How many operations were run to see that selections of so many tokens have the results that they
        have among all of them; 0 if they do not. `louder`: by this what the region begins with is multiplied;
        integers are up to so large then, and where they are too large for an index, they show nothing."""
        order, leaves = self.region(node, resolved)
        steps = [n for n in order if n not in leaves and not is_size(n) and n.op == "call_function"]
        if any(n.target in COLLECTIVES for n in steps):
            return 0  # a test runs in one process
        if not steps or len(steps) > budgets.PROBE_NODES:
            return 0

        @functools.cache
        def run(seed: int) -> Result:
            """The node's value on all tokens and on the selection of this number."""
            sample, given = self._inputs(leaves, ROWS, tokens, seed)
            if bytes_in_float64(order, sample.sizes) > budgets.PROBE_BYTES:
                return ValueError("it takes too much memory")
            picks = selections[seed]
            try:
                known = {n: resolved.get(n, ((),) * t.ndim) for n, t in given.items()}
                given = {n: self._louder(n, t, louder, seed) for n, t in given.items()}
                (whole,) = sample.evaluate(order, given, node)
                some = {n: select(t, known[n], self.space, picks, (ROWS, tokens)) for n, t in given.items()}
                (found,) = self._inputs((), 1, len(picks), seed)[0].evaluate(order, some, node)
            except Exception as problem:
                return problem
            return whole, found

        begins = {n: (resolved.get(n), id(self.values[n]) if n in self.values else None) for n in leaves}
        key = (fingerprint(order, begins), tokens, tuple(map(tuple, selections)), louder)
        if (key, axes) not in self.known:
            if self._latest[0] is not node:
                self._latest = node, {}
            runs = self._latest[1]
            if key not in runs:
                if self.left <= 0:
                    return 0
                self.left -= 1
                runs[key] = run
            holds = self._holds(runs[key], axes, selections, tokens, louder > 1)
            self.known[key, axes] = len(steps) if holds else 0
        if self.known[key, axes]:
            self.meaning.rely_on(order)
        return self.known[key, axes]

    def _is_one_number(self, node: fx.Node) -> bool:
        """Whether all elements are the same number, as in `zeros`."""
        if any(not is_size(n) for n in node.all_input_nodes):
            return False
        element = tried(lambda: self.meaning.element(node, self.meaning.places(node)[0]))
        return element is not None and element.op == "const"

    def is_long(self, node: fx.Node, resolved: Mapping[fx.Node, Axes]) -> bool:
        """Whether more operations compute the node from values of known axes than are looked at together."""
        order, leaves = self.region(node, resolved)
        return len(order) - len(leaves) > 2 * budgets.PROBE_NODES

    def region(self, node: fx.Node, resolved: Mapping[fx.Node, Axes]) -> tuple[list[fx.Node], list[fx.Node]]:
        """The nodes that compute this one from values of known axes, in order, and those values; of many
        nodes, the first (`is_cut`)."""
        order, leaves = dict[fx.Node, None](), dict[fx.Node, None]()

        def visit(current: fx.Node) -> None:
            if current in order or self.is_cut(order):
                return
            if current is not node and (current in resolved or current.op == "placeholder"):
                leaves[current] = None
            elif not is_size(current) or is_measured(current):
                for operand in current.all_input_nodes:
                    visit(operand)
            order[current] = None

        visit(node)
        return list(order), list(leaves)

    @staticmethod
    def is_cut(order: Sized) -> bool:
        """Whether a region has so many nodes that some are left out."""
        return len(order) > 4 * budgets.PROBE_NODES

    def _louder(self, leaf: fx.Node, drawn: Tensor, louder: float, seed: int) -> Tensor:
        if drawn.is_floating_point():
            return drawn * louder
        if louder == 1 or drawn.dtype == torch.bool or leaf in self.values:
            return drawn
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, int(louder), drawn.shape, generator=generator, dtype=drawn.dtype)

    def _holds(
        self, run: Callable[[int], Result], axes: Axes, selections: Sequence[Sequence[Pick]], tokens: int,
        loud: bool,
    ) -> bool:  # fmt: skip
        """Whether a value with these axes has on each selection what it has for the same tokens among all.
        Where it is no number (the mask of a row happens to hide all), it would be none whatever is seen."""
        for seed, picks in enumerate(selections):
            try:
                whole, found = run(seed)  # type: ignore[misc]
                if whole.isnan().any():
                    return False
                among = select(whole, axes, self.space, picks, (ROWS, tokens))
            except Exception:  # so nothing is proved; or, if loud, nothing is refuted
                return loud
            if not compare(found, among, EQUAL).holds:
                return False
        return True

    def _inputs(
        self, leaves: Sequence[fx.Node], rows: int, tokens: int, seed: int
    ) -> tuple[Sample, dict[fx.Node, Tensor]]:
        run = Sample(self.values, self.counted(rows, tokens), seed)
        with torch.no_grad():
            return run, {leaf: run.draw(leaf) for leaf in leaves}

    def counted(self, rows: int, tokens: int) -> dict[str, int]:
        """The sizes of the graph for so many sequences of so many tokens."""
        counts = {self.space.rows: rows, self.space.tokens: tokens}
        named = {name: self.meaning.named(E.size(name)) for name in self.graph.hints}
        return {name: counts.get(named[name], number) for name, number in self.graph.hints.items()}

    def _selections(self, of_one_row: bool) -> Sequence[Sequence[Pick]]:
        """Tokens of the two sequences, which then are one sequence. Where a graph is of one number of tokens
        alone, these are so many, some of them several times."""
        if not self.space.is_of_one_length:
            return _OF_ONE_ROW if of_one_row else _SELECTIONS
        count, generator = self.tokens, torch.Generator().manual_seed(0)
        tokens = torch.randint(count, (3, count), generator=generator).tolist()
        rows = torch.randint(ROWS, (3, count), generator=generator).tolist()
        rows = [[picked[0]] * count if of_one_row else picked for picked in rows]
        return [list(zip(*both, strict=True)) for both in zip(rows, tokens, strict=True)]

    # --- who sees whom ---

    def witness(
        self, node: fx.Node, resolved: Mapping[fx.Node, Axes], first: tuple[int, int] | None = None
    ) -> tuple[int, int] | None:  # fmt: skip
        """A token of the node's value that changes when a later token of the inputs does, with weights of
        ordinary size or with large ones; where the value has no token axis, token 0 stands for all of it.
        None where an axis is longer or shorter than the sequence (a padded convolution's), as its places
        cannot be matched with tokens, and where the computation is too large. `first`: the pair to try
        first."""
        inputs = [n for n in self.graph.placeholders() if n in resolved]
        found = (self._seen(node, inputs, resolved, first, louder) for louder in (1.0, LOUD))
        return next((pair for pair in found if pair), None)

    def _seen(
        self, node: fx.Node, leaves: Sequence[fx.Node], resolved: Mapping[fx.Node, Axes],
        first: tuple[int, int] | None, louder: float,
    ) -> tuple[int, int] | None:  # fmt: skip
        order = region([node], leaves)
        extents = self.extents(node)
        own = next((place for place, extent in enumerate(extents) if extent is self.space.tokens), None)
        if own is None and any(map(self.space.counts_tokens, extents)):
            return None
        try:
            for tokens in dict.fromkeys((self.tokens, self._within_reach(order))):
                run, given = self._inputs([n for n in leaves if n in order], ROWS, tokens, 0)
                if bytes_in_float64(order, run.sizes) > budgets.PROBE_BYTES:
                    return None
                given = {n: t * louder if t.is_floating_point() else t for n, t in given.items()}
                (before,) = run.evaluate(order, given, node)
                ends = (*range(1, TOKENS), tokens - 1)
                laters = (*((first[1],) if first else ()), *(ends if tokens == self.tokens else ends[::-1]))
                for later in (n for n in dict.fromkeys(laters) if n < tokens):
                    known = {n: resolved.get(n, ()) for n in given}
                    changed = {n: self._changed(t, known[n], later, tokens) for n, t in given.items()}
                    (after,) = run.evaluate(order, changed, node)
                    for token in range(later) if own is not None else (0,):
                        a, b = (t if own is None else t.select(own, token) for t in (before, after))
                        if not compare(a, b, SEEN).holds:
                            return token, later
        except Exception:  # the error message is then given without a pair
            return None
        return None

    def _within_reach(self, order: Sequence[fx.Node]) -> int:
        """As many tokens as the numbers of these operations reach, if the graph and a trial may have them."""
        if self.space.is_of_one_length:
            return self.tokens
        tokens = self.tokens + reach(order, self.values, self.of_sizes)
        return self.tokens if tokens > budgets.PROBE_TOKENS else self.admitted(int(tokens)) or self.tokens

    @functools.cache  # noqa: B019  as long as the graph is looked at
    def admitted(self, tokens: int) -> int:
        """A number of tokens from this on that the graph may have; 0 if none is found."""
        bases = itertools.takewhile(
            lambda n: n <= budgets.PROBE_TOKENS, (tokens << k for k in itertools.count())
        )
        counts = (base + more for base in bases for more in range(3))
        return next((n for n in counts if self.graph.admits(self.counted(ROWS, n))), 0)

    @staticmethod
    def extents(node: fx.Node) -> list[Expr]:
        """The extents of a value, as expressions."""
        value = node.meta.get("val")
        return [size_expression(s) for s in value.shape] if isinstance(value, Tensor) else []

    def _changed(self, tensor: Tensor, axes: Axes, token: int, tokens: int) -> Tensor:
        """The tensor with one token's values changed in all sequences; itself if it has no tokens."""
        if self.space.place(axes, self.space.token) is None:
            return tensor
        split, place = digits_of(tensor, axes, self.space, (ROWS, tokens))
        other = split.clone()
        part = other.select(place[self.space.token], token)
        part.copy_(~part if part.dtype == torch.bool else part + 1)
        return other.reshape(tensor.shape)


_SELECTIONS: tuple[tuple[Pick, ...], ...] = (
    ((0, 3), (1, 0), (1, 4), (0, 1)),
    ((1, 2),),
    ((1, 4), (0, 4), (0, 0), (1, 1), (1, 3), (0, 2), (0, 1)),
)

_OF_ONE_ROW: tuple[tuple[Pick, ...], ...] = (((1, 3), (1, 0), (1, 4)), ((0, 2),))


def digits_of(
    tensor: Tensor, axes: Axes, space: Space, extents: tuple[int, int]
) -> tuple[Tensor, dict[Expr, int]]:
    """The tensor with a dimension for every digit, and which dimensions are those of row and token.

    Args:
        extents: how many rows and tokens the tensor holds.
    """
    counted = {space.token: extents[1]}
    if space.row is not None:
        counted[space.row] = extents[0]
    shape: list[int] = []
    place: dict[Expr, int] = {}
    for extent, digits in zip(tensor.shape, axes, strict=True):
        known = math.prod(counted[d] for d in digits if d in counted)
        for digit in digits:
            if digit in counted:
                place[digit] = len(shape)
            shape.append(counted.get(digit, extent // known))
        if not digits:
            shape.append(extent)
    return tensor.reshape(shape), place


def _follows_from(node: fx.Node, values: set[fx.Node]) -> bool:
    """Whether a node is computed from one of the values by a few operations."""
    below = reached(node.all_input_nodes, lambda n: n.all_input_nodes)
    return any(n in values for n in itertools.islice(below, budgets.PROBE_NODES))


def select(
    tensor: Tensor, axes: Axes, space: Space, picks: Sequence[Pick], extents: tuple[int, int]
) -> Tensor:
    """A tensor for some tokens, as one sequence of a batch of one; the tensor itself if it has no tokens.

    Args:
        picks: (row, token) of each.
        extents: how many rows and tokens the tensor holds.
    """
    split, place = digits_of(tensor, axes, space, extents)
    rows = torch.tensor([row for row, _ in picks])
    tokens = torch.tensor([token for _, token in picks])
    token_at, row_at = place.get(space.token), None if space.row is None else place.get(space.row)
    if token_at is not None and row_at is not None:
        moved = split.movedim((row_at, token_at), (0, 1))[rows, tokens]
        split = moved.unsqueeze(0).movedim((0, 1), (row_at, token_at))
    elif token_at is not None:
        split = split.index_select(token_at, tokens)
    elif row_at is not None:
        # A value per sequence can only be selected for tokens that are all of one sequence.
        if len(set(rows.tolist())) > 1:
            raise ValueError("a value for each sequence of the batch")
        split = split.index_select(row_at, rows[:1])
    shape: list[int] = []
    dims = iter(split.shape)
    for digits in axes:
        shape.append(math.prod(next(dims) for _ in digits) if digits else next(dims))
    return split.reshape(shape)
