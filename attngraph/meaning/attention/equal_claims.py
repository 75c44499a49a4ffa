"""Equal layers are recognised once.

What a node is recognised as follows from how it is computed from the operands of the claim. Where another
node is computed in the same way from operands of the same layouts, the claim is written with that node's
operands. (Every claim is checked before it is used, however it was found.) A claim that relies on what a
buffer holds is repeated for that very buffer only.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from attngraph.ir.graph.call import described
from attngraph.ir.graph.program_graph import is_size
from attngraph.ir.kept import kept
from attngraph.ir.language import expr as E
from attngraph.meaning.attention.claim import Attention, Operand, View
from attngraph.meaning.attention.layout import ViewOp
from attngraph.meaning.attention.normaliser import Refusal
from attngraph.meaning.attention.program import Seed
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

    def of(self, place: Sequence[fx.Node]) -> tuple[Attention, ...]:
        """The claims with the nodes of another place, by their numbers."""
        own = {node: place[number] for node, number in self.numbers.items()}
        found: tuple[Attention, ...] = _mapped(self.claims, lambda leaf: own.get(leaf, leaf))
        return found


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
                return known.of(place)
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
        leaves: list[Any] = []

        def noted(leaf: Any) -> Any:
            leaves.append(leaf)
            return leaf

        _mapped(claims, noted)
        formulas = (n for leaf in leaves if isinstance(leaf, E.Expr) for n in E.walk(leaf))
        named = {leaf for leaf in leaves if isinstance(leaf, fx.Node)}
        if named <= numbers.keys() and not any(isinstance(n.value, fx.Node) for n in formulas):
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
        given = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"] if is_size(n) else "%")
        called = (node.target, described(given)) if node.op == "call_function" else None
        return node.op, called, described(node.meta.get("val")), known


def _computed_from(node: fx.Node) -> list[fx.Node]:
    """Its operands that are no sizes."""
    return [n for n in node.all_input_nodes if not is_size(n)]


def _operands(claim: Attention) -> Iterator[fx.Node]:
    """The tensors of the graph that a claim computes its result from."""
    for operand in (claim.q, claim.k, claim.v):
        yield from operand.bases
    yield from (read for read in claim.reads if isinstance(read, fx.Node))


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """A claim, or a part of one, with `leaf` of each node, formula and number in it."""
    if isinstance(value, tuple):
        return tuple(_mapped(part, leaf) for part in value)
    if not isinstance(value, (Attention, Operand, View, ViewOp, Seed)):
        return leaf(value)
    parts = {f.name: _mapped(getattr(value, f.name), leaf) for f in dataclasses.fields(value)}
    return dataclasses.replace(value, **parts)
