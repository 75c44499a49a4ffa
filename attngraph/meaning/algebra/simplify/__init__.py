"""Algebra on expressions: constructors that return a canonical form.

Element rules build meanings only through these functions, so two spellings of one formula tend to
become the same object, and the recogniser compares with `is`. Simplified here: linear
combinations, floor division and remainder of index expressions with ranges (`meaning/algebra/ranges.py`),
comparisons, boolean algebra, selections (`where`), and exponentials with logarithms.

Every rule is an identity over the real numbers with -inf as the logarithm of zero. Canonical
operations: `add` and `mul` are n-ary, subtraction and division are spelled with a factor -1 and
`recip`, integer comparisons are `le`/`eq` with positive terms on both sides.

The files of this package are one algebra: each calls the others through the package.
"""

from attngraph.meaning.algebra.simplify.division import floordiv, mod
from attngraph.meaning.algebra.simplify.functions import absolute, exp, function, log, narrow, power

from attngraph.meaning.algebra.simplify.arithmetic import (  # isort: skip
    add, coefficient, div, from_polynomial, kind_of, mul, neg, number, recip, scale, sub,
)  # fmt: skip
from attngraph.meaning.algebra.simplify.logic import (  # isort: skip
    and_, eq, exclude_each_other, le, lt, ne, not_, or_, where,
)  # fmt: skip
from attngraph.meaning.algebra.simplify.sums import (  # isort: skip
    canonical, canonical_binders, construct, pieces, raw, stretches, substitute, total, totals,
)  # fmt: skip

__all__ = [
    "absolute", "add", "and_", "canonical", "canonical_binders", "coefficient", "construct", "div", "eq",
    "exclude_each_other", "exp", "floordiv", "from_polynomial", "function", "kind_of", "le", "log", "lt",
    "mod", "mul", "narrow", "ne", "neg", "not_", "number", "or_", "pieces", "power", "raw", "recip",
    "scale", "stretches", "sub", "substitute", "total", "totals", "where",
]  # fmt: skip
