"""Norms and activations that PyTorch has as one operation, as formulas of single elements.

Recognising attention has no use for what is inside of norms. Activations round as PyTorch's do: where an
element rule has `e^x - 1` or `log(1 + x)`, which is the same number, here is what keeps the digits of a small
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.parser import operation
from attngraph.ir.language.token_program import extent
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Unliftable

_Rule = Callable[[Meaning, fx.Node, tuple[Expr, ...]], Expr]
NAMED: dict[str, _Rule] = {}


def _named(*names: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        NAMED.update({f"aten.{name}": rule for name in names})
        return rule

    return register


def _mean(context: Meaning, place: Expr, value: Expr) -> Expr:
    total = E.make("sum", (place, value), None, "float")
    return operation("div", total, E.const(float(extent(place))))


def _last(context: Meaning, node: fx.Node) -> Expr:
    """An index over the last dimension, if the norm is over that alone."""
    source, shape = node.args[0], node.args[1]
    extents = context.shape(source)
    if not isinstance(shape, (list, tuple)) or len(shape) != 1 or extents[-1].op != "const":
        raise Unliftable("a norm over more than the last dimension")
    return context.fresh(extents[-1])


def _affine(context: Meaning, value: Expr, weight: Any, bias: Any, at: tuple[Expr, ...]) -> Expr:
    if weight is not None:
        value = operation("mul", value, context.read(weight, at[-1:]))
    return value if bias is None else operation("add", value, context.read(bias, at[-1:]))


@_named("layer_norm.default")
def _layer_norm(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
    """(x - mean) / sqrt(variance + epsilon) (Ba, Kiros & Hinton 2016, arXiv 1607.06450)."""
    one, other = _last(context, node), _last(context, node)
    mean = _mean(context, one, context.read(node.args[0], (*at[:-1], one)))
    apart = operation("sub", context.read(node.args[0], (*at[:-1], other)), mean)
    variance = _mean(context, other, operation("mul", apart, apart))
    epsilon = E.const(float(argument(node, "eps")))
    by = operation("rsqrt", operation("add", variance, epsilon))
    value = operation("mul", operation("sub", context.read(node.args[0], at), mean), by)
    return _affine(context, value, argument(node, "weight"), argument(node, "bias"), at)


@_named("rms_norm.default")
def _rms_norm(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
    """x / sqrt(mean of x^2 + epsilon) (Zhang & Sennrich 2019, arXiv 1910.07467)."""
    place = _last(context, node)
    element = context.read(node.args[0], (*at[:-1], place))
    square = _mean(context, place, operation("mul", element, element))
    epsilon = argument(node, "eps")
    if epsilon is None:
        raise Unliftable("an epsilon that is left to a 16-bit dtype")
    by = operation("rsqrt", operation("add", square, E.const(float(epsilon))))
    value = operation("mul", context.read(node.args[0], at), by)
    return _affine(context, value, argument(node, "weight"), None, at)


@_named("gelu.default")
def _gelu(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
    """Hendrycks & Gimpel 2016, arXiv 1606.08415, and its approximation by tanh."""
    x = context.read(node.args[0], at)
    if node.kwargs.get("approximate", "none") == "tanh":
        cube = operation("mul", operation("mul", x, x), x)
        inner = operation("add", x, operation("mul", E.const(0.044715), cube))
        bent = operation("tanh", operation("mul", E.const(math.sqrt(2 / math.pi)), inner))
    else:
        bent = operation("erf", operation("mul", x, E.const(math.sqrt(0.5))))
    return operation("mul", operation("mul", E.const(0.5), x), operation("add", E.const(1.0), bent))


@_named("silu.default")
def _silu(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
    x = context.read(node.args[0], at)
    return operation("mul", x, operation("sigmoid", x))


@_named("expm1.default")
def _expm1(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
    return _exp_less_one(context.read(node.args[0], at))


@_named("log1p.default")
def _log1p(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
    return _log_of_one_and(context.read(node.args[0], at))


@_named("elu.default")
def _elu(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
    x = context.read(node.args[0], at)
    alpha, scale, inner = (E.const(float(argument(node, n))) for n in ("alpha", "scale", "input_scale"))
    below = operation("mul", operation("mul", alpha, scale), _exp_less_one(operation("mul", inner, x)))
    return operation("where", operation("lt", E.const(0.0), x), operation("mul", scale, x), below)


@_named("softplus.default")
def _softplus(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
    x = context.read(node.args[0], at)
    beta, most = (float(argument(node, name)) for name in ("beta", "threshold"))
    inner = operation("mul", E.const(beta), x)
    soft = operation("mul", E.const(1 / beta), _log_of_one_and(operation("exp", inner)))
    return operation("where", operation("lt", E.const(most), inner), x, soft)


@_named("log_sigmoid.default")
def _log_sigmoid(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
    x = context.read(node.args[0], at)
    below = operation("exp", operation("neg", operation("abs", x)))
    return operation("sub", operation("min", x, E.const(0.0)), _log_of_one_and(below))


def _exp_less_one(x: Expr) -> Expr:
    """e^x - 1 = tanh(x / 2) (e^x + 1)."""
    half = operation("tanh", operation("mul", E.const(0.5), x))
    return operation("mul", half, operation("add", operation("exp", x), E.const(1.0)))


def _log_of_one_and(x: Expr) -> Expr:
    """log(1 + x): what 1 + x was rounded by, u - 1 against x, corrects the logarithm (Kahan)."""
    one = E.const(1.0)
    whole = operation("add", x, one)
    log = operation("log", whole)
    near = operation("mul", log, operation("div", x, operation("sub", whole, one)))
    corrected = operation("where", operation("lt", one, x), log, near)
    return operation("where", operation("eq", whole, one), x, corrected)
