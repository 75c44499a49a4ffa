"""Answers of constructors that are asked for again.

A condition is negated wherever selections meet, and each negation of a comparison decides comparisons of its
parts: without their answers at hand, the work grows exponentially with the selections inside of each other.
Answers hold on to expressions, and so to graphs whose nodes these read. So they are kept for one block, the
passes of one graph, and not for the process.
"""

import contextlib
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from attngraph.ir.kept import holding
from attngraph.ir.language import Expr

_ANSWERS: ContextVar[dict[tuple[object, ...], Expr] | None] = ContextVar("_ANSWERS", default=None)


def remembering() -> contextlib.AbstractContextManager[Any]:
    """Keep answers until the block ends."""
    return holding(_ANSWERS, {})


def remembered(constructor: Callable[..., Expr]) -> Callable[..., Expr]:
    """A constructor of expressions that looks its answer up where it was asked before in this block."""

    @functools.wraps(constructor)
    def asked(*args: Expr) -> Expr:
        answers = _ANSWERS.get()
        if answers is None:
            return constructor(*args)
        key = (constructor, *args)
        found = answers.get(key)
        if found is None:
            found = answers[key] = constructor(*args)
        return found

    return asked
