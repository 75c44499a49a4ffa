"""Loops and folds over tokens (`meaning/tokens/loops.py`, `windows.py`), carried on over calls.

A loop becomes one `attngraph::loop`: the step program of the model's own operations, which takes new tokens
one after the other, and hands on what the model hands on. A fold (a running maximum, say) becomes one
`attngraph::running_fold`. Used by `insert_kv_cache`.
"""

import operator

import torch
from torch import fx

from attngraph.ir.graph.source import source_of
from attngraph.ir.ops.loop import EXACT, loop, running_fold
from attngraph.meaning.attention.layout import NoView, solve
from attngraph.meaning.tokens.facts import Scan
from attngraph.meaning.tokens.loops import TokenLoop
from attngraph.meaning.tokens.windows import RunningFold
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.step import Step, carried_in, extent_of
from attngraph.passes.insert_kv_cache.write_formula import FormulaWriter, NotWritten

aten = torch.ops.aten


def take_steps(step: Step, builder: Builder, node: fx.Node, scan: TokenLoop) -> tuple[fx.Node, str]:
    """A `Rewrite` of loops."""
    tokens, rows, device = step.tokens, step.inputs.rows, node.meta["val"].device
    states = step.states(node, [(handed.shape, handed.dtype) for handed in scan.handed])
    taken = [
        FormulaWriter(builder, tokens.meaning, tokens.space, own, dtype, device).tensor(element, own)
        for element, own, dtype in scan.taken
    ]
    shared, begins = list(scan.shared), (rows("starts"), rows("first"))
    both = builder.call(loop, taken, shared, list(states), *begins, scan.program)
    out = builder.call(operator.getitem, both, 0)
    for place, what in enumerate(states.values()):
        step.carried[builder.call(operator.getitem, both, 1 + place)] = what
    token = tokens.space.token
    shape = (token.args[0], *tokens.meaning.shape(out)[1:])
    try:  # the program's first result as `[tokens, *variables]`
        views = solve(shape, (token, *scan.result), ((token,), *((v,) for v in scan.variables)))
    except NoView:
        raise NotWritten("its result, which is no view of what a step gives,") from None
    return step.in_place(builder, builder.view(out, views), node), _note(node, scan)


def fold(step: Step, builder: Builder, node: fx.Node, scan: RunningFold) -> tuple[fx.Node, str]:
    """A `Rewrite` of folds."""
    call, value, rows = builder.call, node.meta["val"], step.inputs.rows
    dtype = torch.float32 if value.is_floating_point() and value.dtype.itemsize < 4 else value.dtype
    space, meaning = step.tokens.space, step.tokens.meaning
    writer = FormulaWriter(builder, meaning, space, scan.variables, dtype, value.device)
    given = writer.tensor(scan.element, scan.variables)
    shape = tuple(extent_of(v) for v in scan.variables)
    kept = dtype if scan.how in EXACT else carried_in(value.dtype)
    ((state, about),) = step.states(node, [(shape, kept)]).items()
    both = call(running_fold, given, state, rows("starts"), rows("first"), scan.how)
    out, after = (call(operator.getitem, both, n) for n in (0, 1))
    step.carried[after] = about
    if dtype != value.dtype:
        out = call(aten._to_copy.default, out, dtype=value.dtype)
    return step.in_place(builder, out, node), _note(node, scan)


def _note(node: fx.Node, scan: Scan) -> str:
    return f"{scan.reason}, at {source_of(node)}, is carried from token to token"
