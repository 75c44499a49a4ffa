"""What the usual attention operations can say of a score program: scale, softcap, a mask, factors, a sink.

torch's scaled_dot_product_attention and the Attention operation of ONNX compute

    softmax(cap(scale * q . k) + mask) v            cap(x) = c * tanh(x / c), in ONNX alone

`standard_form` takes a program apart into these, or says why it cannot. It is exact: a factor of the scores
that depends on the query goes to the queries, a sink is one more key whose score the mask sets, and what a
program does to results after the softmax is done to them. A finite fill that replaces scores becomes a large
negative number that scores vanish beside, so rows that see no key still are the mean of all keys.
"""

import dataclasses
from collections.abc import Sequence

import torch

from attngraph.ir.language import E, evaluate, operation
from attngraph.ir.language import score as S
from attngraph.ir.language.derivative import ONE, ZERO, added
from attngraph.ir.language.expr import Expr, format_number
from attngraph.ir.language.score import Keep, Score, ScoreProgram, Sink, Statement, Weight
from attngraph.meaning.masks.fold import HIDES, added_to_score
from attngraph.meaning.masks.words import distance_limit

LOWEST = 1e30
"""Minus this stands for finite fills: scores of usual size vanish beside it in float32, so equal ones stay
equal, and it is far from the lowest number, which onnxruntime takes for minus infinity."""
_STEP = 1e3
"""A higher one of several finite fills is this many times nearer to zero."""


class NotStandard(Exception):
    """A program that the usual operations cannot say; the message is the reason, in the user's words."""


@dataclasses.dataclass(frozen=True)
class Standard:
    """A program taken apart.

    Attributes:
        scale: of the dot. softcap: 0 for none.
        queries: what queries are multiplied by besides; None for nothing.
        mask: statements that make the mask from scores of zero; empty for no mask.
        sink: the score of one more key, whose value is zero.
        results: what results are multiplied by; None for nothing.
        blind_is_zero: a row that sees no key is zero, not NaN.
        sees_itself: every query sees the key of its own position.
    """

    scale: float
    softcap: float
    queries: Expr | None
    mask: tuple[Statement, ...]
    sink: Expr | None
    results: Expr | None
    blind_is_zero: bool
    sees_itself: bool

    @property
    def causal(self) -> bool:
        """Whether the mask only hides later keys."""
        keep = self.mask[0] if len(self.mask) == 1 else None
        if not isinstance(keep, Keep) or not keep.is_hard:
            return False
        limit = distance_limit(keep.predicate)
        return limit is not None and limit[0] == "ahead" and E.is_const(limit[1], 0)

    @property
    def adds(self) -> bool:
        """Whether the mask is more than which keys are seen."""
        return not all(isinstance(s, Keep) and s.is_hard for s in self.mask)


def standard_form(program: ScoreProgram, dtype: torch.dtype) -> Standard:
    """The program in the terms above; NotStandard where it has none."""
    reader = _Reader(_stand_ins(program, dtype))
    for statement in program.statements:
        reader.read(statement)
    mask = tuple(reader.mask)
    factor = reader.factor
    constant = _number(factor)
    if _mentions(factor, S.index("k")):
        raise NotStandard("scores are multiplied by what depends on the key")
    return Standard(
        1.0 if constant is None else constant, reader.softcap, None if constant is not None else factor,
        mask, program.sink, reader.results,
        reader.blind_is_zero or program.sink is not None, all(keeps_own(s) for s in mask),
    )  # fmt: skip


def sdpa_form(program: ScoreProgram, dtype: torch.dtype) -> Standard:
    """The same for torch's operation, which has no softcap."""
    form = standard_form(program, dtype)
    if form.softcap:
        raise NotStandard("scores go through a tanh, which torch's operation does not have")
    return form


def after_softmax(program: ScoreProgram) -> tuple[Expr | None, bool]:
    """What results are multiplied by, None for nothing; and whether a row that sees no key is zero."""
    reader = _Reader({})
    for statement in program.statements:
        if isinstance(statement, Weight):
            reader.read(statement)
    return reader.results, reader.blind_is_zero


class _Reader:
    """The statements read so far: scores are cap(factor * dot) plus what `mask` makes of zero."""

    def __init__(self, fills: dict[float, float]) -> None:
        self.stand_ins = fills
        self.factor: Expr = ONE
        self.softcap = 0.0
        self.mask: list[Statement] = []
        self.blind_is_zero = False
        self.results: Expr | None = None

    def read(self, statement: Statement) -> None:
        match statement:
            case Score(value):
                self._score(value)
            case Keep():
                self._keep(statement)
            case Weight(value):
                self._weight(value)
            case Sink():
                pass

    def _score(self, value: Expr) -> None:
        earlier = self.mask or self.softcap or not _is_one(self.factor) or _mentions(value, S.SCORE)
        if _mentions(value, S.DOT) and earlier:
            raise NotStandard("scores use the product of query and key in several places")
        unit = S.DOT if _mentions(value, S.DOT) else S.SCORE
        caps = [n for n in E.walk(value) if n.op == "tanh" and _mentions(n, unit)]
        if caps:
            value, unit = self._cap(value, unit, caps), caps[0]
        slope, rest = _linear(value, unit)
        number = _number(slope)
        if self.softcap and unit is not S.SCORE:
            if number is None or number <= 0:
                raise NotStandard("the factor of a tanh of the scores is no positive number")
            scale = _number(self.factor)
            assert scale is not None
            self.softcap, self.factor = number, E.const(float(scale * number))
        elif self.softcap and not _is_one(slope):
            raise NotStandard("scores are multiplied after a tanh")
        else:
            self.factor = slope if _is_one(self.factor) else operation("mul", self.factor, slope)
            if self.mask and not _is_one(slope):
                if number is None or number <= 0:
                    raise NotStandard("scores are multiplied after a mask")
                self.mask.append(Score(operation("mul", S.SCORE, slope)))
        if rest is not ZERO:
            self.mask.append(Score(operation("add", S.SCORE, rest)))

    def _cap(self, value: Expr, unit: Expr, caps: Sequence[Expr]) -> Expr:
        """Read a tanh of the scores; what it is multiplied by comes afterwards."""
        if len(caps) > 1 or self.mask or self.softcap:
            raise NotStandard("a tanh of the scores is applied after a mask or another tanh")
        inner, rest = _linear(caps[0].args[0], unit)
        scale = _number(operation("mul", self.factor, inner))
        if rest is not ZERO or scale is None:
            raise NotStandard("a tanh of the scores is of more than a multiple of the product")
        self.factor, self.softcap = E.const(float(scale)), 1.0
        return value

    def _keep(self, keep: Keep) -> None:
        if _mentions(keep.predicate, S.DOT) or _mentions(keep.predicate, S.SCORE):
            raise NotStandard("which keys are seen depends on the scores")
        fill, added = E.NEG_INF, added_to_score(keep.fill)
        if keep.fill.op == "const" and not keep.is_hard:
            fill = E.const(self.stand_ins[float(keep.fill.value)])
        elif abs(added) < float("inf"):
            fill = operation("add", S.SCORE, E.const(float(max(added, -LOWEST))))
        elif not (keep.is_hard or keep.lowers):
            raise NotStandard("hidden scores are replaced by a formula")
        self.mask.append(Keep(keep.predicate, fill))

    def _weight(self, value: Expr) -> None:
        if _zeroes_nan(value):
            self.blind_is_zero = True
            return
        slope, rest = _linear(value, S.WEIGHT)
        if rest is not ZERO or _mentions(slope, S.index("k")) or _mentions(slope, S.DOT):
            raise NotStandard("weights are changed after the softmax")
        self.results = slope if self.results is None else operation("mul", self.results, slope)


def _stand_ins(program: ScoreProgram, dtype: torch.dtype) -> dict[float, float]:
    """What stands for each finite number that replaces scores: the lowest gets the lowest; NotStandard where
    a fill is no number that hides, or the dtype has no room."""
    fills = {float(k.fill.value) for k in program.keeps if k.fill.op == "const" and k.fill is not E.NAN}
    finite = sorted(f for f in fills if f != float("-inf"))
    if any(f > -HIDES for f in finite):
        number = format_number(max(finite))
        raise NotStandard(f"hidden scores are replaced by {number}, which counts beside other scores")
    if finite and dtype == torch.float16:
        raise NotStandard("in half precision a finite fill cannot be told from the scores")
    return {fill: -LOWEST / _STEP**place for place, fill in enumerate(finite)}


def _linear(value: Expr, unit: Expr) -> tuple[Expr, Expr]:
    """`value` as slope * unit + rest; NotStandard where it is not of this form."""
    if value is unit:
        return ONE, ZERO
    if not _mentions(value, unit):
        return ZERO, value
    args = value.args
    if value.op == "neg":
        slope, rest = _linear(args[0], unit)
        return _negated(slope), _negated(rest)
    if value.op in ("add", "sub") and len(args) == 2:
        (a, x), (b, y) = (_linear(arg, unit) for arg in args)
        if value.op == "sub":
            b, y = _negated(b), _negated(y)
        return added(a, b), added(x, y)
    if value.op in ("mul", "div") and len(args) == 2:
        inner, other = args if _mentions(args[0], unit) else (args[1], args[0])
        if not _mentions(other, unit) and (value.op == "mul" or inner is args[0]):
            slope, rest = _linear(inner, unit)
            rest = rest if rest is ZERO else operation(value.op, rest, other)
            return operation(value.op, slope, other), rest
    if unit is S.WEIGHT:
        raise NotStandard("weights are changed after the softmax")
    raise NotStandard("scores are no multiple of the product of query and key plus a bias")


def _negated(value: Expr) -> Expr:
    return value if value is ZERO else operation("neg", value)


def _mentions(value: Expr, part: Expr) -> bool:
    return any(node is part for node in E.walk(value))


def _number(value: Expr) -> float | None:
    """The value of a formula of numbers alone."""
    if any(n.op in ("var", "read", "size", "dot", "s", "p") for n in E.walk(value)):
        return None
    return float(evaluate.number(value))


def _is_one(value: Expr) -> bool:
    return _number(value) == 1.0


def _zeroes_nan(value: Expr) -> bool:
    """Whether weights that are NaN become zero and the others stay."""
    if value.op != "where" or value.args[0].op != "isnan" or value.args[0].args[0] is not S.WEIGHT:
        return False
    return E.is_const(value.args[1], 0) and value.args[2] is S.WEIGHT


def keeps_own(statement: Statement) -> bool:
    """Whether a statement leaves the pair of a query and the key of its own position alone."""
    if isinstance(statement, Score):
        return not any(n.op == "read" for n in E.walk(statement.value))
    if not isinstance(statement, Keep):
        return True
    if not statement.is_hard:
        return True  # a finite fill leaves no row without keys
    parts = [statement.predicate]
    for part in parts:  # grows
        if part.op == "and":
            parts += part.args
            continue
        limit = distance_limit(part)
        number = None if limit is None else _number(limit[1])
        if number is None or number < 0:
            return False
    return True
