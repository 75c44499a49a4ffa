"""Rules of pointwise ops that torch composes of others: the rules of their decompositions say what they are.

An op can be named here if all that torch's own decomposition calls has rules. The decomposition is traced
once on numbers, and its formula is read at each element's operands. (gelu is not named: fused steps have
a formula of it, `passes/named.py`.)
"""

import functools
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx

from attngraph.ir.graph.call import arguments
from attngraph.ir.language import E, Expr
from attngraph.ir.modes import own_modes
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Indices, Unliftable, rule

COMPOSED = (
    "celu.default", "deg2rad.default", "hardshrink.default", "hardsigmoid.default",
    "hardswish.default", "heaviside.default", "logit.default", "mish.default", "rad2deg.default",
    "relu6.default", "selu.default", "sgn.default", "sinc.default", "softshrink.default",
    "special_entr.default", "special_xlog1py.default", "threshold.default", "xlogy.Tensor",
)  # fmt: skip


@rule(Category.POINTWISE, *COMPOSED)
def composed(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    given = arguments(node)
    tensors = {name: value for name, value in given.items() if context.is_tensor(value)}
    others = tuple((name, value) for name, value in given.items() if name not in tensors)
    if any(isinstance(value, fx.Node) for _, value in others):
        raise Unliftable("a number that is computed")
    dtypes = tuple((name, t.meta["val"].dtype) for name, t in tensors.items())
    formula, numbers = formula_of(node.target, dtypes, others)
    compares = any(n.op in E.COMPARISONS for n in E.walk(formula))
    values = ((context.compared if compares else context.read_broadcast)(t, at) for t in tensors.values())
    return M.substitute(formula, dict(zip(numbers, values, strict=True)))


@functools.cache
def formula_of(
    op: Any, tensors: tuple[tuple[str, torch.dtype], ...], others: tuple[tuple[str, Any], ...]
) -> tuple[Expr, tuple[Expr, ...]]:
    """What an op gives for numbers in the place of tensors of these names, and how they are called there.

    Raises:
        Unliftable: its decomposition calls something that has no rule.
    """

    def call(*numbers: torch.Tensor) -> torch.Tensor:
        names = (name for name, _ in tensors)
        result: torch.Tensor = op(**dict(zip(names, numbers, strict=True)), **dict(others))
        return result

    numbers = [torch.ones((), dtype=dtype) for _, dtype in tensors]
    with own_modes():
        graph = make_fx(call, {op: decomposition_table[op]}, "fake")(*numbers).graph
    (result,) = graph.output_node().all_input_nodes
    meaning = Meaning()
    given = tuple(meaning.read(n, ()) for n in graph.find_nodes(op="placeholder"))
    formula = meaning.elementwise(meaning.read(result, ()))
    if any(n.op == "read" and n not in given for n in E.walk(formula)):
        raise Unliftable(f"{op} of these dtypes")
    return formula, given
