"""The line of each side at which its values part from the other's.

Both sides run with every operation recorded. From the results that are not known to the other side the way
leads back through values that are not, to operations all of whose operands are: there the difference enters.
Where the two are of the same operations but for a few, each has a partner, and a value is known if its
partner's is the same in the same order; what has no partner was left out of the other side, or added to
it. Else it is known if the other side has it at any place, in any layout: two spellings of a formula share
what is before and after them.
"""

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from attngraph.api.recorded import Call, Mark, Operation, Record, alike, mark, record

_CLOSE, _UNITS = 1e-10, 2
"""How far elements may be apart, relative to their mean size, in float64; and in units of the last place of a
narrower dtype."""
_ALIKE, _LONGEST = 0.8, 4000
"""The part of operations that have a partner in sides of the same ones; and of how many partners are looked
for, beyond what both begin with."""


@dataclasses.dataclass(frozen=True)
class Parting:
    """Where one side's values part from the other's: a line, "FILE:LINE" or "", or one that reads `leaf`, a
    tensor of a module that the other does not have; and the calls around it."""

    line: str = ""
    stack: tuple[Call, ...] = ()
    leaf: Tensor | None = None
    name: str = ""
    """Of the operation: where it is the same on both sides, a number that is no tensor is another."""


def parts_at(
    reference: Callable[[], Any], candidate: Callable[[], Any], unit: float = 0.0,
    states: Sequence[Sequence[Tensor]] = ((), ()),
) -> tuple[Parting, Parting]:  # fmt: skip
    """Where the results of each side part from the other's. `unit`: the last place of the narrowest dtype to
    which they round, below float64. `states`: the weights, buffers and arguments of each, which are known
    even where they are not read."""
    mine, theirs = record(reference), record(candidate)
    close = max(_CLOSE, _UNITS * unit)
    partners = _partners(mine.operations, theirs.operations, close)
    back = {b: a for a, b in partners.items()}
    first = _Side(mine, theirs, partners, close, states[1]).parting()
    second = _Side(theirs, mine, back, close, states[0]).parting()
    return _outside(first, second)


def _outside(first: Parting, second: Parting) -> tuple[Parting, Parting]:
    """Where both part in one and the same function, the lines that call it otherwise, if there are such."""
    for a, b in zip(reversed(first.stack), reversed(second.stack), strict=False):
        if a.function != b.function:
            if a.line and b.line:
                return dataclasses.replace(first, line=a.line), dataclasses.replace(second, line=b.line)
            break
    return first, second


def _partners(mine: Sequence[Operation], theirs: Sequence[Operation], close: float) -> dict[int, int]:
    """The operations of both sides in pairs; none if too few have a partner."""
    ours, others = ([n for n, o in enumerate(side) if o.stack] for side in (mine, theirs))
    equal = 0
    for a, b in zip(ours, others, strict=False):
        if mine[a].key != theirs[b].key or not _same(mine[a], theirs[b], close, in_order=True):
            break
        equal += 1
    pairs = dict(zip(ours[:equal], others[:equal], strict=True))
    left, right = ours[equal:], others[equal:]
    if max(len(left), len(right)) <= _LONGEST:
        keys = [[side[n].key for n in numbers] for side, numbers in ((mine, left), (theirs, right))]
        matcher = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False)
        for a, b, size in matcher.get_matching_blocks():
            pairs |= zip(left[a : a + size], right[b : b + size], strict=True)
    return pairs if len(pairs) >= _ALIKE * min(len(ours), len(others)) else {}


def _same(a: Operation, b: Operation, close: float, in_order: bool) -> bool:
    return len(a.marks) == len(b.marks) and all(
        alike(x, y, close, in_order) for x, y in zip(a.marks, b.marks, strict=True)
    )


class _Side:
    """The operations of one side, beside the other's. `partners`: pairs of them."""

    def __init__(
        self, own: Record, other: Record, partners: dict[int, int], close: float, state: Sequence[Tensor]
    ) -> None:
        self.own, self.operations, self.other = own, own.operations, other.operations
        self.partners, self.close = partners, close
        self.more = own.calls - other.calls
        self.marks: dict[int, list[Mark]] = {}
        made = (one for operation in self.other for one in operation.marks)
        for one in itertools.chain(made, map(mark, state)):
            self.marks.setdefault(one.size, []).append(one)
        self._known: dict[int, bool] = {}

    def parting(self) -> Parting:
        """The first operation on the way back from the results that has no unknown operands."""
        stack, seen, enters = [*self.own.results], set[int](), list[int]()
        while stack:
            number = stack.pop()
            if number in seen or self._is_known(number):
                continue
            seen.add(number)
            before = [n for n in self.operations[number].before if not self._is_known(n)]
            stack += before
            if not before:
                enters.append(number)
        if not enters:
            return Parting()
        first = min(enters)
        own = self.operations[first]
        if own.leaf is not None:
            reads = min(n for n in seen if first in self.operations[n].before or n in self.own.results)
            return Parting(self._calls(reads)[-1].line if self._calls(reads) else "", leaf=own.leaf)
        calls = self._calls(first)
        name = own.key.split()[0] if self.partners else ""
        return Parting(calls[-1].line if calls else "", calls, name=name)

    def _is_known(self, number: int) -> bool:
        if number not in self._known:
            own, partner = self.operations[number], self.partners.get(number)
            if partner is not None:
                known = _same(own, self.other[partner], self.close, in_order=True)
            else:
                in_order = bool(self.partners)
                known = all(
                    any(alike(one, m, self.close, in_order) for m in self.marks.get(one.size, ()))
                    for one in own.marks
                )
            self._known[number] = known
        return self._known[number]

    def _calls(self, number: int) -> tuple[Call, ...]:
        """The calls around an operation, to the line that is named. Where more than it was left out of the
        other side, that is in the function in which all of it lies, or, if the function itself is called less
        often there, in that which calls it."""
        block = [self.operations[n].stack for n in self._left_out(number)]
        stack = self.operations[number].stack
        if not block:
            return stack
        depth = min(map(len, block)) - 1
        while depth > 0 and (
            len({_call(s, depth) for s in block}) > 1 or self.more[stack[depth].function.co_qualname]
        ):
            depth -= 1
        return stack[: depth + 1]

    def _left_out(self, number: int) -> list[int]:
        """The operations in a row, this one among them, that have no partner; none if the other side has
        others in their place."""
        every = [n for n, operation in enumerate(self.operations) if operation.stack]
        if not self.partners or number in self.partners or number not in every:
            return []
        first = last = every.index(number)
        while first > 0 and every[first - 1] not in self.partners:
            first -= 1
        while last + 1 < len(every) and every[last + 1] not in self.partners:
            last += 1
        before = self.partners[every[first - 1]] if first else -1
        after = self.partners[every[last + 1]] if last + 1 < len(every) else len(self.other)
        replaced = any(operation.stack for operation in self.other[before + 1 : after])
        return [] if replaced else every[first : last + 1]


def _call(stack: Sequence[Call], depth: int) -> tuple[Any, ...]:
    """The call that is so deep in a stack: the lines from which it comes, and the function."""
    return (*stack[:depth], stack[depth].function) if depth < len(stack) else ()
