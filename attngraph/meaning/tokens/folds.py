"""Running products, maxima, minima and log-sum-exps over tokens, where an operation of PyTorch computes them.

(Running sums are found in any spelling by `recurrence.py`, loops by `loops.py`.) Nothing here edits the
graph.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import is_part
from attngraph.meaning.tokens.axes import Axes, Space
from attngraph.meaning.tokens.facts import Fact, Kind, Scan, read_by

_OPS = {
    "aten.cumprod.default": "prod", "aten.cummax.default": "max", "aten.cummin.default": "min",
    "aten.logcumsumexp.default": "logsumexp",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunningFold(Scan):
    """A value that folds `element` of all tokens up to its own: `how` is one of
    `ir/ops/running_fold.py`'s. `variables`: those of its dimensions besides row and token."""

    how: str
    element: Expr
    variables: tuple[Expr, ...]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        return read_by(self.element)

    @property
    def reason(self) -> str:
        return f"a running {self.how} over earlier tokens"


def find_fold(
    meaning: Meaning, space: Space, facts: Mapping[fx.Node, Fact], node: fx.Node, axes: Axes
) -> RunningFold | None:
    """How a value with these axes is folded over the tokens so far, or None."""
    called: Any = node.args[0] if is_part(node) and node.args[1] == 0 else node
    how = _OPS.get(str(called.target))
    if how is None:
        return None
    operand = called.args[0]
    fact, rank = facts.get(operand), len(axes)
    over = int(argument(called, "dim")) % max(rank, 1)
    if rank == 0 or axes[over] != (space.token,):
        return None
    if fact is None or fact.kind not in (Kind.TOKEN, Kind.POSITION, Kind.ATTENTION, Kind.SCAN):
        return None
    at = space.indices(axes, meaning.shape(node))
    if not space.follows(fact.axes, at):
        return None
    variables = tuple(i for i, digits in zip(at, axes, strict=True) if not digits)
    return RunningFold(how, E.read(operand, at, meaning.kind(operand)), variables)
