"""Rules of pointwise ops: arithmetic, comparisons, selections, functions of one number."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Indices, Unliftable, part_rule, rule

POINTWISE = Category.POINTWISE
_SOFTMAX = ("aten.softmax.", "aten._softmax.", "aten._safe_softmax.")
_KEEPS_FINITE = ("aten._to_copy.", "aten.to.", "aten.dropout.", "aten.masked_fill.", "aten.contiguous.")


def operand(context: Meaning, value: Any, at: Indices) -> Expr:
    """An operand of a pointwise op: a tensor read where it broadcasts to, or a number."""
    return context.read_broadcast(value, at) if context.is_tensor(value) else context.scalar(value)


Operand = Callable[[Meaning, Any, Indices], Expr]


def register(names: tuple[str, ...], build: Callable[..., Expr], count: int, of: Operand = operand) -> None:
    """Register an op that makes this of its first operands."""

    def element(context: Meaning, node: fx.Node, at: Indices) -> Expr:
        return build(*(of(context, value, at) for value in node.args[:count]))

    rule(POINTWISE, *names)(element)


def overloads(*names: str) -> tuple[str, ...]:
    return tuple(f"{n}.{overload}" for n in names for overload in ("Tensor", "Scalar"))


def _truth(value: Expr) -> Expr:
    return value if value.kind == "bool" else M.ne(value, E.ZERO)


def _product(a: Expr, b: Expr) -> Expr:
    return M.and_(a, b) if a.kind == b.kind == "bool" else M.mul(a, b)


def _invert(value: Expr) -> Expr:
    return M.not_(value) if value.kind == "bool" else M.sub(E.const(-1), value)


def _maximum(a: Expr, b: Expr) -> Expr:
    return M.function("max", a, b)


def _minimum(a: Expr, b: Expr) -> Expr:
    return M.function("min", a, b)


def _unary(name: str) -> Callable[[Expr], Expr]:
    return lambda x: M.function(name, x)


for _name in ("tanh", "sigmoid", "sin", "cos", "erf", "atan", "log2", "sign"):
    register((f"{_name}.default",), _unary(_name), 1)
register(("log.default",), M.log, 1)
register(("sqrt.default",), _unary("sqrt"), 1)
register(("rsqrt.default",), lambda x: M.recip(M.function("sqrt", x)), 1)
register(("reciprocal.default",), M.recip, 1)
register(("neg.default",), M.neg, 1)
register(("abs.default",), M.absolute, 1)
register(("square.default",), lambda x: M.mul(x, x), 1)
register(("relu.default",), lambda x: _maximum(x, E.ZERO), 1)
register(("isnan.default",), _unary("isnan"), 1)
register(("logical_not.default",), lambda x: M.not_(_truth(x)), 1)
register(("bitwise_not.default",), _invert, 1)
register(overloads("mul"), _product, 2)
register((*overloads("pow"), "pow.Tensor_Scalar", "pow.Tensor_Tensor"), M.power, 2)
register(overloads("remainder"), M.mod, 2)
register(("floor_divide.default", "floor_divide.Scalar"), M.floordiv, 2)
register(("maximum.default", "max.other"), _maximum, 2)
register(("minimum.default", "min.other"), _minimum, 2)
register(("clamp_min.default", "clamp_min.Tensor"), _maximum, 2)
register(("clamp_max.default", "clamp_max.Tensor"), _minimum, 2)
register(("logical_and.default",), lambda a, b: M.and_(_truth(a), _truth(b)), 2)
register(("logical_or.default",), lambda a, b: M.or_(_truth(a), _truth(b)), 2)
register(("logical_xor.default",), lambda a, b: M.where(_truth(a), M.not_(_truth(b)), _truth(b)), 2)
register(("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar"), M.where, 3)
register(("masked_fill.Scalar", "masked_fill.Tensor"), lambda x, mask, value: M.where(mask, value, x), 3)


def _asinh(x: Expr) -> Expr:
    size = M.absolute(x)
    return M.mul(M.function("sign", x), M.log(M.add(size, M.function("sqrt", M.add(M.mul(x, x), E.ONE)))))


def _asin(x: Expr) -> Expr:
    return M.function("atan", M.div(x, M.function("sqrt", M.sub(E.ONE, M.mul(x, x)))))


def _atanh(x: Expr) -> Expr:
    return M.mul(E.const(0.5), M.log(M.div(M.add(E.ONE, x), M.sub(E.ONE, x))))


def _but_nan(choose: Callable[[Expr, Expr], Expr], x: Expr, y: Expr) -> Expr:
    """The chosen one of two numbers, or that which is one."""
    isnan = _unary("isnan")
    return M.where(isnan(x), y, M.where(isnan(y), x, choose(x, y)))


def _copysign(x: Expr, of: Expr) -> Expr:
    """Negative where the other number is, minus zero too, whose reciprocal is minus infinity."""
    size = M.absolute(x)
    return M.where(M.or_(M.lt(of, E.ZERO), M.lt(M.recip(of), E.ZERO)), M.neg(size), size)


register(("erfc.default",), lambda x: M.sub(E.ONE, M.function("erf", x)), 1)
register(("log10.default",), lambda x: M.mul(E.const(1 / math.log(10)), M.log(x)), 1)
register(("tan.default",), lambda x: M.div(M.function("sin", x), M.function("cos", x)), 1)
register(("sinh.default",), lambda x: M.mul(E.const(0.5), M.sub(M.exp(x), M.exp(M.neg(x)))), 1)
register(("cosh.default",), lambda x: M.mul(E.const(0.5), M.add(M.exp(x), M.exp(M.neg(x)))), 1)
register(("atanh.default",), _atanh, 1)
register(("asinh.default",), _asinh, 1)
register(("asin.default",), _asin, 1)
register(("acos.default",), lambda x: M.sub(E.const(math.pi / 2), _asin(x)), 1)
register(("hypot.default",), lambda x, y: M.function("sqrt", M.add(M.mul(x, x), M.mul(y, y))), 2)
register(("fmax.default",), lambda x, y: _but_nan(_maximum, x, y), 2)
register(("fmin.default",), lambda x, y: _but_nan(_minimum, x, y), 2)
register(overloads("copysign"), _copysign, 2)
register(("silu.default",), lambda x: M.mul(x, M.function("sigmoid", x)), 1)
register(("log1p.default",), lambda x: M.log(M.add(E.ONE, x)), 1)
register(("expm1.default",), lambda x: M.sub(M.exp(x), E.ONE), 1)
register(("isinf.default",), lambda x: M.eq(M.absolute(M.number(x)), E.INF), 1)


@rule(POINTWISE, "leaky_relu.default")
def leaky_relu(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    value = operand(context, node.args[0], at)
    slope = context.scalar(argument(node, "negative_slope"))
    return M.where(M.lt(E.ZERO, value), value, M.mul(slope, value))


@rule(POINTWISE, "elu.default")
def elu(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    value = operand(context, node.args[0], at)
    alpha, scale, inner = (context.scalar(argument(node, name)) for name in ("alpha", "scale", "input_scale"))
    below = M.mul(alpha, scale, M.sub(M.exp(M.mul(inner, value)), E.ONE))
    return M.where(M.lt(E.ZERO, value), M.mul(scale, value), below)


@rule(POINTWISE, "softplus.default")
def softplus(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    value = operand(context, node.args[0], at)
    beta, threshold = (context.scalar(argument(node, name)) for name in ("beta", "threshold"))
    inner = M.mul(beta, value)
    return M.where(M.lt(threshold, inner), value, M.mul(M.recip(beta), _log_of_one_plus(inner)))


@rule(POINTWISE, "log_sigmoid.default")
def log_sigmoid(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    return M.neg(_log_of_one_plus(M.neg(operand(context, node.args[0], at))))


def _log_of_one_plus(exponent: Expr) -> Expr:
    """log(1 + e^x), in a form that does not overflow."""
    below = M.exp(M.neg(M.absolute(exponent)))
    return M.add(_maximum(exponent, E.ZERO), M.log(M.add(E.ONE, below)))


@rule(POINTWISE, "hardtanh.default")
def hardtanh(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    low, high = (context.scalar(argument(node, name)) for name in ("min_val", "max_val"))
    return _minimum(_maximum(operand(context, node.args[0], at), low), high)


@rule(POINTWISE, "addcmul.default", "addcdiv.default")
def addcmul(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    whole, a, b = (operand(context, x, at) for x in node.args[:3])
    times = context.scalar(argument(node, "value"))
    return M.add(whole, M.mul(times, a, M.recip(b) if "div" in str(node.target) else b))


@rule(POINTWISE, "lerp.Scalar", "lerp.Tensor")
def lerp(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    start, end, weight = (operand(context, x, at) for x in node.args[:3])
    return M.add(start, M.mul(weight, M.sub(end, start)))


_COMPARE: dict[str, Callable[[Expr, Expr], Expr]] = {
    "eq": M.eq, "ne": M.ne, "le": M.le, "lt": M.lt,
    "ge": lambda a, b: M.le(b, a), "gt": lambda a, b: M.lt(b, a),
}  # fmt: skip


@rule(POINTWISE, *overloads(*_COMPARE))
def compare(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    a, b = (context.compared(value, at) for value in node.args[:2])
    return _COMPARE[str(node.target).split(".")[1]](a, b)


@rule(POINTWISE, "floor.default", "ceil.default", "trunc.default", "round.default")
def rounded(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    return M.function(str(node.target).split(".")[1], context.exactly(node.args[0], at))


@rule(POINTWISE, "exp.default", "exp2.default")
def exp(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    value = context.exponent(operand(context, node.args[0], at))
    return M.exp(M.mul(E.const(math.log(2)), value) if "exp2" in str(node.target) else value)


@rule(POINTWISE, "logaddexp.default", "logaddexp2.default")
def logaddexp(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    base = math.log(2) if "logaddexp2" in str(node.target) else 1.0
    a, b = (M.exp(M.mul(E.const(base), operand(context, x, at))) for x in node.args[:2])
    return M.mul(E.const(1 / base), M.log(M.add(a, b)))


@rule(POINTWISE, "outer.default")
def outer(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    return M.mul(context.read(node.args[0], at[:1]), context.read(node.args[1], at[1:]))


@rule(POINTWISE, *overloads("add", "sub", "rsub"))
def add(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    name = str(node.target).split(".")[1]
    if context.kind(node) == "bool" and name == "add":
        return M.or_(*(_truth(operand(context, x, at)) for x in node.args[:2]))
    a, b = (M.number(operand(context, x, at)) for x in node.args[:2])
    a, b = (b, a) if name == "rsub" else (a, b)
    scaled = M.mul(context.scalar(argument(node, "alpha")), b)
    return M.add(a, scaled) if name == "add" else M.sub(a, scaled)


@rule(POINTWISE, *overloads("div"), "div.Tensor_mode", "div.Scalar_mode", "true_divide.Tensor")
def div(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    a, b = (operand(context, x, at) for x in node.args[:2])
    mode = node.kwargs.get("rounding_mode")
    if mode == "floor":
        return M.floordiv(a, b)
    if mode is None:
        return M.div(a, b)
    if a.kind == "int" and b.op == "const" and b.kind == "int" and b.value != 0:
        # Towards zero, in integers: a rounded reciprocal would be one off at multiples.
        a, b = (a, b) if b.value > 0 else (M.neg(a), M.neg(b))
        return M.where(M.le(E.ZERO, a), M.floordiv(a, b), M.neg(M.floordiv(M.neg(a), b)))
    return M.function("trunc", M.div(a, b))


@rule(POINTWISE, "clamp.default", "clamp.Tensor")
def clamp(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    value = operand(context, node.args[0], at)
    low, high = argument(node, "min"), argument(node, "max")
    if low is not None:
        value = _maximum(value, operand(context, low, at))
    return value if high is None else _minimum(value, operand(context, high, at))


@rule(POINTWISE, "nan_to_num.default")
def nan_to_num(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """NaN becomes a number, and so do infinities, which weights of a softmax never are."""
    value = operand(context, node.args[0], at)
    limits = torch.finfo(node.meta["val"].dtype)
    fills = [argument(node, name) for name in ("nan", "posinf", "neginf")]
    defaults = (0.0, limits.max, limits.min)
    nan, above, below = (E.const(float(d if f is None else f)) for f, d in zip(fills, defaults, strict=True))
    source = node.args[0]
    while isinstance(source, fx.Node) and str(source.target).startswith(_KEEPS_FINITE):
        source = source.args[0]
    if not isinstance(source, fx.Node) or not str(source.target).startswith(_SOFTMAX):
        value = M.where(M.eq(value, E.INF), above, M.where(M.eq(value, E.NEG_INF), below, value))
    return M.where(E.make("isnan", (value,), None, "bool"), nan, value)


@rule(POINTWISE, "dropout.default")
def dropout(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    value = operand(context, node.args[0], at)
    rate = float(argument(node, "p"))
    if not argument(node, "train") or rate == 0:
        return value
    return dropped(node, value, rate, at, context.shape(node.args[0]))


@part_rule(POINTWISE, "native_dropout.default")
def native_dropout(context: Meaning, node: fx.Node, part: int, at: Indices) -> Expr:
    if part != 0:
        raise Unliftable("the mask of a dropout")
    value, rate = operand(context, node.args[0], at), float(argument(node, "p"))
    if argument(node, "train") is False or rate == 0:
        return value
    return dropped(node, value, rate, at, context.shape(node.args[0]))


def dropped(node: fx.Node, value: Expr, rate: float, at: Indices, shape: Indices) -> Expr:
    """Dropout in training of an element of a tensor of this shape: zero with probability `rate`, else
    scaled up. The node has random numbers of its own, one for each element's indices."""
    places, extents = list(at), list(shape)
    while len(places) > 4:
        places[:2] = [M.add(M.mul(places[0], extents[1]), places[1])]
        extents[:2] = [M.mul(extents[0], extents[1])]
    number = E.make("random", tuple(places), node, "float")
    if rate >= 1:
        return E.const(0.0)
    kept = E.make("le", (E.const(rate), number), None, "bool")
    return M.where(kept, M.mul(E.const(1 / (1 - rate)), value), E.const(0.0))
