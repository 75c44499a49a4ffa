"""The registry of element rules: for each ATen op, what ONE element of its result equals.

A rule gets the meaning context, the node and the index expressions of the wanted element, and
returns an expression over elements of the node's operands (`context.read`). It does not depend on
what the result is used for. Rules are registered by the op's name, so the rule of an op that a torch
version lacks is simply never used. To teach attngraph an op, add one function to `meaning/rules/`.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import fx

from attngraph.errors import meant
from attngraph.ir.language.expr import Expr

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
Indices = tuple[Expr, ...]
RuleFunction = Callable[[Any, fx.Node, Indices], Expr]
"""Its arguments: the graph's `Meaning`, the node, and the indices of the wanted element."""
PartFunction = Callable[[Any, fx.Node, int, Indices], Expr]


class Category(enum.Enum):
    """What an op does to elements; decides how far the recogniser looks through it."""

    MOVEMENT = "moves elements, changes none"
    POINTWISE = "one element from the elements at the same place"
    INDEX = "computed from the index alone"
    REDUCTION = "folds one tensor over some of its dimensions"
    CONTRACTION = "sums products of two tensors"


ELEMENTWISE = frozenset({Category.MOVEMENT, Category.POINTWISE, Category.INDEX})
"""Categories of ops whose elements each depend on at most one element of each operand."""


class Rule(NamedTuple):
    category: Category
    element: RuleFunction


class Unliftable(Exception):
    """This op, used this way, has no element rule; the node is a leaf. The text names the thing that
    stands in the way: "a shift by 3 bits"."""


class UnliftableBecause(Unliftable):
    """The same; the text is a whole sentence: "the operation sort is not looked into"."""


class TooLong(UnliftableBecause):
    """The formula of an element is too long to be written as a program."""


def tried(function: Callable[_Given, _Made], *args: _Given.args, **kwargs: _Given.kwargs) -> _Made | None:
    """What a function gives; None where it raises `Unliftable`."""
    try:
        return function(*args, **kwargs)
    except Unliftable:
        return None


RULES: dict[str, Rule] = {}
PARTS: dict[str, tuple[Category, PartFunction]] = {}
"""Rules of ops with several results: they also get the number of the result."""


def rule(category: Category, *names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register one element rule for the ATen overloads `names` (without the `aten.` prefix).

    Raises:
        ValueError: torch has no such overload. (Our own rules are for several versions of torch.)
    """

    def register(function: RuleFunction) -> RuleFunction:
        if not function.__module__.startswith("attngraph."):
            for name in names:
                _require_overload(name)
        RULES.update({f"aten.{name}": Rule(category, function) for name in names})
        return function

    return register


def _require_overload(name: str) -> None:
    op, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, op, None)
    if packet is None:
        names = (str(schema).partition("::") for schema in torch._C._dispatch_get_all_op_names())
        known = {name.partition(".")[0] for namespace, _, name in names if namespace == "aten"}
        raise ValueError(f"torch has no operation aten.{op}; {meant(op, known)}")
    if overload not in packet.overloads():
        raise ValueError(f"aten.{op} has no overload {overload!r}; {meant(overload, packet.overloads())}")


def part_rule(category: Category, *names: str) -> Callable[[PartFunction], PartFunction]:
    """Register the element rule of ops that return several tensors."""

    def register(function: PartFunction) -> PartFunction:
        for name in names:
            PARTS[f"aten.{name}"] = (category, function)
        return function

    return register


def category_of(node: fx.Node) -> Category | None:
    """The category of the op that computes a node; None where it has no element rule."""
    made_by = node.args[0] if is_part(node) else node
    assert isinstance(made_by, fx.Node)
    name = str(made_by.target)
    if name in PARTS:
        return PARTS[name][0]
    if is_part(node) or name not in RULES:
        return None
    if name == "aten.einsum.default":
        inputs, arrow, output = str(node.args[0]).replace(" ", "").partition("->")
        if arrow and set(inputs) - {",", "."} <= set(output):
            return Category.POINTWISE  # every letter of the operands occurs in the result: it sums nothing
    return RULES[name].category


def is_part(node: fx.Node) -> bool:
    """Whether the node picks one result of an op that has several."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def axis(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim % rank if rank else 0


def of_each(value: Any, dims: int) -> list[int]:
    """One number for each of so many dimensions, given one for all or one for each."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return [int(v) for v in (values * dims if len(values) == 1 else values)]
