"""Calls of kernels that need not be interpreted again: all that they launch is known to be good.

`golden/known_good.txt` holds a hash of each launch of a call that was interpreted and found right: of the
kernel's source, its grid, and what its arguments are (of whole numbers also their values). A call is first
made without running its kernels. If all of its launches are in the table, nothing more is asked; else its
kernels run, and the results are compared. The table holds for the code around launches that its first line
names; where that changes, all calls are interpreted. `--update-golden` interprets all, and then writes the
table. ATTNGRAPH_INTERPRET=all interprets all, as the slow tests do.
"""

import ast
import contextlib
import fcntl
import hashlib
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from attngraph.codegen.scalar import read_gradients
from attngraph.codegen.triton import decode, device, launch, store

TABLE = Path(__file__).parent / "golden" / "known_good.txt"
R = TypeVar("R")


def _around() -> str:
    """The code around launches, without what it says of itself and imports."""
    found = hashlib.sha256(device.importlib.import_module("triton").__version__.encode())
    for module in (launch, decode, store, read_gradients):
        tree = ast.parse(Path(module.__file__).read_text())
        tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""
        found.update(ast.dump(tree).encode())
    return found.hexdigest()[:16]


class KnownGood:
    """The table, in a process that interprets kernels. `updates`: all are interpreted, and noted."""

    def __init__(self, updates: bool) -> None:
        self.around, self.updates = _around(), updates
        self.found: set[str] = set()
        self.known = set() if updates or os.environ.get("ATTNGRAPH_INTERPRET") else self._read()

    def _read(self) -> set[str]:
        words = TABLE.read_text().split() if TABLE.exists() else []
        return set(words[1:]) if words[:1] == [self.around] else set()

    def write(self) -> None:
        with TABLE.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other processes write theirs
            lines = textwrap.wrap(" ".join(sorted(self._read() | self.found)), 101)
            TABLE.write_text("\n".join([self.around, *lines]) + "\n")

    def check(self, run: Callable[[], R], compare: Callable[[R], None], needed: bool) -> R | None:
        if not self.updates and not needed and self.known:
            keys: list[str] = []
            with launches(keys, runs=False), contextlib.suppress(Exception):
                run()
                if keys and self.known.issuperset(keys):
                    return None
        keys = []
        with launches(keys):
            found = run()
        compare(found)
        self.found.update(filter(None, keys))
        return found


_now: KnownGood | None = None


@contextlib.contextmanager
def of_this_run(updates: bool) -> Iterator[None]:
    global _now
    _now = KnownGood(updates)
    yield
    if updates:
        _now.write()
    _now = None


def check(run: Callable[[], R], compare: Callable[[R], None], needed: bool = False) -> R | None:
    """Compare what a call of kernels gives, and return it; None if it is known to be right and not needed."""
    if _now is not None:
        return _now.check(run, compare, needed)
    found = run()
    compare(found)
    return found


@contextlib.contextmanager
def launches(keys: list[str], runs: bool = True) -> Iterator[None]:
    """Notes the launches of kernels, and runs them or not."""
    real = store.launch_kernel

    def noted(
        kernel: Any, grid: Any, arguments: Sequence[Any], options: Mapping[str, Any], where: Any
    ) -> None:
        function = getattr(kernel, "fn", None)
        if function is None:
            keys.append("")  # what a test has put in a kernel's place is never known
        else:
            source = Path(function.__code__.co_filename).read_text()
            about = source, function.__name__, grid, sorted(options.items()), [*map(described, arguments)]
            keys.append(hashlib.sha256(repr(about).encode()).hexdigest()[:16])
        if runs:
            real(kernel, grid, arguments, options, where)

    with pytest.MonkeyPatch.context() as patch:
        for module in (launch, decode):
            patch.setattr(module, "launch_kernel", noted)
        yield


def described(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        values = () if argument.is_floating_point() or argument.dtype is torch.int8 else argument.tolist()
        return argument.dtype, tuple(argument.shape), argument.stride(), values
    if hasattr(argument, "block_shape"):
        return described(argument.base), tuple(argument.shape), tuple(argument.strides), argument.block_shape
    return argument
