"""The operations of the score language, one row each. A new function is a new row, and nothing else.

A row gives the operation's name and what its operands are converted to; its meaning in PyTorch; its bounds,
given those of its operands; its derivatives, in the score language; and its spelling in C and Triton. The
parser, the evaluator, interval arithmetic, differentiation and both backends use this table.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from attngraph.ir.language import expr as E

Rule = Literal["rising"] | tuple[float, float] | Callable[..., tuple[Tensor, Tensor]] | None
Spelling = str | tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation.

    Args:
        torch: its meaning, on tensors of the kind that it takes. (`float` and `random` depend on more than
            their operands and are defined in `evaluate.py`.)
        takes: what operands are converted to. "alike": their common kind; bools are promoted to integers.
        gives: the kind of the result. "alike": the kind that it takes.
        interval: "rising" for a monotonically increasing function; else its least and largest value, or a
            function of the operands' `intervals.Bounds`. None: see `intervals.py`, or nothing is known.
        slopes: the partial derivatives, one for each operand, as expressions of the operands x, y and the
            result f; missing ones are not defined.
        c, triton: source text with operands {0}, {1}, .. of the kind that it takes; a pair is for floats and
            for integers. Anything but a call is parenthesised, except Triton's operators.
        triton_half: the same for 16-bit operands, which need less precision.
        rounds: it rounds, so integers are unchanged by it.
    """

    name: str
    arity: int
    torch: Callable[..., Tensor]
    takes: Literal["reals", "alike", "truths", "integers"]
    gives: Literal["float", "alike", "bool", "int"]
    interval: Rule = None
    slopes: tuple[str, ...] = ()
    c: Spelling = ""
    triton: Spelling = ""
    triton_half: str = ""
    rounds: bool = False

    @functools.cached_property
    def limits(self) -> tuple[float, float] | None:
        """The least and the largest value of a bounded function of one number; None for any other."""
        if self.interval != "rising":
            return self.interval if isinstance(self.interval, tuple) else None
        low, high = self.torch(torch.tensor([-math.inf, math.inf], dtype=torch.float64)).tolist()
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _real(
    name: str, slope: str, c: str, triton: str = "", half: str = "", interval: Rule = "rising"
) -> Operation:
    """A function of one real number."""
    triton = triton or f"tl.{name}({{0}})"
    return Operation(name, 1, getattr(torch, name), "reals", "float", interval, (slope,), c, triton, half)


def _rounding(name: str, c: str, triton: str) -> Operation:
    function = getattr(torch, name)
    return Operation(name, 1, function, "alike", "alike", "rising", ("0.0",), c, triton, rounds=True)


def _infix(
    name: str, function: Callable[..., Tensor], slopes: tuple[str, ...] = (), c: str = "",
    triton: Spelling = "",
) -> Operation:  # fmt: skip
    """Arithmetic and comparison operators. C and Triton use the same sign unless a spelling is given."""
    sign, is_real = E.BINARY[name][0], name in ("div", "pow")
    return Operation(
        name, 2, function, "reals" if is_real else "alike",
        "bool" if name in E.COMPARISONS else "float" if is_real else "alike", None, slopes,
        c or f"({{0}} {sign} {{1}})", triton or f"{{0}} {sign} {{1}}",
    )  # fmt: skip


def _least_size(x: Any) -> tuple[Tensor, Tensor]:
    low, high = torch.minimum(x.low.abs(), x.high.abs()), torch.maximum(x.low.abs(), x.high.abs())
    return torch.where((x.low <= 0) & (x.high >= 0), 0.0, low), high


def _falling_above_zero(x: Any) -> tuple[Tensor, Tensor]:
    return x.high.rsqrt(), torch.where(x.low > 0, x.low.rsqrt(), torch.nan)  # of minus zero: minus infinity


_NAN = "propagate_nan=tl.PropagateNan.ALL"

FUNCTIONS: dict[str, Operation] = {row.name: row for row in (
    _real("exp", "f", "exp_({0})"),
    _real("exp2", "0.6931471805599453 * f", "exp2_({0})"),
    _real("log", "1.0 / x", "log_({0})"),
    _real("log2", "1.4426950408889634 / x", "log2_({0})"),
    _real("tanh", "1.0 - f * f", "tanh_({0})", "tanh({0})", "tanh_half({0})"),
    _real("sigmoid", "f * (1.0 - f)", "sigmoid_({0})"),
    _real("sqrt", "0.5 / f", "sqrtf({0})"),
    _real("rsqrt", "-0.5 * f / x", "rsqrt_({0})", interval=_falling_above_zero),
    _real("sin", "cos(x)", "sinf({0})", interval=(-1.0, 1.0)),
    _real("cos", "-sin(x)", "cosf({0})", interval=(-1.0, 1.0)),
    _real("erf", "1.1283791670955126 * exp(-(x * x))", "erf_({0})"),
    _real("atan", "1.0 / (1.0 + x * x)", "atanf({0})", "atan({0})"),
    _rounding("floor", "floorf({0})", "tl.floor({0})"),
    _rounding("ceil", "ceilf({0})", "tl.ceil({0})"),
    _rounding("trunc", "truncf({0})", "truncate({0})"),
    _rounding("round", "rintf({0})", "round_even({0})"),
    Operation("abs", 1, torch.abs, "alike", "alike", _least_size, ("sign(x)",),
              ("fabsf({0})", "({0} < 0 ? -{0} : {0})"), "tl.abs({0})"),
    Operation("sign", 1, torch.sign, "alike", "alike", "rising", ("0.0",),
              ("sign_({0})", "(({0} > 0) - ({0} < 0))"),
              ("tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
               "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))")),
    # Where both operands are equal, each gets half of the gradient, as in PyTorch.
    Operation("min", 2, torch.minimum, "alike", "alike", None,
              ("where(x == y, 0.5, where(x > y, 0.0, 1.0))", "where(y == x, 0.5, where(y > x, 0.0, 1.0))"),
              ("minimum({0}, {1})", "({0} < {1} ? {0} : {1})"),
              (f"tl.minimum({{0}}, {{1}}, {_NAN})", "tl.minimum({0}, {1})")),
    Operation("max", 2, torch.maximum, "alike", "alike", None,
              ("where(x == y, 0.5, where(x < y, 0.0, 1.0))", "where(y == x, 0.5, where(y < x, 0.0, 1.0))"),
              ("maximum({0}, {1})", "({0} > {1} ? {0} : {1})"),
              (f"tl.maximum({{0}}, {{1}}, {_NAN})", "tl.maximum({0}, {1})")),
    Operation("isnan", 1, torch.isnan, "alike", "bool", (0.0, 0.0)),
    Operation("float", 1, Tensor.float, "alike", "float", slopes=("1.0",)),
    Operation("int", 1, Tensor.long, "alike", "int", slopes=("0.0",)),
    Operation("where", 3, torch.where, "alike", "alike", None, (),
              "({0} ? {1} : {2})", "tl.where({0}, {1}, {2})"),
    Operation("random", 5, torch.rand_like, "integers", "float", (0.0, 1.0), ("0.0",) * 5,
              "uniform({0}, {1}, {2}, {3}, {4})", "uniform({0}, {1}, {2}, {3}, {4})"),
)}  # fmt: skip
"""Functions of the language by name. `random(seed, b, h, q, k)` is a uniform number in [0, 1), the same for
the same arguments on every backend."""

OPERATORS: dict[str, Operation] = {row.name: row for row in (
    _infix("add", torch.add, ("1.0", "1.0")),
    _infix("sub", torch.sub, ("1.0", "-1.0")),
    _infix("mul", torch.mul, ("y", "x")),
    _infix("div", torch.true_divide, ("1.0 / y", "-x / (y * y)")),
    _infix("pow", torch.pow, ("where(y == 0, 0.0, y * x ** (y - 1.0))", "where(x == 0, 0.0, f * log(x))"),
           "powf({0}, {1})", "power({0}, {1})"),
    _infix("floordiv", torch.floor_divide, (), "floor_divide_{kind}({0}, {1})",
           ("floor_divide_real({0}, {1})", "floor_divide({0}, {1})")),
    _infix("mod", torch.remainder, ("1.0",), "floor_modulo_{kind}({0}, {1})", "floor_modulo({0}, {1})"),
    *(_infix(name, getattr(torch, name)) for name in sorted(E.COMPARISONS)),
    Operation("neg", 1, torch.neg, "alike", "alike", None, ("-1.0",), "(-{0})", "-{0}"),
    Operation("not", 1, torch.logical_not, "truths", "bool", None, (), "(!{0})", "~{0}"),
    Operation("and", 2, torch.logical_and, "truths", "bool", None, (), "({0} & {1})", "{0} & {1}"),
    Operation("or", 2, torch.logical_or, "truths", "bool", None, (), "({0} | {1})", "{0} | {1}"),
    Operation("quotient", 2, torch.floor_divide, "alike", "alike", None, (), "({0} / {1})", "{0} // {1}"),
    Operation("remainder", 2, torch.remainder, "alike", "alike", None, (), "({0} % {1})", "{0} % {1}"),
)}  # fmt: skip
"""Operators, by the name of their node. `quotient` and `remainder` are integer division of non-negative
numbers, which kernels use in place of `floordiv` and `mod`."""


def operation_of(op: str) -> Operation | None:
    """The row of an operation."""
    return FUNCTIONS.get(op) or OPERATORS.get(op)
