"""What the formulas of a token program say about indices: whether all that is read is there, since C reads
without asking, and into which loops a definition is divided.

Extents are numbers, so both are decided for all tokens at once, when the program is written. A computed index
is looked at for every value of its variables for which the selections around it choose the read. (Passes
write no programs that read elsewhere; a file may have any.) What reads several values side by side (joined
heads, halves that a rotary embedding swaps) selects by index: `where(i < 64, .., ..)` becomes a loop for each
branch, without a condition, which compilers turn into vector instructions.
"""

import functools
import itertools
import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from attngraph.codegen.remarks import UnsupportedError
from attngraph.ir.language import E, Expr, operation_of
from attngraph.ir.language.token_program import TOKEN, Definition, TokenProgram, extent

RANKS = 8
"""The most dimensions of a given tensor."""
MOST_PLACES, LARGEST = 1 << 24, 1 << 31
"""For how many values of its variables an index is computed, and the most elements of a value of a token."""
LOOKED_AT, UNROLLED = 1024, 8
"""The largest extent for which it is computed where a condition on an index changes, and the most loops that
one is divided into."""
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
        values = _values(place, tuple(variables))
        for condition, truth in of_these:
            holds = _values(condition, tuple(variables)) != 0
            values = torch.where(holds if truth else ~holds, values, 0)
        return not values.numel() or bool((values >= 0).all() and (values < count).all())


def _is_positive(node: Expr) -> bool:
    return (node.op == "const" and node.value > 0) or (node.op == "float" and _is_positive(node.args[0]))


@functools.lru_cache(maxsize=256)
def _values(node: Expr, variables: tuple[Expr, ...]) -> Tensor:
    """An expression of indices for all of their values."""
    if node.op == "var":
        return torch.arange(extent(node)).view([-1 if v is node else 1 for v in variables])
    if node.op == "const":
        return torch.tensor(node.value)
    row = operation_of(node.op)
    if row is None:
        raise UnsupportedError(f"`{E.format_expr(node)}` as an index")
    found: Tensor = row.torch(*(_values(a, variables) for a in node.args))
    return found


# --- loops ---


def divided(made: Definition) -> Iterator[tuple[list[tuple[int, int]], Expr]]:
    """The ranges of the indices in which every selection by an index is decided, and the formula there.
    Where there would be many, the formula is left as it is."""
    full = [(0, n) for n in made.extents]
    cuts: list[list[int]] = [[0, n] for n in made.extents]
    for node in E.walk(made.value):
        if node.op == "where":
            for place, i in enumerate(made.indices):
                if _is_of_index(node.args[0], (i,)):
                    values = _values(node.args[0], (i,)).tolist()
                    cuts[place] += [n for n in range(1, extent(i)) if values[n] != values[n - 1]]
    cuts = [sorted(set(c)) for c in cuts]
    if math.prod(len(c) - 1 for c in cuts) > UNROLLED or all(len(c) == 2 for c in cuts):
        yield full, made.value
        return
    places = [list(itertools.pairwise(c)) for c in cuts]
    for ranges in itertools.product(*places):
        known = {i: low for i, (low, _) in zip(made.indices, ranges, strict=True)}
        yield list(ranges), _decided(made.value, known)


def _decided(value: Expr, known: dict[Expr, int]) -> Expr:
    """The formula with each selection decided whose condition depends on one of these indices alone."""

    def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op == "where" and _is_of_index(node.args[0], known):
            (place,) = node.args[0].free
            return args[1] if _values(node.args[0], (place,))[known[place]] else args[2]
        return E.with_args(node, args)

    return E.rebuild(value, leaf)


def _is_of_index(condition: Expr, indices: Collection[Expr]) -> bool:
    """Whether a condition depends on one of these indices and on nothing else."""
    free = condition.free
    if len(free) != 1 or not free <= set(indices) or any(extent(i) > LOOKED_AT for i in free):
        return False
    return not any(n.op == "read" for n in E.walk(condition))
