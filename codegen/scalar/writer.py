"""The scalar form as source: what C and Triton have in common.

`write` returns a formula's source and emits the lines that it needs, each named value at the place where it
is computed. A subclass for a language prints constants, casts and reads; all operations are printed from
their rows (`ir/language/functions.py`). Names are made from numbers and literals by `repr`, so no text of a
user's reaches the source.
"""

import abc
import collections
import re
from collections.abc import Mapping

from attngraph.codegen.remarks import UnsupportedError
from attngraph.codegen.scalar.form import Lowering, Scalar
from attngraph.ir.language import E, Expr, Keep, Operation, Score, Weight, operation_of

COMPARE, SUM, PRODUCT, SIGN, ATOM = 1, 6, 7, 8, 9
FACTOR = PRODUCT + 1
"""How tightly operations bind."""


class Writer(abc.ABC):
    """Writes the formulas of one function. `names`: the names of values that have one."""

    binds: Mapping[str, int] = {}
    """How tightly operators bind, for those that this language prints without brackets."""
    zero = "0.0"
    choice: str
    """How the language writes `where`: a format of the condition and the two values."""

    def __init__(self, lower: Lowering) -> None:
        self.lower = lower
        self.names: dict[Scalar, str] = {}
        self._uses: collections.Counter[Expr] = collections.Counter()

    # --- defined by each language ---

    @abc.abstractmethod
    def line(self, code: str) -> None:
        """Write a line for each pair of a query and a key."""

    @abc.abstractmethod
    def declare(self, name: str, code: str, is_truth: bool = False) -> None:
        """Write a line that declares a name with the value of a number, or of a boolean."""

    @abc.abstractmethod
    def leaf(self, value: Scalar) -> tuple[str, int]: ...

    @abc.abstractmethod
    def cast(self, value: Scalar) -> tuple[str, int]: ...

    @abc.abstractmethod
    def read(self, value: Scalar) -> str: ...

    @abc.abstractmethod
    def spelling(self, row: Operation, is_whole: bool) -> str: ...

    @abc.abstractmethod
    def is_named(self, value: Scalar) -> bool: ...

    @abc.abstractmethod
    def name(self, value: Scalar, code: str) -> str:
        """Write the line that gives a value a name."""

    # --- statements ---

    def assign(self, name: str, statement: Score | Keep | Weight) -> None:
        """Write a statement's new value of the score or the weight."""
        if isinstance(statement, Keep):
            code = self.choice.format(self.truth(statement.predicate), name, self.real(statement.fill))
        else:
            code = self.score(statement.value)
        self.set(name, code)

    def set(self, name: str, code: str) -> None:
        """Assign the score or the weight, and forget values computed from the old one."""
        self.line(f"{name} = {code}")
        self.changed(name)

    def changed(self, name: str) -> None:
        kept = {v for v in self.names if all(n.op != name for n in E.walk(v.source))}
        self.names = {v: code for v, code in self.names.items() if v in kept}

    # --- formulas ---

    def truth(self, formula: Expr) -> str:
        return self.write(formula, self.lower.truth(self.lower(formula)))

    def real(self, formula: Expr, level: int = 0) -> str:
        return self.write(formula, self.lower.real(formula), level)

    def integer(self, formula: Expr, level: int = 0) -> str:
        return self.write(formula, self.lower(formula), level)

    def score(self, formula: Expr) -> str:
        """A formula as a score."""
        return self.real(formula)

    def write(self, formula: Expr, value: Scalar, level: int = 0) -> str:
        """The source of a formula's value, in brackets where its operator binds less tightly than `level`."""
        self._uses = collections.Counter(arg for n in E.walk(formula) for arg in n.args)
        return self.code(value, level)

    def uses(self, value: Scalar) -> int:
        """How often the value occurs in the current formula."""
        return self._uses[value.source] if self.lower(value.source) is value else 0

    def code(self, value: Scalar, level: int = 0) -> str:
        known = self.names.get(value)
        if known is not None:
            return known
        code, binds = self.spell(value)
        if value in self.names or self.is_named(value):
            return self.named(value, code)
        return code if binds >= level else f"({code})"

    def named(self, value: Scalar, code: str) -> str:
        if value not in self.names:
            self.names[value] = self.name(value, code)
        return self.names[value]

    def atom(self, value: Scalar) -> str:
        """A name or a number, for a value that the source mentions more than once."""
        if value in self.names or value.is_leaf or (value.op == "cast" and value.args[0].op == "const"):
            return self.code(value, ATOM)
        return self.named(value, self.code(value))

    def operand(self, parent: Scalar, value: Scalar, level: int) -> str:
        return self.code(value, level)

    def spell(self, value: Scalar) -> tuple[str, int]:
        """A value's source, and how tightly its operator binds."""
        if value.is_leaf:
            return self.leaf(value)
        if value.op == "cast":
            return self.cast(value)
        if value.op == "read":
            return self.read(value), ATOM
        row = operation_of(value.op)
        template = self.spelling(row, value.args[-1].is_whole) if row is not None else ""
        if not template:
            raise UnsupportedError(f"`{value.op}`")
        own = self.binds.get(value.op, ATOM)
        operands = []
        for place, arg in enumerate(value.args):
            mentions = template.count(f"{{{place}}}") + value.args.count(arg) - 1
            if own != ATOM:
                level = own + (place > 0 or own == COMPARE)
            else:
                level = 0 if re.search(rf"[(,] ?\{{{place}\}}[,)]", template) else ATOM
            is_shared = mentions > 1 and not arg.is_leaf
            operands.append(self.atom(arg) if is_shared else self.operand(value, arg, level))
        return template.format(*operands, kind=value.kind), own
