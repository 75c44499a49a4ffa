"""A formula of a token program as an expression of C.

What a formula mentions more than once has a name. So has what the innermost loop does not change: it is
computed before that loop. Within the branches of a selection nothing has a name: only the branch that is
chosen may be evaluated, because in the other an index may be out of range.
"""

import collections
from collections.abc import Callable

from attngraph.codegen.cpu.expression import number_literal
from attngraph.codegen.remarks import UnsupportedError
from attngraph.ir.language import E, Expr, Operation, operation_of


class Formula:
    """Writes one formula.

    Args:
        read: the C of a read, given the C of its indices.
        inner: the index of the innermost loop around the formula, if there is a loop.

    Attributes:
        before: declarations that must stand before the innermost loop.
        lines: declarations that must stand before the expression.
    """

    def __init__(self, value: Expr, read: Callable[[Expr, list[str]], str], inner: Expr | None) -> None:
        self.read = read
        self.before: list[str] = []
        self.lines: list[str] = []
        self._changing = {n for n in E.walk(value) if inner is None or any(m is inner for m in E.walk(n))}
        self._is_before = False
        self._names: dict[Expr, str] = {}
        self._uses = collections.Counter(arg for n in E.walk(value) for arg in n.args)
        self._conditional = {
            inner
            for n in E.walk(value)
            if n.op == "where"
            for branch in n.args[1:]
            for inner in E.walk(branch)
        }
        self.code = self.real(value)

    def real(self, node: Expr) -> str:
        """A value as a float."""
        if node.op == "const":
            return number_literal(node)
        return self.of(node) if node.kind in ("float", "any") else f"((float){self.of(node)})"

    def of(self, node: Expr) -> str:
        if node in self._names:
            return self._names[node]
        if node.op in ("const", "var") or node in self._conditional:
            return self._of(node)
        outer = self._is_before
        self._is_before = outer or node not in self._changing
        lines, first = (self.before if self._is_before else self.lines), self._is_before and not outer
        code = self._of(node)
        self._is_before = outer
        if not first and (node.op == "read" or self._uses[node] < 2):
            return code
        kind = "float" if node.kind in ("float", "any") else "int64_t"
        self._names[node] = f"x{len(self._names)}"
        lines.append(f"const {kind} {self._names[node]} = {code};")
        return self._names[node]

    def _of(self, node: Expr) -> str:
        match node.op:
            case "const":
                return number_literal(node) if node.kind == "float" else str(int(node.value))
            case "var":
                return str(node.value)
            case "read":
                return self.read(node, [self.of(a) for a in node.args])
            case "where":
                branches = (
                    self.real(a) if node.kind in ("float", "any") else self.of(a) for a in node.args[1:]
                )
                return "({} ? {} : {})".format(self._truth(node.args[0]), *branches)
            case "float":
                return self.real(node.args[0])
            case "isnan":
                return f"({self.real(node.args[0])} != {self.real(node.args[0])})"
            case "pow" if node.args[1].op == "const" and node.args[1].value in (2, 3, 4):
                base = self.real(node.args[0])
                return "(" + " * ".join([base] * int(node.args[1].value)) + ")"
        row = operation_of(node.op)
        if row is None:
            raise UnsupportedError(f"`{node.op}`")
        return self._operation(row, node)

    def _operation(self, row: Operation, node: Expr) -> str:
        whole = row.takes != "reals" and all(a.kind in ("int", "bool") for a in node.args)
        if row.takes == "truths":
            args = [self._truth(a) for a in node.args]
        else:
            args = [self.of(a) if whole else self.real(a) for a in node.args]
        template = row.c if isinstance(row.c, str) else row.c[whole]
        if not template:
            raise UnsupportedError(f"`{node.op}`")
        return template.format(*args, kind="long" if whole else "float")

    def _truth(self, node: Expr) -> str:
        return self.of(node) if node.kind == "bool" else f"({self.of(node)} != 0)"
