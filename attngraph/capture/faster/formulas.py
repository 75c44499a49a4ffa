"""Within one trace, sums, products and comparisons of equal sizes are computed once.

Torch computes with symbolic sizes at every operation, some forty times, and each takes sympy long. The result
follows from the formulas of both sides. Where torch records the computation in the graph, it is left to
torch. So is what follows from the values of tensors. Used by `faster/__init__.py`.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import sympy
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from attngraph.capture.instead import instead
from attngraph.capture.lines import user_lines
from attngraph.ir.graph.source import short_path

_METHODS = (
    "add", "sub", "mul", "int_floordiv", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min",
)  # fmt: skip
_NUMBERS = frozenset({int, float, bool, type(None)})


def equal_formulas_computed_once() -> contextlib.AbstractContextManager[None]:
    """Let torch's operations on symbolic sizes look up what is known already."""
    methods = ((SymNode, f"_{name}", _looking_up) for name in _METHODS)
    return instead(*methods, (ShapeEnv, "evaluate_expr", _asking_once))


@functools.lru_cache(maxsize=1 << 14)
def follows_from_sizes(formula: Any) -> bool:
    """Whether a formula has no sizes that follow from the values of tensors."""
    return not free_unbacked_symbols(formula)


def _asking_once(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Torch forgets what a formula is in the example whenever it notes another condition on sizes. The answer
    stays the same, and so does the condition that was noted with it. Where it notes none, what the formula
    is in the example is the answer, which torch would first try to prove for all sizes."""
    known: dict[Any, Any] = {}

    def evaluated(
        env: Any, formula: Any, hint: Any = None, node: Any = None, oblivious: bool = False, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        if not follows_from_sizes(formula):
            return evaluate(env, formula, hint, node, oblivious, *args, **kwargs)
        if env._suppress_guards_tls() and hint is not None and type(hint) in _NUMBERS and not oblivious:
            return sympy.sympify(hint)
        key = env, formula, hint, node, oblivious, args, tuple(kwargs.items()), env._suppress_guards_tls()
        if key not in known:
            before = len(env.guards)
            known[key] = evaluate(env, formula, hint, node, oblivious, *args, **kwargs)
            if len(env.guards) > before and (lines := user_lines(sys._getframe(1))):
                # Torch would name this file: to it, what is not its own is the user's.
                where = f"{short_path(lines[-1][0])}:{lines[-1][1]}"
                env.guards[before:] = [
                    g._replace(sloc=dataclasses.replace(g.sloc, maybe_user_loc=where))
                    for g in env.guards[before:]
                ]
        return known[key]

    return evaluated


def _looking_up(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    known: dict[Any, Any] = {}
    recording = proxy_tensor.get_proxy_mode

    def computed(one: Any, other: Any) -> Any:
        examples_are_numbers = type(one._hint) in _NUMBERS and type(other._hint) in _NUMBERS
        if not examples_are_numbers or one.fx_node or other.fx_node or recording() is not None:
            return compute(one, other)
        key = one.shape_env, one.expr, one.pytype, one._hint, other.expr, other.pytype, other._hint
        found = known.get(key)
        if found is None:
            found = known[key] = compute(one, other)
        return found

    return computed
