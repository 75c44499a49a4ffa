"""Does a computation treat each token by itself? Tested by running it, where element rules cannot tell.

The nodes between values whose axes are known and the one in question are run in float64 on random inputs:
once on all tokens of two sequences, then on selections of them, fewer and in another order. A token-wise
computation gives each token the same result. One example is sorting tokens by expert, computing in that order
and restoring the order. Nothing here edits the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import ProgramGraph, is_measured, is_size
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.meaning.algebra.sizes import size_expression
from attngraph.meaning.check.comparison import compare, elementwise
from attngraph.meaning.check.region import bytes_in_float64, fingerprint, region
from attngraph.meaning.check.sample import Sample
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Unliftable
from attngraph.meaning.tokens.axes import Axes, Space

ROWS, TOKENS = 2, 5
EQUAL = elementwise(1e-10)
SEEN = elementwise(1e-6)
"""A larger difference than this shows that a token is seen; a smaller one may be the rounding of a model that
computes a part of itself in float32."""
Pick = tuple[int, int]
"""A sequence of the batch and a token in it."""


class TokenProbe:
    """Test runs on one graph, at most `budgets.PROBES`: a graph that needs more is taken to mix tokens."""

    def __init__(self, graph: ProgramGraph, space: Space, meaning: Meaning) -> None:
        self.graph, self.space, self.meaning = graph, space, meaning
        self.values = graph.known_values()
        self.tokens = int(space.tokens.value) if space.is_of_one_length else TOKENS
        """How many tokens each sequence of a test has."""
        self.left = budgets.PROBES
        self.known: dict[Any, int] = {}

    def is_token_wise(self, node: fx.Node, axes: Axes, resolved: Mapping[fx.Node, Axes]) -> int:
        """How many operations were run to see that the node treats each token (and each sequence) by
        itself; 0 if it does not, or if that cannot be tested. If the region begins with integers, further
        attempts compute them as the model does, and what else follows from them: random ones may be invalid
        indices, or contradict each other."""
        computed: set[fx.Node] = set()
        for _ in range(budgets.PROBE_ATTEMPTS):
            found = self._is_token_wise(node, axes, {n: a for n, a in resolved.items() if n not in computed})
            leaves = self.region(node, {n: a for n, a in resolved.items() if n not in computed})[1]
            more = {n for n in leaves if n.op == "call_function" and n not in computed
                    and (_is_integer(n) or self._is_one_number(n) or _follows_from(n, computed))}  # fmt: skip
            if found or not more:
                return found
            computed |= more
        return 0

    def _is_token_wise(self, node: fx.Node, axes: Axes, resolved: Mapping[fx.Node, Axes]) -> int:
        order, leaves = self.region(node, resolved)
        steps = [n for n in order if n not in leaves and not is_size(n) and n.op == "call_function"]
        if not steps or len(steps) > budgets.PROBE_NODES or self.left <= 0:
            return 0
        if self.space.place(axes, self.space.token) is None and any(
            self.space.place(resolved.get(n, ()), self.space.token) is not None for n in leaves
        ):
            return 0  # of all tokens of a sequence together
        begins = {n: (resolved.get(n), id(self.values[n]) if n in self.values else None) for n in leaves}
        key = (fingerprint(order, begins), axes)
        if key not in self.known:
            self.left -= 1
            self.known[key] = len(steps) if self._try(node, axes, order, leaves, resolved) else 0
        return self.known[key]

    def _is_one_number(self, node: fx.Node) -> bool:
        """Whether all elements are the same number, as in `zeros`."""
        if any(not is_size(n) for n in node.all_input_nodes):
            return False
        try:
            at = tuple(E.var(f"o{d}", extent) for d, extent in enumerate(self.meaning.shape(node)))
            return bool(self.meaning.element(node, at).op == "const")
        except Unliftable:
            return False

    def region(self, node: fx.Node, resolved: Mapping[fx.Node, Axes]) -> tuple[list[fx.Node], list[fx.Node]]:
        """The nodes that compute this one from values of known axes, in order, and those values."""
        order: dict[fx.Node, None] = {}
        leaves: dict[fx.Node, None] = {}

        def visit(current: fx.Node) -> None:
            if current in order or len(order) > 4 * budgets.PROBE_NODES:
                return
            if current is not node and (current in resolved or current.op == "placeholder"):
                leaves[current] = None
            elif not is_size(current) or is_measured(current):
                for operand in current.all_input_nodes:
                    visit(operand)
            order[current] = None

        visit(node)
        return list(order), list(leaves)

    def _try(
        self, node: fx.Node, axes: Axes, order: Sequence[fx.Node], leaves: Sequence[fx.Node],
        resolved: Mapping[fx.Node, Axes],
    ) -> bool:  # fmt: skip
        known = [axes, *(resolved.get(n, ()) for n in leaves)]
        of_rows = any(self.space.row in d for a in known for d in a) and any(
            any(a) and self.space.place(a, self.space.token) is None for a in known
        )  # a value per sequence can only be combined with tokens of one sequence
        for seed, picks in enumerate(self._selections(of_rows)):
            try:
                run, given = self._inputs(leaves, ROWS, self.tokens, seed)
                (whole,) = run.evaluate(order, given, node)
                some = {n: self._select(t, resolved.get(n, ((),) * t.ndim), picks) for n, t in given.items()}
                part, _ = self._inputs((), 1, len(picks), seed)
                (found,) = part.evaluate(order, some, node)
                wanted = self._select(whole, axes, picks)
            except Exception:  # it cannot be run like this, so nothing is proved
                return False
            if not compare(found, wanted, EQUAL).holds:
                return False
        return True

    def _inputs(
        self, leaves: Sequence[fx.Node], rows: int, tokens: int, seed: int
    ) -> tuple[Sample, dict[fx.Node, Tensor]]:
        sizes = dict(self.graph.hints)
        for name in sizes:
            size = self.meaning.named(E.size(name))
            if size is self.space.tokens:
                sizes[name] = tokens
            elif size is self.space.rows:
                sizes[name] = rows
        run = Sample(self.values, sizes, seed)
        with torch.no_grad():
            return run, {leaf: run.draw(leaf) for leaf in leaves}

    def _selections(self, of_one_row: bool) -> Iterable[Sequence[Pick]]:
        """Tokens of the two sequences, which then are one sequence. Where a graph is of one number of tokens
        alone, these are so many, some of them several times."""
        if not self.space.is_of_one_length:
            return _OF_ONE_ROW if of_one_row else _SELECTIONS
        count, generator = self.tokens, torch.Generator().manual_seed(0)
        tokens = torch.randint(count, (3, count), generator=generator).tolist()
        rows = torch.randint(ROWS, (3, count), generator=generator).tolist()
        return [
            [
                (picked_rows[0] if of_one_row else row, token)
                for row, token in zip(picked_rows, places, strict=True)
            ]
            for picked_rows, places in zip(rows, tokens, strict=True)
        ]

    def _select(self, tensor: Tensor, axes: Axes, picks: Sequence[Pick]) -> Tensor:
        """The tensor for these tokens alone, as one sequence."""
        return select(tensor, axes, self.space, picks, (ROWS, self.tokens))

    # --- who sees whom ---

    def witness(self, node: fx.Node, resolved: Mapping[fx.Node, Axes]) -> tuple[int, int] | None:
        """A token of the node's value that changes when a later token of the inputs does, all operations from
        the inputs on being computed; where the value has no token axis, token 0 stands for all of it. Also
        None where an axis is longer or shorter than the sequence (a padded convolution's), as its places
        cannot be matched with tokens, and where the computation is too large."""
        leaves = [n for n in self.graph.placeholders() if n in resolved]
        order = region([node], leaves)
        with_tokens = [
            n for n in leaves if self.space.place(resolved.get(n, ()), self.space.token) is not None
        ]
        own = self._token_dimension(node)
        if own is None and any(self.space.tokens in E.walk(extent) for extent in self._extents(node)):
            return None
        try:
            run, given = self._inputs([n for n in leaves if n in order], ROWS, self.tokens, 0)
            if bytes_in_float64(order, run.sizes) > budgets.PROBE_BYTES:
                return None
            (before,) = run.evaluate(order, given, node)
            for later in range(1, TOKENS):
                changed = {n: self._changed(t, resolved[n], later) if n in with_tokens else t
                           for n, t in given.items()}  # fmt: skip
                (after,) = run.evaluate(order, changed, node)
                for token in range(later) if own is not None else (0,):
                    a, b = (t if own is None else t.select(own, token) for t in (before, after))
                    if not compare(a, b, SEEN).holds:
                        return token, later
        except Exception:  # the error message is then given without a pair
            return None
        return None

    def _token_dimension(self, node: fx.Node) -> int | None:
        extents = self._extents(node)
        return next((place for place, extent in enumerate(extents) if extent is self.space.tokens), None)

    @staticmethod
    def _extents(node: fx.Node) -> list[Expr]:
        value = node.meta.get("val")
        return [size_expression(s) for s in value.shape] if isinstance(value, Tensor) else []

    def _changed(self, tensor: Tensor, axes: Axes, token: int) -> Tensor:
        """The tensor with what it holds for one token changed, in all sequences."""
        split, place = digits_of(tensor, axes, self.space, (ROWS, self.tokens))
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
    stack, seen = [node], {node}
    while stack and len(seen) < budgets.PROBE_NODES:
        for operand in stack.pop().all_input_nodes:
            if operand in values:
                return True
            if operand not in seen:
                seen.add(operand)
                stack.append(operand)
    return False


def _is_integer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool


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
