"""What the forward of a module can depend on, so that two calls with equal keys do the same.

A key has what is reachable from the module and from the arguments: attributes, training flags, hooks, weights
and tensors by their layouts and by which of them are the same or share memory, everything else as
`capture/state.py` compares it; and torch's modes. What the code reads from its files is compared in
`Surroundings`. Attributes that differ between modules of a class and that a call did not read can be left out
of its key. Used by `equal_modules.py`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.code import functions_of, globals_in
from attngraph.capture.equal_calls import NotDescribed, Operands
from attngraph.capture.kinds import is_foreign
from attngraph.capture.state import LeftOut, Place, Same, Walk
from attngraph.capture.structure import flatten

_LOOK_INSIDE = frozenset({
    "__dict__", "vars", "copy", "deepcopy", "__getattribute__", "getmembers", "__reduce__", "__reduce_ex__",
    "__getstate__", "asdict",
})  # fmt: skip
"""Names by which code reads attributes unnoticed."""
_OF_GENERATED_CODE = ("__class__", "_tuple_new", "BUILTINS", "MISSING", "_HAS_DEFAULT_FACTORY", "_type_self")
"""Variables of code that Python generates, which nobody changes."""


class _ModuleWalk(Walk):
    """A walk from one module: its own submodules count by their place in it, all others by identity. What
    functions read from files is not part of it."""

    def __init__(self, module: nn.Module, left_out: LeftOut) -> None:
        super().__init__({}, left_out)
        self.own = {id(m) for m in module.modules()}

    def identity(self, module: nn.Module) -> Any:
        return self.seen[id(module)] if id(module) in self.own else Same(module)

    def visit(self, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self.found.append(Same(value))
        else:
            super().visit(value, depth)

    def function(self, function: types.FunctionType, depth: int) -> None:
        for held in (function.__dict__, function.__defaults__, function.__kwdefaults__):
            if held:
                self.visit(held, depth)
        for cell in function.__closure__ or ():
            if cell != types.CellType():
                self.visit(cell.cell_contents, depth)


@dataclasses.dataclass
class Call(Operands):
    """One call of a module. `key`: all that it follows from, but for the code's surroundings; `tensors`:
    those among the arguments, and then the module's weights."""

    key: Any = None

    @staticmethod
    def of(module: nn.Module, args: Any, kwargs: Any, mode: Any, left_out: LeftOut) -> Call | None:
        """None where something is met that a key cannot describe."""
        with torch._C.DisableTorchFunction():
            return Call._of(module, args, kwargs, mode, left_out)

    @staticmethod
    def _of(module: nn.Module, args: Any, kwargs: Any, mode: Any, left_out: LeftOut) -> Call | None:
        call = Call(mode, [])
        walk = _ModuleWalk(module, left_out)
        leaves, tree = flatten((args, kwargs))
        told: list[Any] = []
        try:
            for leaf in leaves:
                if isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
                    told.append(call.described(leaf))
                else:
                    walk.visit(leaf, 0)
            for weight in weights_of(module):
                told.append((type(weight), call.tensor(weight)))
        except NotDescribed:
            return None
        walk.at = Place(module, "")
        walk.visit(module, 0)
        call.key = type(module), tree, tuple(told), call.sharing(), tuple(walk.found), _modes()
        return call


def weights_of(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module and its submodules, in order; shared ones more than once."""
    found = (t for m in module.modules() for table in (m._parameters, m._buffers) for t in table.values())
    return [t for t in found if t is not None]


def _modes() -> Any:
    """The state of torch that operations depend on."""
    autocast = tuple(
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    stack: Any = torch.overrides._get_current_function_mode_stack
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_cache_enabled(), autocast, tuple(map(Same, stack())),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


class Surroundings:
    """What code reads besides its arguments and the objects that it is given: global variables of its files,
    and what its functions close over.

    Attributes:
        unknown: code of which not all could be found, if there is some.
        looks_inside: whether the code may read attributes unnoticed.
    """

    def __init__(self, codes: Sequence[types.CodeType], module: nn.Module) -> None:
        names = {name for code in codes for name in code.co_names}
        self.looks_inside = any(
            name in _LOOK_INSIDE and name != code.co_name for code in codes for name in code.co_names
        )
        self.unknown = ""
        self._fixed: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._open: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self._functions: list[types.FunctionType] = []
        modules = _modules_of({code.co_filename for code in codes})
        for code in codes:
            space = modules.get(code.co_filename)
            if space is None:
                self._doubt(code, not {*globals_in(code)} <= {*_OF_GENERATED_CODE})
                continue
            for name in globals_in(code):
                if name in space:
                    self._add(space, name, names)
        self._add_closures(codes, modules, module)

    def _add(self, space: dict[str, Any], name: str, names: Collection[str]) -> None:
        place, value = (id(space), name), space[name]
        if place in self._fixed or place in self._open:
            return
        if not _is_fixed(value):
            self._open[place] = space, name
            return
        self._fixed[place] = space, name, value
        if isinstance(value, types.ModuleType) and not is_foreign(value.__name__):
            for inner in names & vars(value).keys():
                self._add(vars(value), inner, names)

    def _add_closures(
        self, codes: Sequence[types.CodeType], modules: dict[str, dict[str, Any]], module: nn.Module
    ) -> None:
        """Find the functions of code that closes over variables. Those that another function made meanwhile
        follow from that one."""
        closed = {id(code) for code in codes if code.co_freevars}
        made_here = {code.co_qualname for code in codes}
        if not closed:
            return
        kinds = {k for m in module.modules() for k in type(m).__mro__ if not is_foreign(k.__module__)}
        spaces = [*map(vars, kinds), *(modules[f] for f in {c.co_filename for c in codes} if f in modules)]
        values = [value for space in spaces for value in space.values() if not isinstance(value, type)]
        hooks = [
            h for m in module.modules() for t in (m._forward_hooks, m._forward_pre_hooks) for h in t.values()
        ]
        for value in [*values, *hooks]:
            for function in functions_of(value):
                if id(function.__code__) in closed:
                    self._functions.append(function)
        found = {id(f.__code__) for f in self._functions}
        for code in codes:
            outer = code.co_qualname.rpartition(".<locals>")[0]
            closes_over = [name for name in code.co_freevars if name not in _OF_GENERATED_CODE]
            is_found = id(code) in found or outer in made_here
            self._doubt(code, bool(closes_over) and not is_found)

    def _doubt(self, code: types.CodeType, is_unknown: bool) -> None:
        if is_unknown and not self.unknown:
            self.unknown = f"{code.co_qualname} in {os.path.basename(code.co_filename)}"

    def now(self) -> Any:
        """What it is at the moment: two results are equal if nothing has changed. None if it is not known."""
        if self.unknown or any(space.get(name) is not value for space, name, value in self._fixed.values()):
            return None
        walk = _ModuleWalk(nn.Module(), frozenset())
        for space, name in self._open.values():
            walk.at = Place(None, name)
            walk.visit(space.get(name), 0)
        for function in self._functions:
            walk.visit(function, 0)
        return tuple(walk.found)


def _is_fixed(value: Any) -> bool:
    """Whether only another value under its name would be a change."""
    if isinstance(value, types.FunctionType):
        return not value.__dict__
    if isinstance(value, type):
        return is_foreign(value.__module__)
    return isinstance(value, (types.ModuleType, types.BuiltinFunctionType, types.NoneType, bool))


_FILES: dict[str, str] = {}
"""The names of modules, by the files that they were loaded from."""


def _modules_of(files: Collection[str]) -> dict[str, dict[str, Any]]:
    """The variables of the modules that were loaded from these files."""
    wanted = {file for file in files if file not in _FILES and not file.startswith("<")}
    if wanted:
        for name, module in tuple(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if path in wanted:
                _FILES.setdefault(path, name)
    modules = {file: sys.modules.get(_FILES.get(file, "")) for file in files}
    return {f: vars(m) for f, m in modules.items() if m is not None and getattr(m, "__file__", None) == f}
