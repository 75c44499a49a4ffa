"""The text form of a score program, read back: `parse(str(program)) == program`, exactly.

    program    := { statement ( newline | ";" ) } [ "in order" ]     "#" starts a comment
    statement  := "s" "=" expr | "keep" expr [ "else" expr ] | "sink" expr | "p" "=" expr
    expr       := or ;  or := and { "or" and } ;  and := not { "and" not } ;  not := "not" not | compare
    compare    := sum [ ("<" | "<=" | ">" | ">=" | "==" | "!=") sum ]
    sum        := product { ("+" | "-") product } ;  product := signed { ("*" | "/" | "//" | "%") signed }
    signed     := "-" signed | power ;  power := atom [ "**" signed ]
    atom       := number | "true" | "false" | "inf" | "nan" | "b" | "h" | "q" | "k" | "dot" | "s" | "p"
                | "n" digits | "r" digits "[" [ expr { "," expr } ] "]" | function "(" expr { "," expr } ")"
                | "(" expr ")"

`/` divides real numbers; `//` and `%` are floor division and its remainder, as in Python.
"""

import difflib
import functools
import re
from collections.abc import Iterable

from attngraph.ir import budgets
from attngraph.ir.language import expr as E
from attngraph.ir.language import score as S
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.functions import FUNCTIONS, operation_of
from attngraph.ir.language.score import Keep, ProgramError, Score, ScoreProgram, Sink, Statement, Weight

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>\*\*|//|<=|>=|==|!=|[-+*/%<>=()\[\],]))"
)
_JOINING = {sign: op for op, (sign, _) in E.BINARY.items() if op != "pow"}
"""Operations by their signs; an exponent binds more tightly than any sign before it."""
_STATEMENTS: dict[str, type[Statement]] = {"keep": Keep, "sink": Sink, "s": Score, "p": Weight}
_CONSTANTS = {"true": E.TRUE, "false": E.FALSE, "inf": E.INF, "nan": E.NAN}
_VALUES = {"dot": S.DOT, "s": S.SCORE, "p": S.WEIGHT}
_WORDS = (*S.INDICES, *_VALUES, *_CONSTANTS, "and", "or", "not", "else")
_ELSEWHERE = {
    "&": "and", "&&": "and", "|": "or", "||": "or", "!": "not", "~": "not", "^": "**", "=": "==",
    "maximum": "max", "minimum": "min", "none": "false", "infinity": "inf",
}  # fmt: skip
"""Spellings from other languages, and what they are called here; used in error messages."""


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> ScoreProgram:
    """The score program that `text` spells.

    Raises:
        ProgramError: with the line, the column, what was found and what was expected. TypeError: no text.
    """
    if not isinstance(text, str):
        raise TypeError(f"a score program is parsed from text, found {type(text).__name__}.")
    statements: list[Statement] = []
    in_order = False
    for number, line in enumerate(text.split("\n"), start=1):
        code = line.split("#", 1)[0]
        if code.strip() == S.IN_ORDER:
            in_order = True
            continue
        start = 0
        for piece in code.split(";"):
            if piece.strip():
                parser = _Parser(piece, line, number, start)
                try:
                    statements.append(parser.statement())
                except RecursionError:
                    raise ProgramError(f"score program, line {number}: nested too deeply.") from None
                try:
                    ScoreProgram(tuple(statements))
                except ProgramError as problem:  # it is not valid after those before it
                    parser.place = 0
                    raise parser.problem(str(problem)) from None
            start += len(piece) + 1
    return ScoreProgram(tuple(statements), in_order)


def kind_of(op: str, args: tuple[Expr, ...]) -> str:
    """The kind ("int", "float", "bool", "any") of an operation's result."""
    row = operation_of(op)
    if row is None or row.gives != "alike":
        return row.gives if row is not None else "float"
    kinds = {arg.kind for arg in (args[1:] if op == "where" else args)}
    if kinds <= {"int", "bool"}:
        return "bool" if op == "where" and kinds == {"bool"} else "int"
    return "float" if "float" in kinds else "any"


def operation(op: str, *args: Expr) -> Expr:
    """A pointwise operation, not simplified in any way."""
    return E.make(op, args, None, kind_of(op, args))


def expression(text: str, **names: Expr) -> Expr:
    """The expression that `text` spells; `names` are replaced by the given expressions."""
    parser = _Parser(text, text, 1, 0)
    parser.names = names
    found = parser.expression()
    parser.expect_end()
    return found


class _Parser:
    """Recursive-descent parser of one statement. `offset` is the statement's column in its line."""

    def __init__(self, code: str, line: str, number: int, offset: int) -> None:
        self.line, self.number, self.offset = line, number, offset
        self.tokens: list[tuple[str, str, int]] = []
        place = 0
        while code[place:].strip():
            found = _TOKEN.match(code, place)
            if found is None:
                place += len(code[place:]) - len(code[place:].lstrip())
                self.tokens.append(("unknown", code[place], place))
                break
            group = found.lastgroup or ""
            self.tokens.append((group, found[group], found.start(group)))
            place = found.end()
        self.tokens.append(("end", "end of statement", len(code.rstrip())))
        if len(self.tokens) > budgets.STATEMENT_WORDS:
            raise ProgramError(f"score program, line {number}: longer than {budgets.STATEMENT_WORDS} words.")
        self.place = 0
        self.kind: type[Statement] = Score
        self.names: dict[str, Expr] = {}

    def fail(self, expected: str, hint: str = "") -> ProgramError:
        kind, found, _ = self.tokens[self.place]
        shown = found if kind == "end" else f"`{found}`"
        return self.problem(f"expected {expected}, found {shown}{hint and '; '}{hint}")

    def problem(self, message: str) -> ProgramError:
        """An error at the next word: its position, the line, and a caret below the word."""
        column = self.tokens[self.place][2] + self.offset
        below = "".join("\t" if c == "\t" else " " for c in self.line[:column])
        return ProgramError(
            f"score program, line {self.number}, column {column + 1}: {message}\n  {self.line}\n  {below}^"
        )

    def accept(self, *texts: str) -> str | None:
        kind, found, _ = self.tokens[self.place]
        if kind in ("name", "sign") and found in texts:
            self.place += 1
            return found
        return None

    def expect(self, text: str) -> None:
        if self.accept(text) is None:
            raise self.fail(f"`{text}`")

    def statement(self) -> Statement:
        kind, word, _ = self.tokens[0]
        if self.accept(*_STATEMENTS) is None:
            wanted = "a statement (`s = ...`, `keep ...`, `sink ...` or `p = ...`)"
            raise self.fail(wanted, _did_you_mean(word, _STATEMENTS) if kind == "name" else "")
        self.kind = _STATEMENTS[word]
        if word in _VALUES:
            self.expect("=")
        parts = [self.expression()]
        if self.kind is Keep and self.accept("else"):
            parts.append(self.expression())
        self.expect_end()
        return self.kind(*parts)

    def expect_end(self) -> None:
        if self.tokens[self.place][0] != "end":
            raise self.fail("an operator or the end of the statement", self.after_an_operand())

    def after_an_operand(self) -> str:
        """A suggestion for a word that cannot follow an expression."""
        found, last = self.tokens[self.place][1], self.tokens[self.place - 1][1]
        if found == "[" and last == "]":
            return "all indices stand in one bracket: `r0[b, k]`"
        if found in ("(", "[") and self.tokens[self.place - 1][0] == "name":
            return f"`{last}` is a value, it takes no arguments"
        return _did_you_mean(found, ("and", "or", "else"))

    def expression(self, level: int = 1) -> Expr:
        """Operands joined by signs that bind at this level or more tightly, grouped from the left."""
        if level <= E.NOT and self.accept("not"):
            left = operation("not", self.expression(E.NOT))
        else:
            left = self.signed()
        while (op := _JOINING.get(self.tokens[self.place][1])) is not None and E.BINARY[op][1] >= level:
            self.place += 1
            left = operation(op, left, self.expression(E.BINARY[op][1] + 1))
            if op in E.COMPARISONS and _JOINING.get(self.tokens[self.place][1]) in E.COMPARISONS:
                raise self.fail("`and` (comparisons do not chain)")
        return left

    def signed(self) -> Expr:
        if not self.accept("-"):
            return self.power()
        literal = self.tokens[self.place][0] == "number" or self.tokens[self.place][1] == "inf"
        operand = self.signed()
        if literal and operand.op == "const":
            return E.const(-operand.value)
        return operation("neg", operand)

    def power(self) -> Expr:
        base = self.atom()
        return operation("pow", base, self.signed()) if self.accept("**") else base

    def arguments(self, close: str) -> tuple[Expr, ...]:
        if self.accept(close):
            return ()
        found = [self.expression()]
        while self.accept(","):
            found.append(self.expression())
        if self.accept(close) is None:
            raise self.fail(f"`,` or `{close}`")
        return tuple(found)

    def atom(self) -> Expr:
        kind, text, _ = self.tokens[self.place]
        if self.accept("("):
            inner = self.expression()
            self.expect(")")
            return inner
        if kind == "number":
            self.place += 1
            return E.const(int(text) if text.isdigit() else float(text))
        if kind != "name":
            raise self.fail("an expression", _did_you_mean(text, ()))
        if text in FUNCTIONS:
            self.place += 1
            self.expect("(")
            start = self.place
            args = self.arguments(")")
            if len(args) != FUNCTIONS[text].arity:
                self.place = start
                raise self.fail(f"{FUNCTIONS[text].arity} argument(s) for {text}(), got {len(args)}, at")
            return operation(text, *args)
        return self.name(text)

    def name(self, text: str) -> Expr:
        if text in _CONSTANTS or text in self.names:
            self.place += 1
            return _CONSTANTS.get(text) or self.names[text]
        if text in _VALUES or text in S.INDICES:
            allowed = S.NAMES[self.kind]
            if text not in allowed:
                statement = next(n for n, kind in _STATEMENTS.items() if kind is self.kind)
                shown = f"`{statement} = ...`" if statement in _VALUES else f"`{statement} ...`"
                raise self.problem(
                    f"`{text}` has no meaning in {shown}; allowed there: {', '.join(sorted(allowed))}"
                )
            self.place += 1
            return _VALUES.get(text) or S.index(text)
        if re.fullmatch(r"n\d+", text):
            self.place += 1
            return E.size(text)
        if re.fullmatch(r"r\d+", text):
            self.place += 1
            if self.accept("[") is None:
                raise self.fail(
                    "`[`",
                    f"`{text}` is a tensor: `{text}[b, k]` is an element of it, `{text}[]` a single number",
                )
            return E.read(int(text[1:]), self.arguments("]"))
        raise self.fail(
            "a name of the score language (b h q k dot s p, n0.., r0[..], a function)",
            self.unknown_name(text),
        )

    def unknown_name(self, text: str) -> str:
        if text.lower() in ("n", "r"):
            what = "a size is `n0`, `n1`, .." if text.lower() == "n" else "a tensor is `r0[..]`, `r1[..]`, .."
            return f"{what}: numbered in the order in which they are given"
        called = self.tokens[self.place + 1][1] == "("
        return _did_you_mean(text, FUNCTIONS if called else (*_WORDS, *FUNCTIONS))


def _did_you_mean(found: str, known: Iterable[str]) -> str:
    word = found.lower()
    if word in _ELSEWHERE:
        return f"did you mean `{_ELSEWHERE[word]}`?"
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.65)
    return f"did you mean `{near[0]}`?" if near else ""
