"""Which index variable is a batch, a head, a query, a key: roles, from who depends on what.

Variables that are split by the operands (flattened batch and heads, `h // G` of grouped heads) are
first cut into digits. Then, over the digits of the output:

    value    occurs in V alone
    shared   occurs in K or V (and may occur in Q): batch first, then key/value heads
    query    occurs in Q alone, or only in the scores: the query position, then the heads of a group
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from attngraph.ir import expr as E
from attngraph.ir.expr import Expr
from attngraph.meaning import ranges
from attngraph.meaning import simplify as M
from attngraph.meaning.normalised import Refusal

Digits = tuple[Expr, ...]


@dataclasses.dataclass(frozen=True)
class Roles:
    """Digits by role, slowest first. Query heads are `kv_heads` then `groups`."""

    batch: Digits
    kv_heads: Digits
    groups: Digits
    queries: Digits
    keys: Digits
    inner: Digits
    values: Digits

    @property
    def heads(self) -> Digits:
        return self.kv_heads + self.groups


def split_digits(variables: Iterable[Expr], expressions: Iterable[Expr]) -> dict[Expr, Digits] | None:
    """For every variable that some expression divides (`v // c`, `v % c`), its digits, slowest
    first; None where the divisors do not nest."""
    cuts: dict[Expr, list[Expr]] = {}
    for expression in expressions:
        for node in E.walk(expression):
            if node.op in ("floordiv", "mod") and node.args[0].op == "var":
                found = cuts.setdefault(node.args[0], [])
                if node.args[1] not in found:
                    found.append(node.args[1])
    digits: dict[Expr, Digits] = {}
    for variable in variables:
        if variable not in cuts:
            continue
        bounds = _nested([*cuts[variable], variable.args[0]])
        if bounds is None:
            return None
        parts: list[Expr] = []
        below: Expr = E.ONE
        for place, bound in enumerate(bounds):
            extent = M.floordiv(bound, below)
            if M.mul(extent, below) is not bound:
                return None
            parts.append(E.var(f"{variable.value}.{place}", extent))
            below = bound
        digits[variable] = tuple(p for p in reversed(parts) if not E.is_const(p.args[0], 1))
    return digits


def _nested(bounds: list[Expr]) -> list[Expr] | None:
    ordered: list[Expr] = []
    for bound in dict.fromkeys(bounds):
        place = 0
        while place < len(ordered) and _divides(ordered[place], bound):
            place += 1
        ordered.insert(place, bound)
    if any(not _divides(a, b) for a, b in itertools.pairwise(ordered)):
        return None
    return ordered


def _divides(a: Expr, b: Expr) -> bool:
    divisor = ranges.polynomial(a)
    return len(divisor) == 1 and not ranges.split_multiples(ranges.polynomial(b), divisor)[1]


def joined(digits: Digits) -> Expr:
    """The number that digits spell, slowest first."""
    value: Expr = E.ZERO
    for digit in digits:
        value = M.add(M.mul(value, digit.args[0]), digit)
    return value


def extent(digits: Digits) -> Expr:
    return M.mul(*(d.args[0] for d in digits))


def assign(
    output: tuple[Digits, ...],
    keys: Digits,
    inner: Digits,
    q: frozenset[Expr],
    k: frozenset[Expr],
    v: frozenset[Expr],
    scores: frozenset[Expr],
    beside_keys: frozenset[Expr],
) -> Roles | Refusal:
    """Roles of every digit of the output.

    Args:
        output: the digits of each output dimension; `q`, `k`, `v`, `scores` the variables that each
            side depends on; `beside_keys` those that are compared with the key position.
    """
    shared: list[Expr] = []
    queries: list[Expr] = []
    values: list[Expr] = []
    for digit in (d for dimension in output for d in dimension):
        if digit in v and digit not in q | k | scores:
            values.append(digit)
        elif digit in k or digit in v:
            shared.append(digit)
        elif digit in q or digit in scores:
            queries.append(digit)
        else:
            return Refusal("its result repeats along a dimension that no operand has")
    row = [d for d in queries if d in beside_keys] or queries[-1:]
    groups = [d for d in queries if d not in row]
    first = output[0][:1] if len(output) > 1 else ()
    batch = tuple(d for d in shared if d in first)
    heads = tuple(d for d in shared if d not in batch)
    if set(q | k | v) - set(shared + queries + values) - set(keys) - set(inner):
        return Refusal("an operand depends on something that is no dimension of the result")
    return Roles(batch, heads, tuple(groups), tuple(row), keys, inner, tuple(values))
