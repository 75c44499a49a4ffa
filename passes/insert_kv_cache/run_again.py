"""Values computed anew from all earlier tokens (`meaning/tokens/looks_back.py`), over a cache of what
they are computed from.

A step puts together what every row has of all its tokens, one row below the other, with zeros after the last
token of a shorter row (`attngraph::history`). The model's own operations run on that, as on a batch of whole
sequences, and the results of the new tokens are taken. No token sees a later one, so the zeros change
nothing.
Used by `insert_kv_cache`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from attngraph.errors import NoDecoderError
from attngraph.ir.graph import is_size, op_name, source_of
from attngraph.ir.language.expr import Expr
from attngraph.meaning.algebra.sizes import size_expression
from attngraph.meaning.tokens.looks_back import History
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.build import Builder, NoSize
from attngraph.passes.insert_kv_cache.free_tokens import repeated
from attngraph.passes.insert_kv_cache.step import Step

aten = torch.ops.aten


def rerun(
    tokens: Tokens, builder: Builder, region: Sequence[fx.Node], given: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The operations of a region on other sequences. `given`: what some of its operands are there, the first
    with its rows and tokens where the original has them."""
    space, meaning = tokens.space, tokens.meaning
    operand, sequence = next(iter(given.items()))
    axes = tokens[operand].axes
    sizes: dict[Expr, Any] = {
        space.tokens: (sequence, space.place(axes, space.token)),
        space.rows: (sequence, space.place(axes, space.row)),
    }
    done: dict[fx.Node, fx.Node] = dict(given)
    extents = {e for step in region for e in _extents(step)}
    for step in region:
        for size in (n for n in step.all_input_nodes if is_size(n) and n not in done):
            formula = size_expression(size.meta["val"])
            done[size] = builder.size(meaning.renamed(formula), sizes)
            if formula in extents and isinstance(done[size], fx.Node):
                # Torch does not see it in every formula of an unknown number.
                torch._check(done[size].meta["val"] >= 0)
        done[step] = repeated(tokens, builder, step, done, sizes)
        if "attention" in step.meta:
            done[step].meta["attention"] = step.meta["attention"]
    return done


def _extents(node: fx.Node) -> set[Expr]:
    """The extents of what a node gives, as formulas of sizes."""
    found = node.meta.get("val")
    tensors = found if isinstance(found, tuple | list) else [found]
    return {size_expression(s) for t in tensors if isinstance(t, torch.Tensor) for s in t.shape}


def run_again(step: Step, builder: Builder, node: fx.Node, scan: History) -> tuple[fx.Node, str]:
    """A `Rewrite` of values that are computed from all earlier tokens."""
    where = f"{op_name(node)} at {source_of(node)}"
    try:
        new = _run_again(step, builder, node, scan)
    except (NoSize, RuntimeError) as problem:  # torch may not follow the operations for such sizes
        raise NoDecoderError(
            f"{where}: it is computed from all earlier tokens, and what computes it cannot be traced for "
            "sequences of any length."
        ) from problem
    step.anew.append(source_of(node))
    if node in step.tokens.assumed:
        step.assumed.append(f"{where} ({step.tokens.assumed[node]})")
    return new, (
        f"{where} is computed anew from all tokens at every step, because what it does with them is no "
        "attention that is known here"
    )


def _run_again(step: Step, builder: Builder, node: fx.Node, scan: History) -> fx.Node:
    """The node that computes the value for new tokens."""
    tokens, inputs = step.tokens, step.inputs
    space, rows, fact = tokens.space, inputs.rows, tokens[node]
    whole: dict[fx.Node, fx.Node] = {}
    as_long: fx.Node | None = None
    for operand in scan.operands:
        pages, store = step.kept.pages_of(builder, operand)
        dim = space.place(tokens[operand].axes, space.token)
        assert dim is not None
        whole[operand] = builder.call(
            torch.ops.attngraph.history.default, pages, operand, inputs.table(store.window), rows("starts"),
            rows("first"), dim, as_long,
        )  # fmt: skip
        as_long = as_long or builder.call(aten.movedim.int, whole[operand], dim, 0)
    found = rerun(tokens, builder, scan.region, whole)[node]
    token = space.place(fact.axes, space.token)
    assert token is not None
    first = builder.call(aten.movedim.int, found, token, 1)
    picked = builder.call(aten.index.Tensor, first, [rows("row"), rows("positions")])
    new = builder.call(aten.movedim.int, builder.call(aten.unsqueeze.default, picked, 0), 1, token)
    # A step has one sequence, and what follows counts it as the model counts its rows.
    count = builder.call(aten.sym_size.int, inputs.ids, 0)
    return builder.call(aten.expand.default, new, [count, *[-1] * (new.meta["val"].ndim - 1)])
