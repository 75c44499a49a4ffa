"""Why exponentials that weigh a sum are not the softmax of attention, where they are divided by something."""

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.attention.normaliser import open_sums
from attngraph.meaning.attention.refusal import Refusal


def why_not_normalised(body: Expr, keys: tuple[Expr, ...]) -> Refusal:
    """The reason for a sum over these keys whose exponentials are not divided by their sum over them."""
    if _is_over_pairs(body, keys) or _is_over_two_dimensions(body, keys):
        return Refusal(
            "its softmax runs over two dimensions at once, as over all pairs of a query and a key or of two "
            "keys: attention has a softmax over the keys of each query alone"
        )
    if bool(_combined(body, keys)):
        return Refusal(
            "its softmax runs over places that depend on query and key together, such as distances in a "
            "band: give each query a score for each key, and mask those outside the band"
        )
    if _is_over_another_dimension(body, keys):
        return Refusal(
            "its weights are summed over another dimension than the one that the softmax runs over, as "
            "where heads are mixed after it or where it normalises over the queries"
        )
    if _is_over_other_places(body, keys):
        return Refusal(
            "its softmax runs over other places than the keys that its weights are summed over here, as "
            "where a row and a column of keys share one softmax: sum the values of all its places at once"
        )
    if _multiplies_exponentials(body):
        return Refusal(
            "it multiplies exponentials of two tensors and sums the products, as linear attention with "
            "exponential features does: no softmax of scores weighs its values"
        )
    return Refusal(
        "exponentials are summed, but what they are divided by was not recognised as their sum over the keys"
    )


def _is_over_two_dimensions(body: Expr, keys: tuple[Expr, ...]) -> bool:
    """Whether an exponential is divided by the sum of such over the keys and another dimension of its own."""
    weights = [n for n in E.walk(body) if n.op == "exp" and not n.free.isdisjoint(keys)]
    divisors = [n.args[0] for n in E.walk(body) if n.op == "recip" and n.args[0].op == "sum"]
    return any(
        len(open_sums(divisor)[0]) > len(keys) and weight.free - set(keys) > divisor.free
        for divisor in divisors
        for weight in weights
    )


def _is_over_another_dimension(body: Expr, keys: tuple[Expr, ...]) -> bool:
    """Whether an exponential is divided by the sum over a dimension of the result, not over the keys."""
    weights = {n for n in E.walk(body) if n.op == "exp" and not n.free.isdisjoint(keys)}
    for divisor in (n.args[0] for n in E.walk(body) if n.op == "recip" and n.args[0].op == "sum"):
        variables, inner = open_sums(divisor)
        if len(variables) != 1 or divisor.free.isdisjoint(keys):
            continue
        for weight in weights:
            places = weight.free - divisor.free - set(keys)
            if any(M.substitute(inner, {variables[0]: place}) is weight for place in places):
                return True
    return False


def _is_over_other_places(body: Expr, keys: tuple[Expr, ...]) -> bool:
    """Whether an exponential is divided by the sum of the same exponentials over another range of places."""
    weights = {n for n in E.walk(body) if n.op == "exp" and not n.free.isdisjoint(keys)}
    places = {
        a for w in weights for r in E.walk(w) if r.op == "read" for a in r.args if not a.free.isdisjoint(keys)
    }
    for divisor in (n.args[0] for n in E.walk(body) if n.op == "recip" and n.args[0].op == "sum"):
        variables, inner = open_sums(divisor)
        if len(variables) != 1 or not divisor.free.isdisjoint(keys):
            continue
        others = (p for p in places if p.op != "var" or p.args[0] is not variables[0].args[0])
        if any(M.substitute(inner, {variables[0]: place}) in weights for place in others):
            return True
    return False


def _multiplies_exponentials(body: Expr) -> bool:
    """Whether a product has several factors with exponentials in them, besides what it is divided by."""

    def has_exponential(factor: Expr) -> bool:
        return any(n.op == "exp" for n in E.outside(factor, "recip"))

    products = (n for n in E.outside(body, "recip") if n.op == "mul")
    return any(sum(map(has_exponential, n.args)) > 1 for n in products)


def _is_over_pairs(body: Expr, keys: tuple[Expr, ...]) -> bool:
    """Whether such an index counts pairs: the key is one digit of it, and the other variables are another."""

    def step(place: Expr, variable: Expr) -> Expr:
        return M.sub(M.substitute(place, {variable: M.add(variable, E.ONE)}), place)

    def counts(place: Expr) -> bool:
        mine = [v for v in place.free if v in keys]
        others = [v for v in place.free if v not in keys]
        return len(mine) == len(others) == 1 and (
            step(place, others[0]) is mine[0].args[0] or step(place, mine[0]) is others[0].args[0]
        )

    return any(map(counts, _combined(body, keys)))


def _combined(body: Expr, keys: tuple[Expr, ...]) -> list[Expr]:
    """The indices that combine a key with another variable, where a normaliser sums over the whole index."""
    mixed: list[tuple[tuple[object, int], Expr]] = []
    summed: set[tuple[object, int]] = set()
    bound = {n.args[0] for n in E.walk(body) if n.op == "sum"}
    for read in (n for e in E.walk(body) if e.op == "exp" for n in E.reads(e)):
        for axis, place in enumerate(read.args):
            if place in bound:
                summed.add((read.value, axis))
            elif not place.free.isdisjoint(keys) and not place.free <= set(keys):
                mixed.append(((read.value, axis), place))
    return [place for dimension, place in mixed if dimension in summed]
