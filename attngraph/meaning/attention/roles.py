"""Which index variable is a batch, a head, a query, a key: roles, by which operands depend on it.

Variables that are split by the operands (flattened batch and heads, `h // G` of grouped heads) are first cut
into digits. Then, over the digits of the output:

    value    occurs in V alone
    shared   occurs in K or V (and may occur in Q): batch first, then key/value heads
    query    occurs in Q alone, or only in the scores: the query position, then the heads of a group. The
             digits of one dimension are one position, such as the height and width of a map

What makes heads, and not another axis of what the model was given, such as the rows of a map, is a product
with a weight of each head. A digit is another axis where in each of queries, keys and values that depend on
it, it is a dimension of what is multiplied with a weight, and of no weight. Heads that are cut from the
features before they are multiplied (`[B, S, H, D] @ [D, D]`) share a dimension with the features that the
product sums, and stay heads. Where nothing is known, digits are heads. Only the report uses this.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra.digits import Digits
from attngraph.meaning.attention.normaliser import Refusal
from attngraph.meaning.element import Meaning, has_data
from attngraph.meaning.rule import Category, Unliftable, tried

_MOST_WORDS = 200
"""Most words of an operand's formula that is looked at."""


def other_axes(meaning: Meaning, heads: Digits, tokens: Digits, operands: Iterable[Expr]) -> Digits:
    """Those of `heads` that are another axis. `tokens` are the digits of batch, queries and keys; `operands`
    are elements of queries, keys and values, in terms of these digits."""
    possible, found = frozenset(heads), frozenset[Expr]()
    for operand in operands:
        wanted = possible & operand.free
        if wanted:
            axes = _axes_of(meaning, operand, wanted, frozenset(tokens))
            possible, found = possible - (wanted - axes), found | axes
    return tuple(d for d in heads if d in possible & found)


def _axes_of(
    meaning: Meaning, operand: Expr, wanted: frozenset[Expr], tokens: frozenset[Expr]
) -> frozenset[Expr]:
    """Those of the wanted digits that are an axis of what one operand is projected from."""
    lifted = tried(meaning.elementwise, operand, most=_MOST_WORDS)
    if lifted is None:
        return frozenset()
    along, weighted = set[Expr](), set[Expr]()
    for read in E.reads(lifted):
        products = list(_products(meaning, read))
        if not products and not read.free & tokens:
            weighted |= read.free  # a bias, or a factor of each head
        for source, inner in products:
            if not source.free & tokens:
                weighted |= source.free
                continue
            # The indices of what is projected, in the tensor that it is a view of.
            moved = tried(meaning.moved_from, source) or source
            for place in (place for read in E.reads(moved) for place in read.args):
                (weighted if inner in place.free else along).update(place.free)
    return wanted & along - weighted


def _products(meaning: Meaning, read: Expr) -> Iterator[tuple[Expr, Expr]]:
    """The factors of a contraction's element, each with the variable that is summed."""
    if meaning.category(read.value) is not Category.CONTRACTION:
        return
    with contextlib.suppress(Unliftable):
        for node in E.walk(meaning.element(read.value, read.args)):
            if node.op == "sum":
                yield from ((factor, node.args[0]) for factor in E.reads(node.args[1]))


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
