"""What a name on a command line stands for: `package.module:NAME` or `path/file.py:NAME`; lists of passes."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from attngraph.api.options import as_pass
from attngraph.cli.terminal import TargetError, told
from attngraph.errors import meant
from attngraph.ir.graph.literals import split
from attngraph.passes import pass_named
from attngraph.passes.select_kernels import SelectKernels
from attngraph.pipeline import Pass, placed


def object_named(name: str) -> Any:
    """What `package.module:NAME` or `path/file.py:NAME` names.

    Raises:
        TargetError: the module cannot be imported, or has no such name.
    """
    module_name, _, attribute = name.rpartition(":")
    module = _file(Path(module_name)) if module_name.endswith(".py") else _module(module_name)
    found = getattr(module, attribute, None)
    if found is None:
        own = [n for n, v in vars(module).items() if n[0] != "_" and _is_of(v, module)]
        raise TargetError(f"{module_name} has no {attribute!r}; {meant(attribute, own)}")
    return found


def _module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as problem:
        raise TargetError(f"cannot import {name}: {told(problem)}") from problem


def _file(path: Path) -> ModuleType:
    """A file as a module, with what lies beside it to be imported, as if it were run."""
    if not path.is_file():
        raise TargetError(f"there is no file {path}.")
    sys.path.insert(0, str(path.resolve().parent))
    name = f"{path.stem} (a file)"  # no module that can be imported has this name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise TargetError(f"cannot run {path}: {told(problem)}") from problem
    return module


def _is_of(value: Any, module: ModuleType) -> bool:
    return (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__


def passes_named(text: str, option: str) -> list[Pass]:
    """The passes of a list such as `merge-heads,mine.py:DropOnes(least=2)`.

    Raises:
        TargetError: there is no such pass, or it has no such option.
    """
    try:
        parts = split(text)
        names = [name for name in (part.partition("(")[0].strip() for part in parts) if ":" in name]
        own = {name: object_named(name) for name in names}
        return [as_pass(pass_named(part, own)) for part in parts]
    except (TypeError, ValueError) as problem:
        raise TargetError(f"{option} {text}: {problem}") from problem


def changed_by(added: Sequence[str]) -> Callable[[tuple[Pass, ...]], tuple[Pass, ...]] | None:
    """The function that puts passes such as `mine.py:DropOnes@merge-heads` into an order; None without any.

    Raises:
        TargetError: there is no such pass.
    """
    parts = [text.rpartition("@") if "@" in text else (text, "@", SelectKernels.name) for text in added]
    steps = [(passes_named(text, "--add")[0], before.strip()) for text, _, before in parts]

    def change(order: tuple[Pass, ...]) -> tuple[Pass, ...]:
        for step, before in steps:
            order = placed(order, step, before)
        return order

    return change if steps else None
