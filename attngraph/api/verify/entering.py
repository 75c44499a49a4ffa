"""Where a difference enters: the module, and the line of each side at which its values part from the other's.

Both are found by running both sides once more, first with what modules are given and return, then with every
operation recorded. From the results that are not known to the other side the way leads back through values
that are not, to operations all of whose operands are: there the difference enters. Where the two are of the
same operations but for a few, each has a partner, and a value is known if its partner's is the same in the
same order; what has no partner was left out of the other side, or added to it. Else it is known if the other
side has it at any place, in any layout: two spellings of a formula share what is before and after them.
"""

import dataclasses
import difflib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attngraph.api.verify.calls import Call, tensors_in
from attngraph.api.verify.recorded import Function, Mark, Operation, Record, mark, marks_alike, record
from attngraph.api.verify.settings import computed_at, kept_at
from attngraph.api.verify.steps import Sequences, Steps, Way
from attngraph.runtime.decoder import Decoder
from attngraph.runtime.verify import tensors_of

_CLOSE, _UNITS = 1e-10, 2
"""How far elements may be apart, relative to their mean size, in float64; and in units of the last place of a
narrower dtype."""
_ALIKE, _LONGEST = 0.8, 4000
"""The part of operations that have a partner in sides of the same ones; and of how many partners are looked
for, beyond what both begin with."""
Given = dict[str, Tensor]
"""What a module was given, by the name or the place of the argument."""
Run = tuple[Given, list[Tensor]]
"""What a module was given, and what it returned."""


def enters_in(sides: Sequence[Any], call: Call, unit: float) -> tuple[str, str]:
    """The first module of the same name whose result differs although what it was given is equal, and ""; of
    steps, the first one, and its argument if it is given other values. `unit`: the last place of the
    narrowest dtype to which sides round."""
    mine, theirs = (_recorded(side, call) for side in sides)
    close, steps = max(1e-9, 8 * unit), isinstance(sides[1], Steps)
    for name, (given, result) in ((n, c) for n, c in mine.items() if n in theirs):
        others = theirs[name]
        if steps:  # a token's values are compared where both sides have them for every token
            other = next((n for n in given if _unlike(given[n], others[0].get(n), close)), "")
            if other or any(_unlike(a, b, close) for a, b in zip(result, others[1], strict=False)):
                return name, other
        elif alike([*given.values()], [*others[0].values()], close) and not alike(result, others[1], close):
            return name, ""
    return "", ""


def _recorded(side: Any, call: Call) -> dict[str, Run]:
    """The runs of each module of a side, in one call of whole sequences, in the order in which they returned;
    in all its steps, the values of all tokens, one after the other."""
    model = side.side if isinstance(side, Sequences) else side
    calls: dict[str, list[Run]] = {}
    if getattr(model, "untraced", "") or not isinstance(model, nn.Module) or isinstance(model, Decoder):
        return {}  # what runs graphs, and no modules

    def keep(module: str, _: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        arguments = [*((str(n), value) for n, value in enumerate(args)), *kwargs.items()]
        paths = [(name, *leaf) for name, v in arguments for leaf in pytree.tree_leaves_with_path(v)]
        given = {f"{name}{pytree.keystr(at)}": t for name, at, t in paths if isinstance(t, Tensor)}
        calls.setdefault(module, []).append((given, tensors_of(result)))

    named = {name: module for name, module in model.named_modules() if name}
    hooks = [m.register_forward_hook(functools.partial(keep, n), with_kwargs=True) for n, m in named.items()]
    try:
        with torch.no_grad():
            if isinstance(side, Sequences):
                given = side.read(*call)
                rows, tokens = given.ids.shape[:2]
                list(side.logits(given, [Way([*range(rows)], max(1, tokens // 2), False)]))
            else:
                model(*call[0], **call[1])
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(side, Sequences):
        return {name: found[0] for name, found in calls.items()}
    return {name: _joined(found) for name, found in calls.items()}


def _joined(calls: Sequence[Run]) -> Run:
    """The values of all tokens: where a call has another number of places in the second dimension only."""
    names = [n for n in calls[0][0] if all(n in given for given, _ in calls)]
    given = {n: torch.cat([g[n] for g, _ in calls], 1) for n in names if _fit([g[n] for g, _ in calls])}
    columns = [list(column) for column in zip(*(result for _, result in calls), strict=False)]
    return given, [torch.cat(column, 1) for column in columns if _fit(column)]


def _fit(parts: Sequence[Tensor]) -> bool:
    return all(
        p.ndim > 1 and (p.shape[:1], p.shape[2:]) == (parts[0].shape[:1], parts[0].shape[2:]) for p in parts
    )


def enters_at(sides: Sequence[Any], call: Call, unit: float) -> tuple[str, str]:
    """The line of each side at which values part: of an operation, of what computed its number, or of what
    made a tensor that a module keeps; "" of sides that cannot be looked into."""
    if any(getattr(side, "untraced", "") for side in sides):
        return "", ""
    runs = [functools.partial(side, *call[0], **call[1]) for side in sides]
    first, second = _parts_at(runs, unit, [[*state_of(side), *tensors_in(call)] for side in sides])
    made = "", ""
    if first.leaf is not None or second.leaf is not None:
        made = kept_at(sides, (first.leaf, second.leaf))
    elif first.name == second.name != "":
        made = computed_at(*runs)
    return made if all(made) else (first.line, second.line)


def state_of(side: Any) -> list[Tensor]:
    """The weights and buffers of a module."""
    return [*side.parameters(), *side.buffers()] if isinstance(side, nn.Module) else []


def alike(mine: Sequence[Tensor], theirs: Sequence[Tensor], close: float = 1e-9) -> bool:
    """Whether tensors are equal but for so much of the largest element, where they round."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(mine, theirs, strict=False)]
    return len(mine) == len(theirs) and all(
        a.shape == b.shape
        and _rounds(a) == _rounds(b)
        and (distance(a, b) <= close * float(a.abs().max()) if _rounds(a) else bool((a == b).all()))
        for a, b in pairs
        if a.numel()
    )


def distance(a: Tensor, b: Tensor) -> float:
    """How far numbers are apart where both are finite."""
    both = a.isfinite() & b.isfinite()
    return float((a - b)[both].abs().max()) if both.any() else 0.0


def _rounds(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _unlike(a: Tensor, b: Tensor | None, close: float) -> bool:
    """Whether the second has other values for the same tokens, of each row or of all, or more tokens."""
    if b is None or a.ndim != b.ndim or a.ndim < 2 or a.shape[2:] != b.shape[2:]:
        return False
    if a.shape[1] != b.shape[1] or 1 not in (len(a), len(b), len(a) == len(b)):
        return b.shape[1] > a.shape[1] and len(a) == len(b)
    rows = max(len(a), len(b))
    return not alike([a.expand(rows, *a.shape[1:])], [b.expand(rows, *b.shape[1:])], close)


@dataclasses.dataclass(frozen=True)
class _Parting:
    """Where one side's values part from the other's: a line, "FILE:LINE" or "", or one that reads `leaf`, a
    tensor of a module that the other does not have; and the calls around it."""

    line: str = ""
    stack: tuple[Function, ...] = ()
    leaf: Tensor | None = None
    name: str = ""
    """Of the operation: where it is the same on both sides, a number that is no tensor is another."""


def _parts_at(
    sides: Sequence[Callable[[], Any]], unit: float, states: Sequence[Sequence[Tensor]]
) -> tuple[_Parting, _Parting]:
    """Where the results of each side part from the other's. `states`: the weights, buffers and arguments of
    each, which are known even where they are not read."""
    mine, theirs = map(record, sides)
    close = max(_CLOSE, _UNITS * unit)
    partners = _partners(mine.operations, theirs.operations, close)
    back = {b: a for a, b in partners.items()}
    first = _Side(mine, theirs, partners, close, states[1]).parting()
    second = _Side(theirs, mine, back, close, states[0]).parting()
    return _outside(first, second)


def _outside(first: _Parting, second: _Parting) -> tuple[_Parting, _Parting]:
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
        marks_alike(x, y, close, in_order) for x, y in zip(a.marks, b.marks, strict=True)
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

    def parting(self) -> _Parting:
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
            return _Parting()
        first = min(enters)
        own = self.operations[first]
        if own.leaf is not None:
            reads = min(n for n in seen if first in self.operations[n].before or n in self.own.results)
            return _Parting(self._calls(reads)[-1].line if self._calls(reads) else "", leaf=own.leaf)
        calls = self._calls(first)
        name = own.key.split()[0] if self.partners else ""
        return _Parting(calls[-1].line if calls else "", calls, name=name)

    def _is_known(self, number: int) -> bool:
        if number not in self._known:
            own, partner = self.operations[number], self.partners.get(number)
            if partner is not None:
                known = _same(own, self.other[partner], self.close, in_order=True)
            else:
                in_order = bool(self.partners)
                known = all(
                    any(marks_alike(one, m, self.close, in_order) for m in self.marks.get(one.size, ()))
                    for one in own.marks
                )
            self._known[number] = known
        return self._known[number]

    def _calls(self, number: int) -> tuple[Function, ...]:
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


def _call(stack: Sequence[Function], depth: int) -> tuple[Any, ...]:
    """The call that is so deep in a stack: the lines from which it comes, and the function."""
    return (*stack[:depth], stack[depth].function) if depth < len(stack) else ()
