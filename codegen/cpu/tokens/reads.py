"""Whether what a token program reads lies inside of the tensors that it names: C reads without asking.

Extents are numbers, so this is decided for all tokens at once, when the program is written: an index is a
variable or a number that is compared with its extent, or it is computed for every value of its variables for
which the selections around it choose the read. Passes write no other programs; a file may have any.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from attngraph.codegen.unsupported import UnsupportedError
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.functions import operation_of
from attngraph.ir.language.token_program import TOKEN, TokenProgram, extent

RANKS = 8
"""The most dimensions of a given tensor."""
MOST_PLACES, LARGEST = 1 << 24, 1 << 31
"""For how many values of its variables an index is computed, and the most elements of a value of a token."""
Guards = tuple[tuple[Expr, bool], ...]
"""Conditions under which a part of a formula is computed, and whether they are true or false there."""


def require_in_range(program: TokenProgram) -> None:
    """Raise UnsupportedError unless all that the program reads is known to be there."""
    for number, made in enumerate(program.definitions, start=len(program.given)):
        if math.prod((*made.extents, *(() if made.over is None else (extent(made.over),)))) >= LARGEST:
            raise UnsupportedError(f"the many elements of r{number}")
        known = (*made.indices, *(() if made.over is None else (made.over,)))
        _Reads(program, frozenset(known)).look_at(made.value, ())
    for given in program.given:
        if math.prod(n or 1 for n in given.shape) >= LARGEST << 8:
            raise UnsupportedError(f"the many elements of {given.shape}")
        if len(given.shape) > RANKS:
            raise UnsupportedError(f"the dimensions of {given.shape}")


class _Reads:
    def __init__(self, program: TokenProgram, known: frozenset[Expr]) -> None:
        self.program, self.known = program, known
        self._seen: set[tuple[Expr, Guards]] = set()

    def look_at(self, node: Expr, guards: Guards) -> None:
        """Look at all reads of a formula that is computed under these conditions."""
        if (node, guards) in self._seen:
            return
        self._seen.add((node, guards))
        if node.op == "where":
            condition, chosen, other = node.args
            self.look_at(condition, guards)
            decides = condition.free <= self.known and not any(n.op == "read" for n in E.walk(condition))
            for branch, truth in ((chosen, True), (other, False)):
                self.look_at(branch, (*guards, (condition, truth)) if decides else guards)
            return
        if node.op in ("floordiv", "mod", "quotient", "remainder") and not _is_positive(node.args[1]):
            raise UnsupportedError(f"`{E.format_expr(node)}`: a whole division by what may be 0")
        for arg in node.args if node.op != "var" else ():
            self.look_at(arg, guards)
        if node.op == "read":
            self._read(node, guards)

    def _read(self, node: Expr, guards: Guards) -> None:
        made = self.program.definition(node.value)
        shape = self.program.given[node.value].shape if made is None else made.extents
        if len(node.args) != len(shape):
            raise UnsupportedError(f"`{E.format_expr(node)}` with other indices than {shape}")
        for place, count in zip(node.args, shape, strict=True):
            if count is None or place is TOKEN:
                inside = count is None and place is TOKEN
            elif place.op == "const":
                inside = isinstance(place.value, int) and 0 <= place.value < count
            elif place.op == "var":
                inside = place in self.known and (
                    extent(place) <= count or self._is_inside(place, count, guards)
                )
            else:
                inside = self._is_inside(place, count, guards)
            if not inside:
                raise UnsupportedError(f"`{E.format_expr(node)}`: an index that may be outside of {shape}")

    def _is_inside(self, place: Expr, count: int, guards: Guards) -> bool:
        """Whether an index is in range for all values of its variables under these conditions."""
        variables = sorted(place.free, key=lambda n: str(n.value))
        if not place.free <= self.known or any(n.op == "read" for n in E.walk(place)):
            return False
        of_these = [(c, truth) for c, truth in guards if c.free <= place.free]
        if math.prod(map(extent, variables)) > MOST_PLACES:
            return False
        values = _of(place, tuple(variables))
        for condition, truth in of_these:
            holds = _of(condition, tuple(variables)) != 0
            values = torch.where(holds if truth else ~holds, values, 0)
        return not values.numel() or bool((values >= 0).all() and (values < count).all())


def _is_positive(node: Expr) -> bool:
    return (node.op == "const" and node.value > 0) or (node.op == "float" and _is_positive(node.args[0]))


@functools.lru_cache(maxsize=256)
def _of(node: Expr, variables: tuple[Expr, ...]) -> Tensor:
    """An expression of indices for all of their values."""
    if node.op == "var":
        shape = [-1 if v is node else 1 for v in variables]
        return torch.arange(extent(node)).view(shape)
    if node.op == "const":
        return torch.tensor(node.value)
    row = operation_of(node.op)
    if row is None:
        raise UnsupportedError(f"`{E.format_expr(node)}` as an index")
    found: Tensor = row.torch(*(_of(a, variables) for a in node.args))
    return found
