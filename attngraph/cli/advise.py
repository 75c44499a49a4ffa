"""`attngraph advise TARGET`: what would make each place fuse, as a patch where an edit was found by trying.

A rule for a kind of reason rewrites an expression of the function in which the place is. Such an edit is a
guess, so it is tried before it is told: the running function gets the edited code; the model must give the
same results in float64 on the target's inputs, and fewer places must be left. No file is changed.
"""

import argparse
import ast
import contextlib
import copy
import difflib
import gc
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attngraph.api.compile import explain
from attngraph.cli.explain import explained, lines, told
from attngraph.cli.terminal import Progress
from attngraph.ir.graph.source import short_path
from attngraph.meaning.check.oracle import Oracle
from attngraph.report.entries import Place
from attngraph.runtime.verify import tensors_of

_SMALL = 1e-2
"""A number that is at most so large is there to keep a divisor from being zero."""
_SAME = 1e-5
"""The most that results may differ, relative to the largest: what leaving out such a number may change."""


def run(options: argparse.Namespace) -> int:
    model, inputs, report = explained(options)
    trial, tell = _Trial(model, inputs, len(report.places)), Progress()
    changes: dict[Place, float] = {}
    with contextlib.redirect_stdout(sys.stderr):
        for place in report.places:
            tell(f"trying edits for {place.code} {place.place}")
            change = trial.change(place)
            if change is not None:
                changes[place] = change
    tell.done()
    if options.json:
        found = [asdict(p) | {"patched": p in changes, "difference": changes.get(p)} for p in report.places]
        said = {**told(options.target, inputs, report), "places": found, "patch": trial.patch()}
        print(json.dumps(said, indent=2))
        return 0
    print(f"attngraph: {report.counted()}")
    for place in report.places:
        print("\n".join(lines(place)))
        if place in changes:
            differ = f"results differ by at most {changes[place]:.0e} of the largest, in float64"
            print(f"      done by the patch below, which was tried: {differ}")
    print(f"\n{trial.patch() or 'No edit was found that could be tried; what to change is told above.'}")
    return 0


class _Trial:
    """Edits of the functions of a model, as long as each leaves fewer places and the same results."""

    def __init__(self, model: Callable[..., Any], inputs: tuple[Any, ...], left: int) -> None:
        self.model, self.inputs, self.left = model, inputs, left
        self.before, self.texts = dict[str, str](), dict[str, str]()

    def change(self, place: Place) -> float | None:
        """Edit what may be in the way at a place; how far results differ then, None if nothing helps."""
        for path, line in self._functions(place) if place.code in _EDITS else ():
            self.before.setdefault(path, Path(path).read_text("utf-8"))
            text = self.texts.get(path, self.before[path])
            for edited in _edited(text, line, _EDITS[place.code]):
                with contextlib.suppress(Exception):  # an edit that does not run is none
                    expected = self._results()
                    with _exchanged(path, edited) as keep:
                        change = _difference(self._results(), expected)
                        left = len(explain(self.model, *self.inputs).places)
                        if change <= _SAME and left < self.left:
                            keep()
                            self.texts[path], self.left = edited, left
                            return change
        return None

    def patch(self) -> str:
        """All edits as one unified diff."""
        parts = list[str]()
        for path, text in self.texts.items():
            old, new = (side.splitlines(keepends=True) for side in (self.before[path], text))
            inside = Path(path).resolve().is_relative_to(Path.cwd())
            name = Path(path).resolve().relative_to(Path.cwd()) if inside else path
            parts += difflib.unified_diff(
                old, new, f"a/{name}" if inside else path, f"b/{name}" if inside else path
            )
        return "".join(parts)

    def _results(self) -> list[Tensor]:
        """The model's results in float64, with the same random numbers each time."""
        model, wide = self.model, pytree.tree_map_only(Tensor, Oracle().widened, self.inputs)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
            return tensors_of(model(*wide))

    def _functions(self, place: Place) -> list[tuple[str, int]]:
        """The file and a line of each function of the user's that a place or its reason names; if it names
        none, of every forward."""
        installed = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
        every = {f.__code__.co_filename for f in _alive()}
        own = {path for path in every if not path.startswith((*installed, "<"))}
        named = re.findall(r"([^\s(]+\.py):(\d+)", f"{place.place} {place.inside} {place.reason}")
        if not named and isinstance(self.model, nn.Module):
            forwards = [getattr(type(m).forward, "__code__", None) for m in self.model.modules()]
            codes = [c for c in dict.fromkeys(forwards) if c is not None and c.co_filename in own]
            return [(c.co_filename, c.co_firstlineno) for c in codes]
        short = [(path, short_path(path)) for path in own]
        return [(p, int(line)) for file, line in dict.fromkeys(named) for p, name in short if name == file]


def _alive() -> list[FunctionType]:
    return [f for f in gc.get_objects() if type(f) is FunctionType]  # isinstance asks the object


@contextlib.contextmanager
def _exchanged(path: str, text: str) -> Iterator[Callable[[], None]]:
    """In this block functions of a file have the code of an edited text; afterwards too if what is yielded is
    called."""
    codes, pending = dict[str, CodeType](), [compile(text, path, "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        codes[code.co_qualname] = code
        pending += [c for c in code.co_consts if isinstance(c, CodeType)]
    old = [(f, f.__code__) for f in _alive() if f.__code__.co_filename == path]
    for function, code in old:
        function.__code__ = codes.get(code.co_qualname, code)
    kept: list[bool] = []
    try:
        yield lambda: kept.append(True)
    finally:
        for function, code in [] if kept else old:
            function.__code__ = code


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference relative to the largest value; infinite where shapes, dtypes or NaN differ."""
    if [(t.shape, t.dtype) for t in found] != [(t.shape, t.dtype) for t in expected]:
        return float("inf")
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        a, b = a[a.isfinite()].double(), b[b.isfinite()].double()
        worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if a.numel() else 0.0)
    return worst


# --- edits: what an expression may be instead, by the code of the reason ------------------------------

Rule = Callable[[ast.AST], list[str]]


def _edited(text: str, line: int, rule: Rule) -> Iterator[str]:
    """The text with other words for one expression of the function around a line, the nearest first."""
    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
    around = [f for f in functions if f.lineno <= line <= (f.end_lineno or 0)]
    inside: list[Any] = [n for f in around[-1:] for n in ast.walk(f) if isinstance(n, ast.expr | ast.stmt)]
    rows = [row.encode() for row in text.splitlines(keepends=True)]  # columns are bytes
    for node in sorted(inside, key=lambda n: abs(n.lineno - line)):
        start = sum(map(len, rows[: node.lineno - 1])) + node.col_offset
        stop = sum(map(len, rows[: node.end_lineno - 1])) + node.end_col_offset
        before, after = b"".join(rows)[:start], b"".join(rows)[stop:]
        if re.search(rb"[^\w)\]]\($", before) and after.startswith(b")"):  # the brackets of the expression
            before, after = before[:-1], after[1:]
        for new in rule(node):
            yield (before + new.encode() + after).decode()


def _called(node: ast.AST | None) -> tuple[str, list[ast.expr]]:
    """The name and the operands of `x.clamp(2)` and `torch.clamp(x, 2)`, x first; "" of what is no call."""
    if not isinstance(node, ast.Call):
        return "", []
    if isinstance(node.func, ast.Attribute):
        is_module = isinstance(node.func.value, ast.Name) and node.func.value.id in ("torch", "F")
        return node.func.attr, [*([] if is_module else [node.func.value]), *node.args]
    return getattr(node.func, "id", ""), node.args


def _text(node: ast.AST) -> str:
    """An expression as an operand."""
    text = ast.unparse(node)
    return text if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"({text})"


def _plain_divisor(node: ast.AST) -> list[str]:
    """`x + 1e-9` and `x.clamp(min=1e-9)`: x."""
    name, operands = _called(node)
    found = operands[:1] if name.startswith(("clamp", "clip")) else []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        pairs = ((node.left, node.right), (node.right, node.left))
        numbers = [(a, b.value) for a, b in pairs if isinstance(b, ast.Constant)]
        found = [a for a, number in numbers if isinstance(number, float) and 0 < number <= _SMALL]
    return [_text(x) for x in found]


def _by_a_product(node: ast.AST) -> list[str]:
    """`torch.cdist(q, k) ** 2` and `((q[..., None, :] - k[..., None, :, :]) ** 2).sum(-1)`: by q @ k.mT."""
    name, operands = _called(node)
    root = _root(operands[0] if name == "sum" else node)
    pair = [root.left, root.right] if isinstance(root, ast.BinOp) and isinstance(root.op, ast.Sub) else []
    distance, sides = _called(root)
    pair = sides[:2] if distance == "cdist" else pair if name == "sum" else []
    q, *k = [_text(_unexpanded(side)) for side in pair] or [""]
    text = "(({0} * {0}).sum(-1)[..., :, None] - 2 * ({0} @ {1}.mT) + ({1} * {1}).sum(-1)[..., None, :])"
    return [text.format(*both) for each in k for both in ((q, each), (each, q))]


def _root(node: ast.AST) -> ast.AST | None:
    """x of `x ** 2`, `x * x`, `x.pow(2)`, `x.square()`."""
    name, operands = _called(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.Mult):
        name, operands = "pow", [node.left, node.right]
        if isinstance(node.op, ast.Mult):
            name = "square" if ast.dump(node.left) == ast.dump(node.right) else ""
    is_square = name == "square" or (name == "pow" and getattr(operands[1], "value", 0) == 2)
    return operands[0] if is_square else None


def _unexpanded(node: ast.AST) -> ast.AST:
    """x of `x[..., None, :]` and `x.unsqueeze(-2)`."""
    name, operands = _called(node)
    return operands[0] if name == "unsqueeze" else node.value if isinstance(node, ast.Subscript) else node


def _silent(node: ast.AST) -> list[str]:
    """A statement that prints: none."""
    return ["pass"] if isinstance(node, ast.Expr) and _called(node.value)[0] == "print" else []


_EDITS: dict[str, Rule] = {
    "divisor-plus-number": _plain_divisor, "other-divisor": _plain_divisor, "blocks-of-keys": _plain_divisor,
    "distances": _by_a_product, "side-effect": _silent,
}  # fmt: skip
