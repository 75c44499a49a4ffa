"""The code that traces ran, described by content: functions by their names, with what the global names in
them stand for.

`ran.py` records which code ran. Whether it is the same in another process follows from its own
digest, and from what its names hold there (`content.py`).
"""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Collection, Iterable
from typing import Any

from attngraph.capture.state.code import digest, functions_of, globals_in, nested
from attngraph.capture.state.content import Content
from attngraph.capture.state.kinds import is_foreign

Code = list[tuple[str, str]]
"""Functions by name, and for each a digest of what it does and of what the global names in it stand for."""


def code_behind(codes: Iterable[types.CodeType], state: Content) -> tuple[Code, list[str]]:
    """The functions that traces ran, by their names (`package.module:Class.method`); those without one of
    their own by where they were met (`=model.activation`). Second: what cannot be found again."""
    codes = list(codes)
    modules = _modules_of({code.co_filename for code in codes})
    found: dict[str, str] = {}
    about = Content()
    waiting: list[types.CodeType] = []
    for code in codes:
        module_name = modules.get(os.path.realpath(code.co_filename), "__main__")
        name = f"{module_name}:{code.co_qualname.split('.<locals>')[0]}"
        if id(code) not in about.codes or name not in found:
            waiting += [code] * (not _describe(name, code, found, state, about))
    lost = []
    for code in waiting:
        met = state.codes.get(id(code)) or about.codes.get(id(code))
        if met is None or not _describe(f"={met}", code, found, state, about):
            lost.append(f"the function {code.co_qualname} in {os.path.basename(code.co_filename)}")
    return list(found.items()), lost + about.doubts


def _modules_of(files: Collection[str]) -> dict[str, str]:
    """The names of the modules that were loaded from these files, by their real paths. Thousands of modules
    are loaded, so only those of files with such names are looked at."""
    names = {os.path.basename(path) for file in files for path in (file, os.path.realpath(file))}
    found: dict[str, str] = {}
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.rpartition(os.sep)[2] in names:
            found.setdefault(os.path.realpath(file), name)
    return found


def _describe(
    name: str, code: types.CodeType, found: dict[str, str], state: Content, about: Content
) -> bool:  # fmt: skip
    """Describe the function of this name, if it contains the code."""
    functions = _functions_named(name, state, about)
    if not any(code is part for f in functions for part in nested(f.__code__)):
        return False
    if name not in found:
        found[name] = described(name, state, about) or ""
    return True


def described(name: str, state: Content, about: Content) -> str | None:
    """What the function of this name does, and what the global names in it stand for; None if there is none.

    Args:
        state: the described state. about: gets the functions that are met, and what cannot be described.
    """
    functions = _functions_named(name, state, about)
    if not functions:
        return None
    own = about.beside()
    for number, function in enumerate(functions):
        own.visit(f"{name}.{number}", function)
        of_globals, names = _names_in(function)
        for global_name in of_globals:
            if global_name in function.__globals__:
                _bound(own, global_name, function.__globals__[global_name], names)
            elif global_name in sys.modules:  # imported by the function itself
                _bound(own, global_name, sys.modules[global_name], names)
        if {"environ", "getenv"} & names.keys():
            _environment(own, function)
    for met, function in own.functions.items():
        about.meet(met, function)
    about.doubts += [f"{name}: {d}" for d in own.doubts]
    return digest("\n".join(f"{path} {text}" for path, text in own.lines.items()))


def _names_in(function: types.FunctionType) -> tuple[dict[str, None], dict[str, None]]:
    """The names that a function may look up, in its code or as a text (`getattr(module, "name")`): those that
    may be globals, and all."""
    of_globals, all_names = dict[str, None](), dict[str, None]()
    for code in nested(function.__code__):
        texts = dict.fromkeys(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
        of_globals |= dict.fromkeys(globals_in(code)) | texts
        all_names |= dict.fromkeys(code.co_names) | texts
    return of_globals, all_names


def _functions_named(name: str, state: Content, about: Content) -> list[types.FunctionType]:
    if name.startswith("="):
        met = state.functions.get(name[1:]) or about.functions.get(name[1:])
        return [] if met is None else [met]
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        if isinstance(value, type):
            value = next((vars(k)[part] for k in value.__mro__ if part in vars(k)), None)
        else:
            value = getattr(value, "__dict__", {}).get(part)
    return functions_of(value)


def _environment(own: Content, function: types.FunctionType) -> None:
    """The variables of the environment that a function names."""
    texts = {c for code in nested(function.__code__) for c in code.co_consts if isinstance(c, str)}
    variables = sorted(text for text in texts if re.fullmatch(r"[A-Z][A-Z0-9_]+", text))
    for name in variables:
        own.put(f"environment {name}", repr(os.environ.get(name)))
    if not variables:
        own.doubt("environment", os.environ)


def _bound(
    own: Content, name: str, value: Any, names: Iterable[str], around: frozenset[int] = frozenset()
) -> None:  # fmt: skip
    """What a global name stands for; of a module what it has under the names that the code uses."""
    own.visit(name, value)
    if not isinstance(value, types.ModuleType) or id(value) in around:
        return
    foreign = is_foreign(value.__name__)
    for inner in names:
        found = vars(value).get(inner)
        if isinstance(found, types.ModuleType):
            if not foreign:
                _bound(own, f"{name}.{inner}", found, names, around | {id(value)})
        elif found is not None and (not foreign or callable(found) or isinstance(found, (int, float, str))):
            before = len(own.doubts)
            own.visit(f"{name}.{inner}", found)
            if foreign:
                del own.doubts[before:]
