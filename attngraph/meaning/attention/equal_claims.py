"""Equal layers are recognised once.

What a node is recognised as follows from how it is computed from the operands of the claim. Where another
node is computed in the same way from operands of the same layouts, the claim is written with that node's
operands. (Every claim is checked before it is used, however it was found.) A claim that relies on what a
buffer holds is repeated for that very buffer only.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from attngraph.ir.kept import kept
from attngraph.ir.language import expr as E
from attngraph.meaning.attention.claim import Attention, Operand, View
from attngraph.meaning.attention.layout import ViewOp
from attngraph.meaning.attention.normaliser import Refusal
from attngraph.meaning.attention.program import Seed
from attngraph.meaning.attention.recogniser import Recogniser
from attngraph.meaning.element import Meaning
from attngraph.meaning.equal import Step, steps_of, told

_PARTS = (Attention, Operand, View, ViewOp, Seed)
_MOST_NODES = 2_000
"""A longer way from the operands to the result is not remembered."""


@dataclasses.dataclass(frozen=True)
class _Known:
    claims: tuple[Attention, ...]
    steps: tuple[Step, ...]
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
                again: tuple[Attention, ...] = _mapped(known.claims, own)
                return again
        found = super().examine(node)
        if isinstance(found, tuple) and node not in self._of_values:
            self._remember(node, found)
        return found

    def _remember(self, node: fx.Node, claims: tuple[Attention, ...]) -> None:
        stop = {n for claim in claims for o in (claim.q, claim.k, claim.v) for n in o.bases}
        stop.update(read for claim in claims for read in claim.reads if isinstance(read, fx.Node))
        walk = steps_of(node, lambda place, each: place > 0 and each in stop, self._told)
        order, steps = zip(*itertools.islice(walk, _MOST_NODES + 1), strict=True)
        if len(order) > _MOST_NODES:
            return
        numbers = {each: place for place, each in enumerate(order)}
        leaves = list(_leaves(claims))
        formulas = (n for leaf in leaves if isinstance(leaf, E.Expr) for n in E.walk(leaf))
        named = {leaf for leaf in leaves if isinstance(leaf, fx.Node)}
        if named <= numbers.keys() and not any(isinstance(n.value, fx.Node) for n in formulas):
            known = _Known(claims, steps, {n: numbers[n] for n in named})
            self._known.setdefault(node.target, []).append(known)

    def _placed(self, node: fx.Node, steps: Sequence[Step]) -> list[fx.Node] | None:
        """The nodes that are computed in these steps, by their numbers; None where something differs."""
        found = []
        walk = steps_of(node, lambda place, _: not steps[place][1], self._told)
        for wanted, (each, step) in zip(steps, walk, strict=False):
            if step != wanted:
                return None
            found.append(each)
        return found

    @kept
    def _told(self, node: fx.Node) -> Any:
        """What a step tells of a node, which is its own where it is a buffer whose values are known."""
        return *told(node), node if node in self.meaning.values else None


def _leaves(value: Any) -> Iterator[Any]:
    """Each node, formula and number in a claim, or in a part of one."""
    if isinstance(value, (tuple, *_PARTS)):
        for part in value if isinstance(value, tuple) else vars(value).values():
            yield from _leaves(part)
    else:
        yield value


def _mapped(value: Any, own: dict[fx.Node, fx.Node]) -> Any:
    """The same with other nodes in it."""
    if isinstance(value, tuple):
        return tuple(_mapped(part, own) for part in value)
    if not isinstance(value, _PARTS):
        return own.get(value, value) if isinstance(value, fx.Node) else value
    return dataclasses.replace(value, **{name: _mapped(part, own) for name, part in vars(value).items()})
