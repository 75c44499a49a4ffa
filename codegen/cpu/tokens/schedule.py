"""The phases of a token program: what threads compute between two points where they wait for each other; and
where its values lie.

In a phase of tokens each thread takes some of the tokens and computes definitions for them, one after
another. In a phase of columns the threads share the columns of products with weights; what follows from a
product element by element (a bias, an activation, a residual sum) is computed by the thread that has just
computed these columns.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

from attngraph.codegen.cpu.native import numbers
from attngraph.codegen.cpu.tokens.indices import RANKS
from attngraph.ir.language import expr as E
from attngraph.ir.language.token_program import Product, TokenProgram

PLACES = numbers("tokens.h")
"""Places of numbers in a call: those from PHASE on are counters."""
SAME_LINES, APART = 512, 16
"""Values whose length is a multiple of the one have so many elements between two tokens."""
MOST_LOCAL = 1 << 14
"""Elements of the values of one token that a function may hold on its stack."""


@dataclasses.dataclass
class Group:
    """Products of one width whose columns a thread computes together, and the definitions that follow from
    them element by element."""

    products: list[int]
    following: list[int]


@dataclasses.dataclass
class Phase:
    """Either definitions that are computed token by token, or groups of products."""

    definitions: list[int] = dataclasses.field(default_factory=list)
    groups: list[Group] = dataclasses.field(default_factory=list)


def phases(program: TokenProgram) -> list[Phase]:
    """The phases of a program, in order: of tokens and of columns in turn."""
    first = len(program.given)
    level: dict[int, int] = dict.fromkeys(range(first), 0)
    found: dict[int, Phase] = {}
    group_of: dict[int, Group] = {}
    for number in range(first, first + len(program.definitions)):
        made = program.definitions[number - first]
        before = {n: level[n] for n in made.reads}
        last = max(before.values(), default=0)
        joined: list[Group] = []
        if program.product(number) is not None:
            level[number] = last + 1 + last % 2
        else:
            joined = _joined(
                program, number, [group_of[n] for n, at in before.items() if at == last and n in group_of]
            )
            level[number] = last if joined else last + last % 2
        phase = found.setdefault(level[number], Phase())
        if level[number] % 2 == 0:
            phase.definitions.append(number)
            continue
        group = joined[0] if joined else Group([], [])
        for other in joined[1:]:
            if other is not group:
                group.products += other.products
                group.following += other.following
                group_of.update({n: group for n, g in group_of.items() if g is other})
                phase.groups.remove(other)
        if not joined:
            phase.groups.append(group)
        (group.following if joined else group.products).append(number)
        group.following.sort()
        group_of[number] = group
    return [found[n] for n in sorted(found)]


def _joined(program: TokenProgram, number: int, groups: list[Group]) -> list[Group]:
    """The groups of the phase that a definition can follow: it reads what they compute at its own index
    alone."""
    first = len(program.given)
    made = program.definitions[number - first]
    if made.fold or len(made.indices) != 1 or not groups:
        return []
    members = {n for group in groups for n in (*group.products, *group.following)}
    for read in (n for n in E.walk(made.value) if n.op == "read" and n.value in members):
        other = program.definitions[read.value - first]
        if read.args != made.indices or other.extents != made.extents:
            return []
    return list({id(group): group for group in groups}.values())


def arranged(program: TokenProgram, sizes: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Where values in between lie in one piece of memory, and how long that is. Values that are not needed in
    the same phases may share a place.

    Args:
        sizes: the elements of each value that needs a place, by its number.
    """
    order = phases(program)
    lives: dict[int, list[int]] = {}
    for at, phase in enumerate(order):
        members = [*phase.definitions, *(n for g in phase.groups for n in (*g.products, *g.following))]
        for number in members:
            for used in (number, *program.definitions[number - len(program.given)].reads):
                lives.setdefault(used, [at, at])[1] = at
    for result in program.results:
        lives[result.number][1] = len(order)
    placed: dict[int, int] = {}
    for number in sorted(sizes, key=lambda n: -sizes[n]):
        first, last = lives[number]
        at = 0
        for other in sorted(placed, key=placed.__getitem__):
            is_apart = lives[other][1] < first or last < lives[other][0]
            if not is_apart and placed[other] < at + sizes[number]:
                at = max(at, placed[other] + sizes[other])
        placed[number] = at
    return placed, max((placed[n] + sizes[n] for n in placed), default=0)


class Facts:
    """What follows from a program. Definitions go by their numbers.

    Attributes:
        made: the definitions. widths: their elements. products: those of them that are.
        rows: from one token's elements to the next one's. Values in between are spread so that the same
            element of several tokens does not fall into the same lines of a cache.
        short: those that are returned in 16 bits, each with the dtype, once.
        local: those that only the function of a phase of tokens reads, which holds one token's at a time.
        given_at, strides_at, values_at, results_at, length: where a call has addresses of the given tensors,
            their strides, addresses of the values, and of results in 16 bits; and its numbers in all.
    """

    def __init__(self, program: TokenProgram) -> None:
        self.program, self.phases, given = program, phases(program), len(program.given)
        self.made = dict(enumerate(program.definitions, start=given))
        self.widths = {n: math.prod(made.extents) for n, made in self.made.items()}
        self.products: dict[int, Product] = {}
        for number in self.made:
            product = program.product(number)
            if product is not None:
                self.products[number] = product
        returned = {result.number for result in program.results}
        self.rows = {
            n: size if n in returned or size % SAME_LINES else size + APART for n, size in self.widths.items()
        }
        self.short = list(dict.fromkeys((r.number, r.dtype) for r in program.results if r.dtype != "float32"))
        self.local = self._local(returned)
        self.given_at = PLACES["COUNTERS"] + len(self.phases)
        self.strides_at = self.given_at + given
        self.values_at = self.strides_at + given * RANKS
        self.results_at = self.values_at + len(self.made)
        self.length = self.results_at + len(self.short)

    def _local(self, elsewhere: set[int]) -> set[int]:
        left, found = MOST_LOCAL, set[int]()
        for phase in self.phases:
            members = set(phase.definitions)
            others = (made.reads for n, made in self.made.items() if n not in members)
            alone = members.difference(elsewhere, *others)
            for number in phase.definitions:
                if number in alone and self.widths[number] <= left:
                    found.add(number)
                    left -= self.widths[number]
        return found

    def place_of(self, number: int) -> int:
        """Where a call has the address of a value."""
        return self.values_at + number - len(self.program.given)

    def place_of_result(self, number: int) -> int:
        about = self.program.results[number]
        key = about.number, about.dtype
        return self.results_at + self.short.index(key) if key in self.short else self.place_of(about.number)


@functools.lru_cache(maxsize=1024)
def facts(program: TokenProgram) -> Facts:
    return Facts(program)
