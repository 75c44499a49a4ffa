"""Expressions: the formula of one element, as an immutable, interned tree.

Both languages of attngraph are built from these nodes. A score program (`ir/language/score.py`) is an
expression over `dot`, the index variables `b h q k`, sizes and reads of numbered tensors. The
meaning of a graph value (`meaning/element.py`) is an expression over index variables, sizes and
reads of graph nodes. Equal expressions are the same object, so equality is `is`.

    const  value                      a Python int, float or bool
    var    value = name, args = (extent,) or ()
    size   value = name               a non-negative integer, fixed during one call
    read   value = tensor, args = indices
    sum    args = (variable, body)    over the variable's extent; `amax` and `amin` likewise
    other  value = None               a pointwise operation on its args

An expression's `repr` is its text in the score language. Nothing is simplified here; that is the task of
`meaning/algebra/simplify`.
"""

import itertools
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attngraph.ir import budgets
from attngraph.ir.walk import reached

Scalar = int | float | bool

BINDERS = frozenset({"sum", "amax", "amin"})
BINARY: dict[str, tuple[str, int]] = {
    "or": ("or", 1), "and": ("and", 2),
    "eq": ("==", 4), "ne": ("!=", 4), "le": ("<=", 4), "lt": ("<", 4), "ge": (">=", 4), "gt": (">", 4),
    "add": ("+", 5), "sub": ("-", 5),
    "mul": ("*", 6), "div": ("/", 6), "floordiv": ("//", 6), "mod": ("%", 6),
    "pow": ("**", 8),
}  # fmt: skip
"""Binary operations: how each is written and how tightly it binds. `not` binds at 3, a sign at 7."""

COMPARISONS = frozenset({"eq", "ne", "le", "lt", "ge", "gt"})
NOT, _SIGN, _ATOM = 3, 7, 9
_RANKS = {"var": -2, "size": -1, "read": 0, "const": 2}
"""What stands first among terms of one length; all others have rank 1."""
_BEGINS = 16
"""Operations and names of a text that are compared one by one."""
_made = itertools.count()
_interned: "weakref.WeakValueDictionary[tuple[Any, ...], Expr]" = weakref.WeakValueDictionary()


class Expr:
    """One node. Compare with `is`; build with `make` or the helpers below.

    `kind` is "int", "float", "bool" or "any" (a read of unknown dtype). `free` holds the index
    variables that occur unbound. `order` compares nodes by what they say, for canonical forms: short ones
    first, then by operations and names, where values of a graph stand in the graph's order. So it is the
    same in every process, and alike in equal layers. `words` counts the operations, numbers and names of its
    text, in which shared nodes are repeated.
    """

    __slots__ = ("__weakref__", "args", "free", "kind", "op", "order", "value", "words")

    op: str
    args: "tuple[Expr, ...]"
    value: Any
    kind: str
    free: "frozenset[Expr]"
    order: tuple[int, tuple[Any, ...], int, int]
    words: int

    def __repr__(self) -> str:
        return format_expr(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (self.op, self.args, self.value, self.kind)


def make(op: str, args: tuple[Expr, ...] = (), value: Any = None, kind: str = "float") -> Expr:
    """The one node with this operation, arguments, value and kind."""
    # 1, 1.0 and True are equal and hash alike in Python, so the value's type is part of the key.
    key: tuple[Any, ...] = (op, args, type(value), value, kind)
    if type(value) is float and value == 0.0:
        key = (*key, str(value))
    found = _interned.get(key)
    if found is not None:
        return found
    node = object.__new__(Expr)
    node.op, node.args, node.value, node.kind = op, args, value, kind
    if op == "var":
        node.free = frozenset((node,))
    elif op in BINDERS:
        node.free = args[1].free - {args[0]}
    else:
        node.free = frozenset().union(*(arg.free for arg in args)) if args else frozenset()
    node.words = min(1 + sum(arg.words for arg in args), budgets.WORDS_COUNTED)
    node.order = _order(node)
    _interned[key] = node
    return node


def _order(node: Expr) -> tuple[int, tuple[Any, ...], int, int]:
    """What compares a node: its words, the first parts of its text, a digest of all of it, and, should these
    be equal for two, which was made first."""
    said = (_RANKS.get(node.op, 1), node.op, *_said(node.value))
    begins = (said, *itertools.chain.from_iterable(arg.order[1] for arg in node.args))[:_BEGINS]
    digest = hash((zlib.crc32(repr((said, node.kind)).encode()), *(arg.order[2] for arg in node.args)))
    return node.words, begins, digest, next(_made)


def _said(value: Any) -> tuple[str, tuple[Any, ...]]:
    """A name, and the number at its end; a number; or the place of a graph's value."""
    if isinstance(value, str):
        stem = value.rstrip("0123456789")
        return stem, (int(value[len(stem) :] or -1),)
    if isinstance(value, (int, float)):
        return "", (value,)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int):
        return str(value[0]), (value[1],)
    return type(value).__name__, getattr(value, "_sort_key", ())


def const(value: Scalar) -> Expr:
    kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    if value != value:
        return NAN
    return make("const", (), value, kind)


def var(name: str, extent: Expr | None = None) -> Expr:
    """An index variable, running over 0 .. extent-1 where the extent is known."""
    return make("var", () if extent is None else (extent,), name, "int")


def size(name: str) -> Expr:
    return make("size", (), name, "int")


def read(tensor: Any, indices: tuple[Expr, ...], kind: str = "any") -> Expr:
    return make("read", indices, tensor, kind)


NAN = make("const", (), "nan", "float")
TRUE, FALSE = const(True), const(False)
ZERO, ONE = const(0), const(1)
NEG_INF, INF = const(float("-inf")), const(float("inf"))


def is_const(node: Expr, *values: Scalar) -> bool:
    """Whether the node is a constant, and one of `values` if any are given (1 equals 1.0)."""
    return node.op == "const" and (not values or any(node.value == v for v in values))


def walk(node: Expr) -> Iterator[Expr]:
    """Every distinct node below and including this one, children first."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(node, False)]
    while stack:
        current, expanded = stack.pop()
        if expanded:
            yield current
        elif current not in seen:
            seen.add(current)
            stack.append((current, True))
            stack.extend((arg, False) for arg in reversed(current.args))


def outside(node: Expr, *ops: str) -> Iterator[Expr]:
    """Every distinct node that is in no operand of such operations."""
    return reached([node], lambda n: () if n.op in ops else n.args)


def reads(node: Expr) -> list[Expr]:
    """Every distinct element of a tensor that an expression reads."""
    return [n for n in walk(node) if n.op == "read"]


def rebuild(node: Expr, leaf: Callable[[Expr, tuple[Expr, ...]], Expr]) -> Expr:
    """Map a tree bottom up: `leaf(node, new_args)` gives each node's replacement. Shared nodes
    are visited once."""
    done: dict[Expr, Expr] = {}
    for current in walk(node):
        done[current] = leaf(current, tuple(done[arg] for arg in current.args))
    return done[node]


def parts(node: Expr, op: str) -> tuple[Expr, ...]:
    """What an operation joins, the terms of a sum, say: the node alone where it is another."""
    return node.args if node.op == op else (node,)


def with_args(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The node with other arguments, as it is written: no algebra. The extents of variables stay."""
    return node if args == node.args or node.op == "var" else make(node.op, args, node.value, node.kind)


def replaced(node: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
    """`node` with each key replaced by its value, and all else as it is written."""
    return rebuild(node, lambda n, args: mapping[n] if n in mapping else with_args(n, args))


def format_number(value: Scalar | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value if isinstance(value, str) else repr(value)


def format_expr(node: Expr, level: int = 0) -> str:
    """The text of an expression; brackets only where the grammar needs them."""
    text, binds = _format(node)
    return f"({text})" if binds < level else text


def _format(node: Expr) -> tuple[str, int]:
    op, args = node.op, node.args
    if op == "const":
        text = format_number(node.value)
        return text, _SIGN if text.startswith("-") else _ATOM
    if op in ("var", "size"):
        return str(node.value), _ATOM
    if op == "read":
        name = f"r{node.value}" if isinstance(node.value, int) else f"%{node.value}"
        return f"{name}[{', '.join(format_expr(a) for a in args)}]", _ATOM
    if op == "not":
        return f"not {format_expr(args[0], NOT)}", NOT
    if op == "neg":
        # The sign is part of a literal, so the negation of 5 prints as -(5), unlike the number -5.
        inner = format_expr(args[0], _ATOM + 1 if args[0].op == "const" else _SIGN)
        return f"-{inner}", _SIGN
    if op in BINARY and len(args) == 2:
        sign, binds = BINARY[op]
        left_level, right_level = binds, binds + 1
        if op in COMPARISONS:
            left_level = binds + 1
        if op == "pow":
            left_level, right_level = _ATOM, _SIGN
        return f"{format_expr(args[0], left_level)} {sign} {format_expr(args[1], right_level)}", binds
    if op in BINDERS:
        return f"{op}[{args[0].value}]({format_expr(args[1])})", _ATOM
    if not args:
        return op, _ATOM
    return f"{op}({', '.join(format_expr(a) for a in args)})", _ATOM
