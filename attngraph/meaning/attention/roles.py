"""Which index variable is a batch, a head, a query, a key: roles, by which operands depend on it.

Variables that are split by the operands (flattened batch and heads, `h // G` of grouped heads) are
first cut into digits. Then, over the digits of the output:

    value    occurs in V alone
    shared   occurs in K or V (and may occur in Q): batch first, then key/value heads
    query    occurs in Q alone, or only in the scores: the query position, then the heads of a group. The
             digits of one dimension are one position, such as the height and width of a map
"""

import dataclasses

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra.digits import Digits
from attngraph.meaning.attention.refusal import Refusal
from attngraph.meaning.element import has_data


@dataclasses.dataclass(frozen=True)
class Roles:
    """Digits of the result by role, slowest first. Query heads are `kv_heads` then `groups`."""

    batch: Digits
    kv_heads: Digits
    groups: Digits
    queries: Digits
    values: Digits

    @property
    def heads(self) -> Digits:
        return self.kv_heads + self.groups


def assign(
    output: tuple[Digits, ...], summed: frozenset[Expr], q: frozenset[Expr], k: frozenset[Expr],
    v: frozenset[Expr], scores: frozenset[Expr], beside_keys: frozenset[Expr],
) -> Roles | Refusal:  # fmt: skip
    """Roles of every digit of the output.

    Args:
        output: the digits of each output dimension; `summed` those of the keys and of what the dot sums;
            `q`, `k`, `v`, `scores` the variables that each side depends on; `beside_keys` those that are
            compared with the key position.
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
            return Refusal("its result has a dimension that its queries, keys and values lack")
    row = [d for d in queries if d in beside_keys] or queries[-1:]
    row = [d for d in queries if d in row or _continue(d, row, output)]
    groups = [d for d in queries if d not in row]
    batch = _batch(output, shared)
    heads = tuple(d for d in shared if d not in batch)
    if set(q | k | v) - set(shared + queries + values) - summed:
        return Refusal("its queries, keys or values vary with something that is no dimension of the result")
    return Roles(batch, heads, tuple(groups), tuple(row), tuple(values))


def _continue(digit: Expr, row: list[Expr], output: tuple[Digits, ...]) -> bool:
    """Whether a digit counts queries together with others in the row: they are one dimension of the result,
    which the operands cut (the pixels of a map into height and width). Heads in one dimension with the
    queries are told apart by their number, where that of the queries varies."""
    alike = [d for d in row if (d.args[0].op == "const") == (digit.args[0].op == "const")]
    return any(digit in dimension and any(d in dimension for d in alike) for dimension in output)


def _batch(output: tuple[Digits, ...], shared: Digits | list[Expr]) -> Digits:
    """The digit that counts sequences: the leading one of the result, if keys or values have it too. A number
    of heads is a number, and a batch usually a varying size: the first varying one comes before a leading
    number, so that heads may lead (`[H, B, T, D]`), and it may follow an axis of the queries alone. A leading
    dimension of one is a batch of one."""
    if not output[0]:
        return ()
    leading = tuple(d for d in output[0][:1] if d in shared) if len(output) > 1 else ()
    if any(d.args[0].op != "const" for d in leading):
        return leading
    varying = [d for d in shared if d.args[0].op != "const"] if len(output) > 1 else []
    return tuple(varying[:1]) or leading


def beside_keys(score: Expr, keys: Digits) -> frozenset[Expr]:
    """Variables that stand in one index formula with a key: `k <= q`, `k - q`."""
    found: set[Expr] = set()
    for node in E.walk(score):
        is_formula = node.op in ("le", "lt", "eq", "add", "abs") and node.args[0].kind == "int"
        if is_formula and not has_data(node) and not node.free.isdisjoint(keys):
            found |= node.free - set(keys)
    return frozenset(found)
