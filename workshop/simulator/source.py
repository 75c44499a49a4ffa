"""From a kernel's text to coroutines: what Triton would compile is Python that can be halted at each call.

In functions under `@gluon.jit` each call that may have to wait becomes `yield from`, `//` and `%` round as
Triton's do, and an allocation is told the name that it gets. Lines keep their numbers, by which faults are
told.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import types
from typing import Any

from triton.runtime.jit import JITFunction

from workshop.simulator import values
from workshop.simulator.language import stand_in
from workshop.simulator.order import KERNELS, Wrong

_numbers = itertools.count()
ALLOCATE = ("allocate_shared_memory", "allocate_mbarrier", "allocate_tensor_memory")


class _Steps(ast.NodeTransformer):
    """One function's body; `own` are the names that it gives values."""

    def __init__(self, function: ast.FunctionDef) -> None:
        arguments = function.args
        self.own = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        self.own |= {
            n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            called = node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in ALLOCATE:
                node.value.keywords.append(ast.keyword("name", ast.Constant(node.targets[0].id)))
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            return node
        return self.visit(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        first = node.func
        while isinstance(first, ast.Attribute):
            first = first.value
        method = isinstance(node.func, ast.Attribute) and not (
            isinstance(first, ast.Name) and first.id not in self.own
        )
        if method and isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return _call("_to", node, [node.func.value, *node.args], node.keywords)
        if method:
            return node
        return ast.copy_location(
            ast.YieldFrom(_call("_call", node, [node.func, *node.args], node.keywords)), node
        )

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = {ast.FloorDiv: "_floor_divide", ast.Mod: "_modulo"}.get(type(node.op))
        return _call(name, node, [node.left, node.right], []) if name else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
        never = ast.If(ast.Constant(False), [ast.Expr(ast.Yield())], [])
        node.body.insert(0, ast.copy_location(never, node.body[0]))
        return node


def _call(name: str, node: ast.expr, args: list[Any], keywords: list[ast.keyword]) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), args, keywords), node)


def _run(function: Any, *args: Any, **kwargs: Any) -> Any:
    found = function(*args, **kwargs)
    if type(found) is types.GeneratorType:
        found = yield from found
    return found


def is_jit(node: ast.stmt) -> bool:
    """Whether it is a function under a `jit`."""

    def name(of: ast.expr) -> str:
        of = of.func if isinstance(of, ast.Call) else of
        return of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")

    return isinstance(node, ast.FunctionDef) and any(name(d) == "jit" for d in node.decorator_list)


HELPERS: dict[str, Any] = {
    "_call": _run, "_to": values.convert, "_floor_divide": values.floor_divide, "_modulo": values.modulo,
}  # fmt: skip


def load(text: str, name: str = "kernel") -> types.SimpleNamespace:
    """The functions of a module's text, as `launch` takes them.

    Raises:
        SyntaxError: it is not Python. Wrong: it calls functions of other modules.
    """
    file = f"<{name} {next(_numbers)}>"
    KERNELS.add(file)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    tree = ast.parse(text, file)
    for node in tree.body:
        if is_jit(node):
            _Steps(node).visit(node)  # type: ignore[arg-type]
    space: dict[str, Any] = {"__name__": name, "__file__": file, **HELPERS}
    exec(compile(ast.fix_missing_locations(tree), file, "exec"), space)
    for key, value in space.items():
        space[key] = stand_in(value)
        if isinstance(space[key], JITFunction):
            raise Wrong(f"{name} calls {key} of another module; only functions of its own text are run")
    return types.SimpleNamespace(**space)
