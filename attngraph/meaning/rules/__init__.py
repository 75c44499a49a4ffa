"""Element rules: for each ATen op, what ONE element of its result equals.

A rule gets the meaning context, the node and the index expressions of the wanted element, and
returns an expression over elements of the node's operands (`context.read`). It says what is true
and never asks what for. Rules are registered by the op's name, so that an op which a torch version
lacks is simply never seen. To teach attngraph an op, add one function here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from attngraph.ir.expr import Expr

if TYPE_CHECKING:
    from torch import fx

    from attngraph.meaning.element import Meaning

Indices = tuple[Expr, ...]
RuleFunction = Callable[["Meaning", "fx.Node", Indices], Expr]
PartFunction = Callable[["Meaning", "fx.Node", int, Indices], Expr]


class Category(enum.Enum):
    """What an op does to elements; decides how far the recogniser looks through it."""

    MOVEMENT = "moves elements, changes none"
    POINTWISE = "one element from the elements at the same place"
    INDEX = "computed from the index alone"
    REDUCTION = "folds one tensor over some of its dimensions"
    CONTRACTION = "sums products of two tensors"


class Rule(NamedTuple):
    category: Category
    element: RuleFunction


class Unliftable(Exception):
    """This op, used this way, has no element rule; the node is a leaf."""


class TooLong(Unliftable):
    """What an element equals is a longer formula than anything that could be written as a program."""


RULES: dict[str, Rule] = {}
PARTS: dict[str, tuple[Category, PartFunction]] = {}
"""Ops with several results: the rule gets the number of the result."""


def rule(category: Category, *names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register one element rule for the ATen overloads `names` (without the `aten.` prefix)."""

    def register(function: RuleFunction) -> RuleFunction:
        for name in names:
            RULES[f"aten.{name}"] = Rule(category, function)
        return function

    return register


def part_rule(category: Category, *names: str) -> Callable[[PartFunction], PartFunction]:
    """Register the element rule of ops that return several tensors."""

    def register(function: PartFunction) -> PartFunction:
        for name in names:
            PARTS[f"aten.{name}"] = (category, function)
        return function

    return register


def sums_nothing(node: fx.Node) -> bool:
    """Whether an einsum only multiplies: every letter of its operands is one of its result."""
    inputs, arrow, output = str(node.args[0]).replace(" ", "").partition("->")
    return bool(arrow) and set(inputs) - {",", "."} <= set(output)


def load() -> None:
    """Fill the registry (idempotent)."""
    from attngraph.meaning.rules import assignment, contraction, index, movement, pointwise, reduction

    assert assignment and contraction and index and movement and pointwise and reduction
