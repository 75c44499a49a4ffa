"""Loops and folds over tokens (`meaning/tokens/loops.py`, `folds.py`), carried on from one call to the next.

A loop becomes one `attngraph::loop`: the step program of the model's own operations, which takes new tokens
one after the other, and hands on what the model hands on. A fold (a running maximum, say) becomes one
`attngraph::running_fold`. Used by `insert_kv_cache`.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops.cached_attention import Carried
from attngraph.ir.ops.loop import loop
from attngraph.ir.ops.running_fold import EXACT, running_fold
from attngraph.meaning.attention.layout import NoView, solve
from attngraph.meaning.tokens.facts import Fact, RunningFold, TokenLoop
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.carry import carried_in, extent_of, in_place
from attngraph.passes.insert_kv_cache.step_inputs import StepInputs
from attngraph.passes.insert_kv_cache.write_formula import FormulaWriter, NotWritten

aten = torch.ops.aten


@dataclasses.dataclass
class TakeSteps:
    """Rewrites the values of one graph; `carried` gets what the rows carry, with the nodes that compute the
    next of it."""

    graph: ProgramGraph
    tokens: Tokens
    inputs: StepInputs
    carried: dict[fx.Node, Carried]

    def replace(self, builder: Builder, node: fx.Node, fact: Fact, label: str) -> fx.Node:
        """The node that computes the value for new tokens.

        Raises:
            NotWritten: what a step takes, or what it gives, cannot be written as operations.
        """
        found, space, call = fact.scan, self.tokens.space, builder.call
        if isinstance(found, RunningFold):
            return self._fold(builder, node, fact, found, label)
        assert isinstance(found, TokenLoop)
        about = [
            Carried(f"carried{len(self.carried) + place}", handed.shape, handed.dtype, label)
            for place, handed in enumerate(found.handed)
        ]
        device = node.meta["val"].device
        taken = [
            FormulaWriter(builder, self.tokens.meaning, space, own, dtype, device).tensor(element, own)
            for element, own, dtype in found.taken
        ]
        rows = self.inputs.rows
        both = call(
            loop, taken, list(found.shared), [self.inputs.carried(a) for a in about], rows("starts"),
            rows("first"), found.program,
        )  # fmt: skip
        out = call(operator.getitem, both, 0)
        for place, what in enumerate(about):
            self.carried[call(operator.getitem, both, 1 + place)] = what
        return in_place(builder, space, self._viewed(builder, out, found), fact)

    def _fold(
        self, builder: Builder, node: fx.Node, fact: Fact, found: RunningFold, label: str
    ) -> fx.Node:  # fmt: skip
        space, call, value = self.tokens.space, builder.call, node.meta["val"]
        dtype = torch.float32 if value.is_floating_point() and value.dtype.itemsize < 4 else value.dtype
        writer = FormulaWriter(
            builder, self.tokens.meaning, space, found.variables, dtype, value.device
        )  # fmt: skip
        given = writer.tensor(found.element, found.variables)
        shape = tuple(extent_of(v) for v in found.variables)
        kept = dtype if found.how in EXACT else carried_in(value.dtype)
        about = Carried(f"carried{len(self.carried)}", shape, kept, label)
        rows = self.inputs.rows
        both = call(running_fold, given, self.inputs.carried(about), rows("starts"), rows("first"), found.how)
        out, after = (call(operator.getitem, both, n) for n in (0, 1))
        self.carried[after] = about
        if dtype != value.dtype:
            out = call(aten._to_copy.default, out, dtype=value.dtype)
        return in_place(builder, space, out, fact)

    def _viewed(self, builder: Builder, out: fx.Node, found: TokenLoop) -> fx.Node:
        """The program's first result as `[tokens, *variables]`."""
        token, meaning = self.tokens.space.token, self.tokens.meaning
        shape = (token.args[0], *meaning.shape(out)[1:])
        try:
            steps = solve(shape, (token, *found.result), ((token,), *((v,) for v in found.variables)))
        except NoView:
            raise NotWritten("its result, which is no view of what a step gives,") from None
        return builder.view(out, steps)
