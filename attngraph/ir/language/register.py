"""Functions that are added to the score language from outside, each checked before programs may use it."""

import torch
from torch import Tensor

from attngraph.ir.language.evaluate import Environment, Tile, Value, evaluate, tensor
from attngraph.ir.language.functions import FUNCTIONS, Operation
from attngraph.ir.language.parser import expression
from attngraph.ir.language.score import DOT, SCORE, WEIGHT

_POINTS, _CLOSE = 41, 1e-6
_WORDS = ("dot", "s", "p", "b", "h", "q", "k")


def register_function(row: Operation) -> Operation:
    """Add a function of real numbers to the score language: programs may call it, and kernels compute it.

    Its bounds and slopes are compared with `row.torch` at numbers between -4 and 4. Its text in C and Triton
    is compiled when a kernel first needs it.

    Returns:
        the row.

    Raises:
        ValueError: the name is taken, or what the row says of the function is not so.
    """
    if not row.name.isidentifier() or row.name in {*FUNCTIONS, *_WORDS}:
        raise ValueError(f"{row.name!r} is taken, or no name.")
    if (row.takes, row.gives) != ("reals", "float") or row.arity not in (1, 2):
        raise ValueError(f"{row.name}: a function of one or two real numbers can be added.")
    for language, text in (("C", row.c), ("Triton", row.triton)):
        if not isinstance(text, str) or any(f"{{{n}}}" not in text for n in range(row.arity)):
            raise ValueError(f"{row.name}: its text in {language} has no place for each operand: {text!r}.")
    FUNCTIONS[row.name] = row
    try:
        _require_true(row)
    except BaseException:
        del FUNCTIONS[row.name]
        raise
    return row


def _require_true(row: Operation) -> None:
    line = torch.linspace(-4, 4, _POINTS, dtype=torch.float64)
    given = [g.flatten().requires_grad_() for g in torch.meshgrid(*[line] * row.arity, indexing="ij")]
    value = row.torch(*given)
    if value.shape != given[0].shape or value.dtype != torch.float64:
        raise ValueError(f"{row.name}: of float64 numbers it gives {value.dtype} {list(value.shape)}.")
    finite = value.detach()[value.isfinite()]
    if row.interval == "rising" and (row.arity != 1 or bool((finite.diff() < 0).any())):
        raise ValueError(f"{row.name}: it is not rising.")
    low, high = row.interval if isinstance(row.interval, tuple) else (-torch.inf, torch.inf)
    if bool(((finite < low) | (finite > high)).any()):
        raise ValueError(f"{row.name}: values are not between {low} and {high}.")
    slopes = torch.autograd.grad(value.sum(), given, allow_unused=True)
    values: dict[str, Value] = {n: x.detach() for n, x in zip(("dot", "s"), given, strict=False)}
    values["p"] = value.detach()
    for number, (text, wanted) in enumerate(zip(row.slopes, slopes, strict=False)):
        _require_slope(row, text, values, torch.zeros_like(value) if wanted is None else wanted, number)


def _require_slope(row: Operation, text: str, values: dict[str, Value], wanted: Tensor, number: int) -> None:
    env = Environment(Tile(), (), (), torch.float64, wanted.device)
    found = tensor(evaluate(expression(text, x=DOT, y=SCORE, f=WEIGHT), env, values), env)
    off = (found - wanted).abs() > _CLOSE * (1 + wanted.abs())
    if bool(off.any()):
        at = tensor(values["dot"], env)[off][0]
        raise ValueError(f"{row.name}: slope {number}, {text!r}, is not the derivative where x is {at:.3g}.")
