"""The contraction inside a score: which product of a q-side and a k-side tensor is *the dot*.

A score may contain several contractions (relative keys, positional projections). The dot is the
one that sums a product of two tensors of which exactly one depends on the key. Any other becomes a
read of the tensor that the model computed.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable

import torch
from torch import fx

from attngraph.ir import budgets
from attngraph.ir.graph import computed_from, op_name, source_of
from attngraph.ir.language import DOT, E, Expr, is_moderate
from attngraph.ir.ops import kernels
from attngraph.meaning.algebra import M, open_sums
from attngraph.meaning.element import Meaning, has_data, is_exact
from attngraph.meaning.rule import ELEMENTWISE, Category, TooLong, Unliftable, tried

_COSTLY = (
    "exp", "exp2", "log", "log2", "pow", "sin", "cos", "tanh", "sigmoid", "sqrt", "rsqrt", "erf", "div",
    "reciprocal",
)  # fmt: skip
_ROUNDING = ("floor", "ceil", "trunc", "round")


Chain = tuple[tuple[Expr, float], ...]
"""An element of a tensor, then the element that it is a view or moderate multiple of, and so on, as pairs
(read, factor): the first read equals factor times this one."""


Spelled = dict[Expr, Expr]
"""What a dot is called where it was found: the elements that contain it, by `dot`."""


@dataclasses.dataclass(frozen=True)
class Dot:
    """factor * sum over `inner` of q * k. `node` computes the sum, if the graph has such a node."""

    inner: tuple[Expr, ...]
    q: Chain
    k: Chain
    node: fx.Node | None = None
    factor: float = 1.0


def look_into(
    meaning: Meaning, node: Expr, keys: tuple[Expr, ...], of_value: frozenset[Expr], dtype: torch.dtype
) -> Expr:
    """Scores or weights in terms of contractions and data, looking through everything elementwise.

    A function of data that does not vary over query and key together (slopes, gates, decays) is left as the
    vector that the model computed: reading that is cheaper than computing it for every pair, unless it is one
    of two numbers. `of_value` are the variables of the values; other variables of the output belong to
    queries. Values that the model rounds to a dtype of fewer digits than `dtype` are left as well, and so are
    masks and biases whose formula is very long. So are multiples of data, where the product of several of
    them would have a factor that is not moderate.
    """

    def through(read: Expr) -> bool:
        tensor: fx.Node = read.value
        if meaning.category(tensor) not in ELEMENTWISE or (scaled and _is_scaled_data(meaning, read)):
            return False
        own: torch.dtype = tensor.meta["val"].dtype
        if _rounds(tensor) not in (None, kernels.accumulation_dtype(dtype)):
            return _formula_is(meaning, read, _is_whole)
        coarser = own.is_floating_point and torch.finfo(own).eps > torch.finfo(dtype).eps
        if coarser and (dtype == torch.float64 or not meaning.contracts(tensor)):
            return _formula_is(meaning, read, lambda formula: is_exact(formula, own))
        if not meaning.contracts(tensor) and not _formula_is(meaning, read, _is_short):
            return False
        is_scaling = _name(tensor) == "div" and not isinstance(tensor.args[1], fx.Node)
        if _name(tensor) not in _COSTLY or is_scaling:
            return True
        pairs = not read.free.isdisjoint(keys) and bool(read.free - of_value)
        if pairs or meaning.index_expression(tensor, read.args) is not None:
            return True
        # A selection between two numbers is cheap to compute: the logarithm of a mask, say.
        return _formula_is(meaning, read, lambda f: f.op == "where" and all(map(E.is_const, f.args[1:])))

    scaled = False
    found = meaning.lift(node, through, into_sums=False)
    products = (M.coefficient(n) for n in E.walk(found) if n.op == "mul")
    several = (f for f, rest in products if rest.op == "mul" and sum(map(has_data, rest.args)) > 1)
    scaled = any(f != 0 and math.isfinite(f) and not is_moderate(f) for f in several)
    return meaning.lift(node, through, into_sums=False) if scaled else found


def _is_scaled_data(meaning: Meaning, read: Expr) -> bool:
    """Whether it is an element of another tensor times a number."""
    element = tried(meaning.element, read.value, read.args)
    factor, below = (1, E.ONE) if element is None else M.coefficient(element)
    return abs(factor) != 1 and below.op == "read" and has_data(below)


def _formula_is(meaning: Meaning, read: Expr, test: Callable[[Expr], bool]) -> bool:
    """Whether an element's formula passes a test; one that is too long to be written out does not."""
    try:
        return test(meaning.elementwise(read, budgets.FORMULA_WORDS))
    except TooLong:
        return False


def _rounds(node: fx.Node) -> torch.dtype | None:
    """The dtype of the operand that a node rounds to whole numbers; None for nodes that do not round."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    dtype: torch.dtype = source.meta["val"].dtype
    own: torch.dtype = node.meta["val"].dtype
    converts = dtype.is_floating_point and not own.is_floating_point and own != torch.bool
    return dtype if (converts and node.op == "call_function") or _name(node) in _ROUNDING else None


def _is_whole(node: Expr) -> bool:
    """Whether it is a whole number, or a selection between such, so that rounding changes nothing."""
    if node.op == "where":
        return all(_is_whole(a) for a in node.args[1:])
    return node.op == "const" and node.kind == "int"


def _is_short(node: Expr) -> bool:
    """Whether a formula can be read by a person, and be a statement of a program."""
    nodes = list(itertools.islice(E.walk(node), budgets.MASK_NODES + 1))
    return len(nodes) <= budgets.MASK_NODES and node.words <= budgets.STATEMENT_WORDS // 3


def one_name(score: Expr) -> Expr:
    """The score with each element written in one way: where `h == 0` holds, `m[0, q, k]` becomes `m[h, q, k]`
    if that is read elsewhere (one head, or one query, was edited by itself)."""
    reads = [n for n in E.reads(score) if n.free]

    def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
        if current.op == "where" and args[0].op == "eq":
            for place, number in (args[0].args, args[0].args[::-1]):
                if place.op == "var" and number.op == "const":
                    here = {M.substitute(r, {place: number}): r for r in reads if place in r.free}
                    args = (args[0], M.substitute(args[1], here), args[2])
        return M.construct(current, args)

    return E.rebuild(score, replace)


def find_dot(
    meaning: Meaning, score: Expr, keys: tuple[Expr, ...], of_value: frozenset[Expr]
) -> tuple[Dot, Spelled] | None:
    """The dot of a lifted score, and what has to be replaced to have `dot` in its place; None where there is
    none.

    Outer contractions come before those nested in their operands (a projection of the keys is a
    contraction too), and one whose query side varies over more than the values do comes first.
    """
    found: list[tuple[Dot, Spelled]] = []
    for node in outermost_first(score):
        if node.free.isdisjoint(keys):
            continue
        opened = _open(meaning, node)
        for part in () if opened is None else [node] if opened is node else outermost_first(opened):
            dot = _as_dot(meaning, part, keys) if part.op == "sum" else None
            if dot is not None and opened is not None:
                of = None if opened is node else node.value
                inside = M.substitute(opened, {part: DOT})
                found.append((dataclasses.replace(dot, node=of), {node: inside}))
                break
    # A contraction inside another sum is a part of that sum's terms.
    found = [f for f in found if f[0].q[0][0].free | f[0].k[0][0].free <= score.free | set(f[0].inner)]
    varied = [f for f in found if f[0].q[0][0].free - of_value - set(f[0].inner)]
    return next(iter(varied or found), None)


NO_DOT = "the scores contain no product of queries and keys, summed over a shared dimension"


def why_no_dot(meaning: Meaning, score: Expr, keys: tuple[Expr, ...], dtype: torch.dtype) -> str:
    """What separates the scores from a contraction that they are computed from, if anything does."""
    for read in (n for n in outermost_first(score) if n.op == "read" and isinstance(n.value, fx.Node)):
        node: fx.Node = read.value
        if read.free.isdisjoint(keys) or node.op != "call_function":
            continue
        if not any(meaning.category(n) is Category.CONTRACTION for n in computed_from([node])):
            continue
        try:
            meaning.element(node, read.args)
        except Unliftable as problem:
            return f"{NO_DOT}: {problem}"
        own: torch.dtype = node.meta["val"].dtype
        if own.is_floating_point and torch.finfo(own).eps > torch.finfo(dtype).eps:
            rounded, whole = (str(d).removeprefix("torch.") for d in (own, dtype))
            return f"its scores are rounded to {rounded} inside a {whole} computation"
    return _tensor_of_scores(meaning, score, keys) or NO_DOT


def _tensor_of_scores(meaning: Meaning, score: Expr, keys: tuple[Expr, ...]) -> str | None:
    """The reason for scores that are elements of one tensor that the model has, not products."""
    pairs = [n for n in E.reads(score) if not n.free.isdisjoint(keys) and n.free - set(keys)]
    node = pairs[0].value if len(pairs) == 1 else None
    if not isinstance(node, fx.Node):
        return None
    if _is_distance(node):
        return (
            f"its scores are distances ({source_of(node)}), which are computed for each pair without a "
            "product: written as q.q + k.k - 2 * (q @ k.mT), squared distances are fused"
        )
    place = f"computed without a product of queries and keys ({source_of(node)})"
    made = place if node.op == "call_function" else "a tensor that the model is given"
    return f"its scores are {made}: the weights are no larger than these, so fusing would save little"


def _is_distance(node: fx.Node) -> bool:
    """Whether a node is a norm, or a sum of squares, of differences."""
    if _name(node) not in ("sum", "linalg_vector_norm"):
        return _name(node) in ("cdist", "_cdist_forward")
    before = [node]
    for _ in range(3):
        before += before[-1].all_input_nodes[:1]
    return any(_name(n) == "sub" for n in before[1:])


def _name(node: fx.Node) -> str:
    """The name of the operation that computes a node."""
    return op_name(node) if node.op == "call_function" else ""


def dot_of_width_one(
    score: Expr, keys: tuple[Expr, ...], of_value: frozenset[Expr], dtype: torch.dtype
) -> tuple[Dot, Spelled] | None:
    """The two sides of scores without a contraction: one number per query and one per key. If they are
    multiplied, that is the dot; if not (added, say, under a function), the score reads them."""

    def is_side(node: Expr) -> bool:
        return node.op == "read" and isinstance(node.value, fx.Node) and node.value.meta["val"].dtype == dtype

    for product in (n for n in E.walk(score) if n.op == "mul"):
        q = [f for f in product.args if is_side(f) and f.free.isdisjoint(keys) and f.free - of_value]
        k = [f for f in product.args if is_side(f) and not f.free.isdisjoint(keys)]
        if len(q) == 1 and len(k) == 1:
            rest = (f for f in product.args if f not in (q[0], k[0]))
            return Dot((), ((q[0], 1.0),), ((k[0], 1.0),)), {product: M.mul(DOT, *rest)}
    sides = [n for n in E.walk(score) if is_side(n)]
    query = next((n for n in sides if n.free.isdisjoint(keys) and n.free - of_value), None)
    key = next((n for n in sides if not n.free.isdisjoint(keys) and not n.free - of_value - set(keys)), None)
    return None if query is None or key is None else (Dot((), ((query, 1.0),), ((key, 1.0),)), {})


def other_dots(meaning: Meaning, score: Expr, keys: tuple[Expr, ...]) -> list[tuple[Dot, Expr]]:
    """Contractions that are added to the dot in the score, with factors relative to the dot's, each with the
    score without it: a.b + c.d is one dot of the vectors [a, c] and [b, d]."""
    found: list[tuple[Dot, Expr]] = []
    for total in (n for n in E.walk(score) if n.op == "add"):
        terms = [M.coefficient(t) for t in total.args]
        own = [times for times, rest in terms if rest is DOT]
        for term, (times, rest) in zip(total.args, terms, strict=True):
            if len(own) != 1 or rest is DOT or rest.free.isdisjoint(keys):
                continue
            dot = open_product(meaning, rest, keys)
            if dot is not None:
                without = M.add(*(t for t in total.args if t is not term))
                left = M.substitute(score, {total: without})
                found.append((dataclasses.replace(dot, factor=times * dot.factor / own[0]), left))
    return found


def outermost_first(node: Expr) -> list[Expr]:
    """Every distinct node, breadth first from the top."""
    order: dict[Expr, None] = {node: None}
    queue = [node]
    for current in queue:
        for arg in current.args:
            if arg not in order:
                order[arg] = None
                queue.append(arg)
    return list(order)


def open_product(meaning: Meaning, node: Expr, keys: tuple[Expr, ...]) -> Dot | None:
    """A sum, or an element of a contraction, as a number times a sum of products of a side of the queries and
    one of the keys; None where it is not just that."""
    opened = _open(meaning, node)
    factor, whole = M.coefficient(opened) if opened is not None else (1.0, node)
    found = _as_dot(meaning, whole, keys) if whole.op == "sum" else None
    of = None if opened is node else node.value
    return None if found is None else dataclasses.replace(found, node=of, factor=factor)


def _open(meaning: Meaning, node: Expr) -> Expr | None:
    """A sum as it is, an element of a contraction as its formula; None for others."""
    if node.op == "sum":
        return node
    sums = (Category.CONTRACTION, Category.REDUCTION)
    if node.op != "read" or not isinstance(node.value, fx.Node) or meaning.category(node.value) not in sums:
        return None
    return tried(meaning.element, node.value, node.args)


def _as_dot(meaning: Meaning, node: Expr, keys: tuple[Expr, ...]) -> Dot | None:
    """`node` as a sum of products of one side that depends on the keys and one that does not."""
    inner, body = open_sums(node)
    if body.op == "read" and isinstance(body.value, fx.Node):
        is_product = meaning.category(body.value) is Category.POINTWISE
        body = (tried(meaning.element, body.value, body.args) if is_product else None) or body
    if body.op != "mul" or len(body.args) != 2 or any(f.op != "read" for f in body.args):
        return None
    q, k = sorted(body.args, key=lambda f: not f.free.isdisjoint(keys))
    if not q.free.isdisjoint(keys) or k.free.isdisjoint(keys) or not q.free & k.free >= {*inner}:
        return None
    return Dot(inner, chain(meaning, q), chain(meaning, k))


def chain(meaning: Meaning, node: Expr) -> Chain:
    """The chain of a read: followed through views and multiplications by numbers."""
    found: list[tuple[Expr, float]] = [(node, 1.0)]
    passed = (Category.MOVEMENT, Category.POINTWISE)
    while isinstance(found[-1][0].value, fx.Node) and meaning.category(found[-1][0].value) in passed:
        current, factor = found[-1]
        element = tried(meaning.element, current.value, current.args)
        times, below = (1.0, E.ONE) if element is None else M.coefficient(element)
        if below.op != "read" or not isinstance(below.value, fx.Node):
            break
        same_dtype = below.value.meta["val"].dtype == current.value.meta["val"].dtype
        if not same_dtype or any(map(has_data, below.args)) or not is_moderate(factor * times):
            break
        found.append((below, factor * times))
    return tuple(found)
