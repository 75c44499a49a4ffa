"""What the rewriting of one graph into a step has so far, shared by all that rewrites its values.

A value that follows from earlier tokens (`Scan` in `meaning/tokens/facts.py`) is replaced by a `Rewrite`, one
for each class of scans: `insert.py` has the table. Used by `insert_kv_cache`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from attngraph.ir.graph import module_of, source_of
from attngraph.ir.language.expr import Expr
from attngraph.ir.ops.cached_attention import Carried
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.kept_values import KeptValues, StepInputs
from attngraph.passes.insert_kv_cache.write_formula import NotWritten

aten = torch.ops.aten


class RefutedError(Exception):
    """A value is no sum over earlier tokens, though it looks like one; says why. Raised before anything that
    was in the graph is changed."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


@dataclasses.dataclass
class Step:
    """One graph that is made a step.

    `carried`: what the rows carry, with the nodes that compute the next of it. `rounding`: of the tables from
    which decays are read. `anew`, `assumed`: the lines of values that are computed anew from all tokens, and
    those of which it is taken from the user that they see no later ones.
    """

    tokens: Tokens
    inputs: StepInputs
    kept: KeptValues
    carried: dict[fx.Node, Carried] = dataclasses.field(default_factory=dict)
    rounding: float = 0.0
    anew: list[str] = dataclasses.field(default_factory=list)
    assumed: list[str] = dataclasses.field(default_factory=list)

    def states(
        self, node: fx.Node, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]
    ) -> dict[fx.Node, Carried]:
        """Inputs with what every row carries for a value, one for each shape and dtype."""
        label = module_of(node) or source_of(node)
        about = [
            Carried(f"carried{len(self.carried) + place}", shape, dtype, label)
            for place, (shape, dtype) in enumerate(wanted)
        ]
        return {self.inputs.carried(each): each for each in about}

    def in_place(self, builder: Builder, value: fx.Node, node: fx.Node) -> fx.Node:
        """A value `[tokens, ...]`, whose other dimensions are in order, with the dimensions of a node."""
        space, axes, row = self.tokens.space, self.tokens[node].axes, self.tokens.row_dim(node)
        own = iter(range(1, len(axes)))
        order = [0 if space.token in digits else next(own) for digits in axes if space.row not in digits]
        value = builder.permuted(value, order)
        if row is None:
            return value
        value = builder.unsqueezed(value, row)
        sizes: list[Any] = [builder.size(space.rows) if dim == row else -1 for dim in range(len(axes))]
        return builder.call(aten.expand.default, value, sizes)


Rewrite = Callable[[Step, Builder, fx.Node, Any], tuple[fx.Node, str]]
"""Gets a value and its scan; gives the node that computes it for new tokens, and a note for the report.

Raises:
    NotWritten, NoSize: something cannot be computed for a few new tokens.
"""


def extent_of(*variables: Expr) -> int:
    """How many values the variables have together.

    Raises:
        NotWritten: no number says how many.
    """
    if any(v.args[0].op != "const" for v in variables):
        raise NotWritten("an axis whose length is not a number")
    return math.prod(int(v.args[0].value) for v in variables)
