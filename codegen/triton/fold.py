"""A kernel's file folded to the source of one kernel: what is known is worked out, all else is printed.

Kernels are written in `kernels/`, once, as plain Triton with everything that any plan may ask for. A plan
gives values to some names of a file, and what remains is printed, line by line, with the file's comments:

    if LISTED:           a branch that known values decide is taken, or left out; so is `x if A else y`
    D, GROUP > 1         what known values determine is worked out; a text is put in as it stands
    acc_rest             what is NOTHING takes its assignments along, and is left out where things are listed:
                         arguments, parameters, elements of tuples
    BEFORE               alone in its line: a list of lines
    mask=A & B           parts of a mask that are True are left out; so is a mask of which nothing is left
    @part                a function whose lines are written out where it is called
    f = part(lambda ..)  a value that is written out where it is called
    for R in READS:      a loop over known values is written out
    def f(*g)            has the parameters of the function g above it

The file's docstring, those of parts, and comments above what is decided explain, and are not printed. Nothing
here knows what a kernel computes: another family of kernels is other files.
"""

import ast
import functools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

Values = Mapping[str, Any]
"""What is known: numbers and truths, source (texts), lists of lines, and objects with such attributes."""
NOTHING = ""
F = TypeVar("F", bound=Callable[..., Any])
_ROOM = Path(__file__).parent / "kernels"


def part(function: F) -> F:
    """Marks what is written out where it is called: a function's lines, or the value of a lambda."""
    return function


class _Missing(Exception):
    """An expression needs what is NOTHING."""


class File:
    """A file of kernels, read once.

    Attributes:
        functions: the source of each function that is no part, as it stands. above: the comments above each
            statement; for one of the file itself, blank lines too.
    """

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.tree = ast.parse(text)
        nodes = list(ast.walk(self.tree))
        found = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        self.parts: dict[str, ast.FunctionDef | ast.Lambda] = {
            f.name: f for f in found if "part" in map(_name, f.decorator_list)
        }
        for node in self.tree.body:
            match node:
                case ast.Assign([ast.Name(name)], ast.Call(ast.Name("part"), [ast.Lambda() as value])):
                    self.parts[name] = value
        self.functions = {f.name: "\n".join(self.span(f)) for f in found if f.name not in self.parts}
        self.above = {node: self._above(node) for node in nodes if isinstance(node, ast.stmt)}

    def fold(self, values: Values) -> str:
        """The source that remains where these values are known."""
        return "\n".join(_Folder(self).block(self.tree.body, values, "")).lstrip("\n") + "\n"

    def span(self, node: ast.stmt) -> list[str]:
        """The lines of a statement."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        return textwrap.dedent("\n".join(self.lines[first - 1 : node.end_lineno])).split("\n")

    def _above(self, node: ast.stmt) -> list[str]:
        first = last = node.lineno - 1
        while first > 0 and re.match(r"\s*#" if node.col_offset else r"\s*(#|$)", self.lines[first - 1]):
            first -= 1
        return [line.strip() for line in self.lines[first:last]]

    def comment(self, node: ast.stmt | ast.expr) -> str:
        """The comment behind a node."""
        rest = self.lines[(node.end_lineno or 1) - 1][node.end_col_offset :]
        return "  " + rest[rest.index("#") :] if "#" in rest else ""

    def between(self, begin: tuple[int, int], end: tuple[int, int]) -> str:
        """The source between two places, in one line."""
        if begin[0] == end[0]:
            return self.lines[begin[0] - 1][begin[1] : end[1]]
        lines = self.lines[begin[0] - 1 : end[0]]
        code = re.sub(r"\s*\n\s*", " ", "\n".join([lines[0][begin[1] :], *lines[1:-1], lines[-1][: end[1]]]))
        return re.sub(r"(?<=[(\[]) |,? (?=[)\]])", "", code)


@functools.cache
def read(name: str) -> File:
    """The file of this name in `kernels/`, with the parts that all share."""
    return File("\n".join((_ROOM / each).read_text() for each in (name, "parts.py")))


class _Folder:
    """Prints a file's statements and expressions."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.signatures: dict[str, list[str]] = {}

    # --- statements ---

    def block(self, body: Sequence[ast.stmt], values: Values, indent: str) -> list[str]:
        return [line for node in body for line in self.statement(node, values, indent)]

    def statement(self, node: ast.stmt, values: Values, indent: str) -> list[str]:
        file = self.file
        match node:
            case ast.FunctionDef():
                return [] if node.name in file.parts else self.function(node, values, indent)
            case ast.ImportFrom() | ast.Assign(value=ast.Call(func=ast.Name("part"))):
                return []
            case ast.Expr(value=ast.Constant()) if not indent:
                return []
        if not self.is_touched(node, values):
            return [indent + line for line in (*file.above[node], *file.span(node))]
        match node:
            case ast.If(test=test) if self.is_known(test, values, texts=True):
                return self.block(node.body if self.value(test, values) else node.orelse, values, indent)
            case ast.For(iter=known) if self.is_known(known, values):
                turns = self.turns(node, values)
                return [line for turn in turns for line in self.block(node.body, turn, indent)]
            case ast.Expr(value=ast.Call(func=ast.Name(id=called)) as call) if called in file.parts:
                found = file.parts[called]
                assert isinstance(found, ast.FunctionDef), called
                body = found.body[1:] if ast.get_docstring(found, clean=False) is not None else found.body
                return self.block(body, self.bound(found, call, values), indent)
            case ast.Expr(value=known) if self.is_known(known, values, texts=True):
                lines = self.value(known, values)
                return [indent + line for line in ([f'"""{lines}"""'] if _is_text(lines) else lines)]
        try:
            head = self.head(node, values)
        except _Missing:
            return []
        lines = [indent + line for line in (*file.above[node], head)]
        if isinstance(node, ast.For | ast.If):
            lines += self.block(node.body, values, indent + "    ")
            if node.orelse:
                lines += [f"{indent}else:", *self.block(node.orelse, values, indent + "    ")]
        return lines

    def turns(self, node: ast.For, values: Values) -> Iterator[Values]:
        """The values in each turn of a loop that is written out."""
        targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
        for turn in self.value(node.iter, values):
            turn = turn if len(targets) > 1 else [turn]
            yield {**values, **dict(zip(map(_name, targets), turn, strict=True))}

    def head(self, node: ast.stmt, values: Values) -> str:
        """A simple statement, or the line that introduces a block, with its comment."""
        if isinstance(node, ast.For):
            code, end = f"for {self.text(node.target, values)} in {self.text(node.iter, values)}:", node.iter
        elif isinstance(node, ast.If):
            code, end = f"if {self.text(node.test, values)}:", node.test
        else:
            code, end = self.spliced(node, values), node  # type: ignore[assignment]
        return code + self.file.comment(end)

    def function(self, node: ast.FunctionDef, values: Values, indent: str) -> list[str]:
        decorators = [f"@{self.text(d, values)}" for d in node.decorator_list]
        name = values.get(node.name, node.name)
        signature = "\n".join(self.file.lines[node.lineno - 1 : node.body[0].lineno - 1])
        own = re.findall(r"\((.*)\):", signature, re.S)[0].split("\n")
        self.signatures[node.name] = self.signatures[own[0][1:]] if own[0].startswith("*") else own
        rows = [self.parameters(line, values) for line in self.signatures[node.name]]
        lines = [f"    {line}," for row in rows if row for line in row.split("\n")]
        head = [f"def {name}({rows[0]}):"] if len(rows) == 1 else [f"def {name}(", *lines, "):"]
        return ["", "", *decorators, *head, *self.block(node.body, values, "    ")]

    @staticmethod
    def parameters(line: str, values: Values) -> str:
        """A line of parameters. What a text has in lines of its own stays there."""
        names = filter(None, (name.strip() for name in line.split(",")))
        return ", ".join(filter(None, (values.get(name, name) for name in names)))

    def bound(self, called: ast.FunctionDef | ast.Lambda, call: ast.Call, values: Values) -> Values:
        """The values in a part that is called."""
        names = (a.arg for a in called.args.args)
        return {**values, **{name: self.given(v, values) for name, v in zip(names, call.args, strict=True)}}

    def given(self, node: ast.expr, values: Values) -> Any:
        """An argument of a part: its value where that is known, else its source; None where it is missing."""
        try:
            return self.value(node, values) if self.is_determined(node, values) else self.text(node, values)
        except _Missing:
            return None

    # --- expressions ---

    def value(self, node: ast.expr, values: Values) -> Any:
        return values[node.id] if isinstance(node, ast.Name) else eval(_code(node), {}, values)

    def is_touched(self, node: ast.AST, values: Values) -> bool:
        names = _names(node)
        return any(map(values.__contains__, names)) or any(map(self.file.parts.__contains__, names))

    def is_known(self, node: ast.expr, values: Values, texts: bool = False) -> bool:
        """Whether known values determine an expression. `texts`: also such as are texts."""
        names = _names(node)
        return bool(names) and all(n in values and (texts or not _is_text(values[n])) for n in names)

    def is_determined(self, node: ast.expr, values: Values) -> bool:
        return isinstance(node, ast.Constant) or self.is_known(node, values, isinstance(node, ast.Name))

    def text(self, node: ast.expr, values: Values) -> str:
        """The source of an expression. Raises _Missing where it needs what is NOTHING."""
        if not self.is_touched(node, values):
            return self.file.between(*_ends(node))
        node, values = self.chosen(node, values)
        if isinstance(node, ast.Name) and node.id not in values:
            return node.id
        if isinstance(node, ast.Name) or self.is_known(node, values):
            found = self.value(node, values)
            if found in (NOTHING, None):
                raise _Missing
            return found if isinstance(found, str) else repr(found)
        match node:
            case ast.BinOp(op=ast.BitAnd()):
                if any(self.is_determined(*one) for one in self.conjuncts(node, values)):
                    return self.mask(node, values)
            case ast.Call():
                arguments = self.listed(node.args, values)
                for keyword in node.keywords:
                    if keyword.arg == "mask" and not self.mask(keyword.value, values):
                        break  # and what is loaded elsewhere does not matter
                    arguments += [f"{keyword.arg}={one}" for one in self.listed([keyword.value], values)]
                return f"{self.text(node.func, values)}({', '.join(arguments)})"
            case ast.Tuple():
                elements = self.listed(node.elts, values, deep=True)
                if _ends(node)[0] == _ends(node.elts[0])[0]:
                    return ", ".join(elements)
                return f"({', '.join(elements)}{',' * (len(elements) == 1)})"
        return self.spliced(node, values)

    def spliced(self, node: ast.AST, values: Values) -> str:
        """The source of a node, with what its pieces become."""
        (place, end), code = _ends(node), ""
        for piece in _pieces(node):
            begin, behind = _ends(piece)
            code += self.file.between(place, begin) + self.text(piece, values)
            place = behind
        return code + self.file.between(place, end)

    def listed(self, nodes: Sequence[ast.expr], values: Values, deep: bool = False) -> list[str]:
        """The source of those expressions that are something. `deep`: that need nothing which is missing."""
        found = []
        for node in nodes:
            try:
                found.append(self.text(node, values))
            except _Missing:
                chosen, known = self.chosen(node, values)
                if not deep and (not self.is_determined(chosen, known) or self.value(chosen, known) is None):
                    raise
        return found

    def mask(self, node: ast.expr, values: Values) -> str:
        """The parts of a mask that are not True; may be empty."""
        found = []
        for one, known in self.conjuncts(node, values):
            value = self.value(one, known) if self.is_determined(one, known) else self.text(one, known)
            found += [] if value is True else [value]
        return " & ".join(f"({one})" for one in found) if len(found) > 1 else "".join(found)

    def conjuncts(self, node: ast.expr, values: Values) -> list[tuple[ast.expr, Values]]:
        node, values = self.chosen(node, values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            return [*self.conjuncts(node.left, values), *self.conjuncts(node.right, values)]
        return [(node, values)]

    def chosen(self, node: ast.expr, values: Values) -> tuple[ast.expr, Values]:
        """What an expression comes down to: the branch that is taken, the value of a part."""
        match node:
            case ast.IfExp() if self.is_known(node.test, values, texts=True):
                return self.chosen(node.body if self.value(node.test, values) else node.orelse, values)
            case ast.Call(func=ast.Name(id=name)) if name in self.file.parts:
                called = self.file.parts[name]
                assert isinstance(called, ast.Lambda), name
                return self.chosen(called.body, self.bound(called, node, values))
        return node, values


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _ends(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


@functools.cache
def _names(node: ast.AST) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name))


@functools.cache
def _pieces(node: ast.AST) -> list[ast.expr]:
    """The expressions that a node consists of, in the order of the source."""
    found = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
    return sorted(found, key=lambda n: (n.lineno, n.col_offset))


@functools.cache
def _code(node: ast.expr) -> CodeType:
    return compile(ast.Expression(node), "<known>", "eval")
