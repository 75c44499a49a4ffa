"""Equal layers are recognised once.

What a node is recognised as follows from how it is computed from the operands of the claim. Where another
node is computed in the same way from operands of the same layouts, the claim is written with that node's
operands. (Every claim is checked before it is used, however it was found.) A claim that relies on what a
buffer holds is repeated for that very buffer only.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from attngraph.ir.graph.program_graph import is_size
from attngraph.ir.kept import kept
from attngraph.ir.language import expr as E
from attngraph.meaning.attention.claim import Attention, Operand
from attngraph.meaning.attention.normaliser import Refusal
from attngraph.meaning.attention.program import Seed, Source
from attngraph.meaning.attention.recogniser import Recogniser
from attngraph.meaning.element import Meaning

_MOST_NODES = 2_000
"""A longer way from the operands to the result is not remembered."""


@dataclasses.dataclass(frozen=True)
class _Step:
    """How one node is computed. `operands`: by number in the order they were met; none in the claim's own."""

    about: Any
    operands: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Known:
    claims: tuple[Attention, ...]
    steps: tuple[_Step, ...]
    numbers: dict[fx.Node, int]


class OnceRecogniser(Recogniser):
    """A recogniser that knows what it found for equal nodes."""

    def __init__(self, meaning: Meaning, gradients: bool) -> None:
        super().__init__(meaning, gradients)
        self._known: dict[Any, list[_Known]] = {}

    def examine(self, node: fx.Node) -> tuple[Attention, ...] | Refusal | None:
        """As `Recogniser.examine`."""
        if not self.may_be_attention(node):
            return None
        for known in self._known.get(node.target, ()):
            place = self._placed(node, known.steps)
            if place is not None:
                self.note_found(node)
                own = {n: place[number] for n, number in known.numbers.items()}
                return tuple(_rewritten(claim, own) for claim in known.claims)
        found = super().examine(node)
        if isinstance(found, tuple) and node not in self._of_values:
            self._remember(node, found)
        return found

    def _remember(self, node: fx.Node, claims: tuple[Attention, ...]) -> None:
        stop = {n for claim in claims for n in _operands(claim)}
        numbers: dict[fx.Node, int] = {node: 0}
        order, steps = [node], []
        for each in order:
            below = [] if each in stop and each is not node else _computed_from(each)
            for operand in below:
                if operand not in numbers:
                    numbers[operand] = len(order)
                    order.append(operand)
            steps.append(_Step(self._told(each), tuple(numbers[n] for n in below)))
            if len(order) > _MOST_NODES:
                return
        named = {n for claim in claims for n in _named(claim)}
        if named <= numbers.keys() and not any(_reads_nodes(claim) for claim in claims):
            known = _Known(claims, tuple(steps), {n: numbers[n] for n in named})
            self._known.setdefault(node.target, []).append(known)

    def _placed(self, node: fx.Node, steps: Sequence[_Step]) -> list[fx.Node] | None:
        """The nodes that are computed in these steps, by their numbers; None where something differs."""
        numbers, order = {node: 0}, [node]
        for place, step in enumerate(steps):
            each = order[place]
            if self._told(each) != step.about:
                return None
            operands = _computed_from(each) if step.operands else []
            if len(operands) != len(step.operands):
                return None
            for operand, number in zip(operands, step.operands, strict=True):
                if operand not in numbers:
                    numbers[operand] = len(order)
                    order.append(operand)
                if numbers[operand] != number:
                    return None
        return order

    @kept
    def _told(self, node: fx.Node) -> Any:
        """A node's operation, its arguments that are no tensors, and the layout of its result."""
        known = node if node in self.meaning.values else None
        called = (node.target, _told((node.args, node.kwargs))) if node.op == "call_function" else None
        return node.op, called, _layout_of(node.meta.get("val")), known


def _computed_from(node: fx.Node) -> list[fx.Node]:
    """Its operands that are no sizes."""
    return [n for n in node.all_input_nodes if not is_size(n)]


def _told(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return ("size", _formula(value.meta["val"])) if is_size(value) else fx.Node
    if isinstance(value, (list, tuple)):
        return tuple(map(_told, value))
    if isinstance(value, dict):
        return tuple((name, _told(inner)) for name, inner in value.items())
    return type(value), repr(value)


def _layout_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes = tuple(map(_formula, (*value.shape, *value.stride())))
        return value.dtype, value.device, sizes
    return tuple(map(_layout_of, value)) if isinstance(value, (list, tuple)) else None


def _formula(size: Any) -> Any:
    return size.node.expr if hasattr(size, "node") else size


def _operands(claim: Attention) -> Iterator[fx.Node]:
    """The tensors of the graph that a claim computes its result from."""
    for operand in (claim.q, claim.k, claim.v):
        yield from operand.bases
    yield from (read for read in claim.reads if isinstance(read, fx.Node))


def _named(claim: Attention) -> Iterator[fx.Node]:
    """All nodes in a claim."""
    yield from (claim.node, *claim.scores)
    yield from _operands(claim)
    yield from (read.dropout for read in claim.reads if isinstance(read, Seed))


def _reads_nodes(claim: Attention) -> bool:
    """Whether a formula in a claim, outside of its program, reads a tensor of the graph."""
    views = [v for o in (claim.q, claim.k, claim.v) for part in o.parts for v in part]
    steps = [step for view in views for step in view.steps] + list(claim.output)
    zeros = [formula for view in views for formula in view.zeros]
    own = (*claim.sizes, claim.heads, claim.kv_heads, claim.head_dim, claim.value_dim, *sum(claim.axes, ()))
    formulas = [*own, *zeros, *(size for step in steps for size in step.sizes)]
    return any(isinstance(n.value, fx.Node) for formula in formulas for n in E.walk(formula))


def _rewritten(claim: Attention, own: dict[fx.Node, fx.Node]) -> Attention:
    """The claim with other nodes in the places of its own."""

    def operand(given: Operand) -> Operand:
        parts = tuple(tuple(dataclasses.replace(v, base=own[v.base]) for v in part) for part in given.parts)
        return Operand(parts)

    def source(read: Source) -> Source:
        return Seed(own[read.dropout]) if isinstance(read, Seed) else own[read]

    return dataclasses.replace(
        claim, node=own[claim.node], scores=tuple(own[n] for n in claim.scores), q=operand(claim.q),
        k=operand(claim.k), v=operand(claim.v), reads=tuple(map(source, claim.reads)),
    )  # fmt: skip
