"""Norms and activations that PyTorch has as one operation, each as the formula of an element.

The formulas are text of the score language and stand here once: `fuse_token_wise` asks for an element of
such an operation (`NAMED`; recognising attention has no use for what is inside of norms), and `tidy` finds
what a model spells out. They round as PyTorch's operations do: where an element rule has `e^x - 1` or
`log(1 + x)`, which is the same number, here is what keeps the digits of a small one.
"""

import math
from collections.abc import Callable

from torch import fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr, expression
from attngraph.ir.language.token_program import extent
from attngraph.meaning import M, Meaning, Unliftable

_Rule = Callable[[Meaning, fx.Node, tuple[Expr, ...]], Expr]

GELU = f"0.5 * x * (1.0 + erf(x * {math.sqrt(0.5)!r}))"
GELU_BY_TANH = f"0.5 * x * (1.0 + tanh({math.sqrt(2 / math.pi)!r} * (x + 0.044715 * (x * x * x))))"
"""Hendrycks & Gimpel 2016, arXiv 1606.08415, and its approximation."""
SILU = "x * sigmoid(x)"
"""Elfwing, Uchibe & Doya 2018, arXiv 1702.03118."""
RMS_NORM = "x * rsqrt(square + epsilon)"
"""`square` is the mean of x^2 (Zhang & Sennrich 2019, arXiv 1910.07467)."""
LAYER_NORM = "(x - mean) * rsqrt(variance + epsilon)"
"""Ba, Kiros & Hinton 2016, arXiv 1607.06450."""
_EXPM1 = "tanh(0.5 * x) * (exp(x) + 1.0)"
_LOG1P = "where(x + 1.0 == 1.0, x, where(1.0 < x, log(x + 1.0), log(x + 1.0) * (x / (x + 1.0 - 1.0))))"
"""What 1 + x was rounded by, u - 1 against x, corrects the logarithm (Kahan)."""


def _activation(text: str, *numbers: str, **parts: tuple[str, str]) -> _Rule:
    """The rule of a function of one element. `numbers`: arguments of the operation that it names; `parts`:
    names of its parts, each a formula of x and what x is there."""

    def rule(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
        names = {name: E.const(float(argument(node, name))) for name in numbers}
        names |= {f"by_{name}": E.const(1 / number.value) for name, number in names.items() if number.value}
        names["x"] = context.read(argument(node, "self"), at)
        inner = {name: expression(part, x=expression(of, **names)) for name, (part, of) in parts.items()}
        return expression(text, **names, **inner)

    return rule


def _gelu(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
    text = GELU_BY_TANH if argument(node, "approximate") == "tanh" else GELU
    return expression(text, x=context.read(argument(node, "self"), at))


def _mean(place: Expr, value: Expr) -> Expr:
    total = E.make("sum", (place, value), None, "float")
    return expression("total / count", total=total, count=E.const(float(extent(place))))


def _last(context: Meaning, node: fx.Node) -> Expr:
    """An index over the last dimension, if the norm is over that alone."""
    shape, extents = argument(node, "normalized_shape"), context.shape(argument(node, "input"))
    if not isinstance(shape, (list, tuple)) or len(shape) != 1 or extents[-1].op != "const":
        raise Unliftable("a norm over more than the last dimension")
    return context.fresh(extents[-1])


def _affine(context: Meaning, node: fx.Node, value: Expr, at: tuple[Expr, ...]) -> Expr:
    weight, bias = argument(node, "weight"), argument(node, "bias")
    if weight is not None:
        value = expression("x * w", x=value, w=context.read(weight, at[-1:]))
    return value if bias is None else expression("x + b", x=value, b=context.read(bias, at[-1:]))


def _layer_norm(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
    source, one, other = argument(node, "input"), _last(context, node), _last(context, node)
    mean = _mean(one, context.read(source, (*at[:-1], one)))
    apart = expression("x - mean", x=context.read(source, (*at[:-1], other)), mean=mean)
    variance, epsilon = _mean(other, expression("x * x", x=apart)), E.const(float(argument(node, "eps")))
    names = {"x": context.read(source, at), "mean": mean, "variance": variance, "epsilon": epsilon}
    return _affine(context, node, expression(LAYER_NORM, **names), at)


def _rms_norm(context: Meaning, node: fx.Node, at: tuple[Expr, ...]) -> Expr:
    source, place, epsilon = argument(node, "input"), _last(context, node), argument(node, "eps")
    if epsilon is None:
        raise Unliftable("an epsilon that is left to a 16-bit dtype")
    square = _mean(place, expression("x * x", x=context.read(source, (*at[:-1], place))))
    names = {"x": context.read(source, at), "square": square, "epsilon": E.const(float(epsilon))}
    return _affine(context, node, expression(RMS_NORM, **names), at)


def meant(text: str, **names: Expr) -> Expr:
    """A formula of these in canonical form, as an element's meaning has it."""
    places = {name: E.var(f"_{name}") for name in names}
    return M.substitute(M.canonical(expression(text, **places)), {places[n]: names[n] for n in names})


NAMED: dict[str, _Rule] = {
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.gelu.default": _gelu,
    "aten.silu.default": _activation(SILU),
    "aten.relu.default": _activation("where(x <= 0.0, 0.0, x)"),
    "aten.expm1.default": _activation(_EXPM1),
    "aten.log1p.default": _activation(_LOG1P),
    "aten.elu.default": _activation(
        "where(0.0 < x, scale * x, alpha * scale * below)", "alpha", "scale", "input_scale",
        below=(_EXPM1, "input_scale * x"),
    ),
    "aten.softplus.default": _activation(
        "where(threshold < beta * x, x, by_beta * soft)", "beta", "threshold",
        soft=(_LOG1P, "exp(beta * x)"),
    ),
    "aten.log_sigmoid.default": _activation("min(x, 0.0) - soft", soft=(_LOG1P, "exp(-abs(x))")),
}  # fmt: skip
"""The formula of an element, by the operation."""
COMPENSATED = {f"aten.{name}.default" for name in ("expm1", "log1p", "elu", "softplus", "log_sigmoid")}
"""Those whose formulas have roundings that cancel each other: their derivatives would be less exact than
theirs."""
