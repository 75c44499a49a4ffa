"""The visitor that describes state by its content: the same in another process.

Every part has a path (`model.h.0.attn.scale`, `package.module.SCALE`) and a short text, so that a difference
has a name. What cannot be described is named in `doubts`: a graph that may depend on it is not taken up again
unasked.
"""

import enum
import hashlib
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.state.kinds import BY_VALUE, TOOLS, is_known, module_of
from attngraph.capture.state.scope import EVERYTHING, Ran, Scope, Space, functions_of, nested
from attngraph.capture.state.walk import Walk

_LINE = 100
"""Longer texts are written as digests."""
_BYTES = 1 << 26
"""Contents of larger tensors are not described."""
_known: dict[int, tuple[types.CodeType, str]] = {}
"""The digests of code, by its identity."""


class Content(Walk):
    """What is reachable from some values, and what code of the scope can read.

    Attributes:
        lines: a text for each path. doubts: what could not be described.
        objects: modules, objects and tensors by path. functions: those that were met.
    """

    def __init__(self, scope: Scope = EVERYTHING) -> None:
        super().__init__(scope)
        self.lines: dict[str, str] = {}
        self.objects: dict[str, Any] = {}
        self.doubts: list[str] = []
        self.functions: dict[str, types.FunctionType] = {}
        self.path = ""
        self._paths: dict[int, str] = {}
        self._held: list[Any] = []

    def of(self, path: str, value: Any) -> None:
        """Describe a value, under this path."""
        self.path = path
        self.start(value)

    def paths(self) -> dict[int, str]:
        return {id(value): path for path, value in self.objects.items()}

    def visit(self, value: Any, depth: int) -> None:
        if id(value) not in self.seen and not isinstance(value, BY_VALUE):
            self._paths.setdefault(id(value), self.path)
            self._held.append(value)  # its identity stays its own
        super().visit(value, depth)

    def child(self, step: str, value: Any, depth: int) -> None:
        around = self.path
        self.path = f"{around}{'' if step.startswith('[') else '.'}{step}" if step else around
        may_pass = type(value) is int and abs(value) > 1 << 32
        if may_pass and _is_identity_of(self.at.owner, value):
            self.put("its own identity, which differs between processes")
        else:
            self.visit(value, depth)
        self.path = around

    def put(self, text: str) -> None:
        self.lines[self.path] = text if len(text) <= _LINE else f"{text[:24]}... {_digest(text)}"

    def doubt(self, value: Any) -> None:
        self.put(f"a {_name(type(value))}")
        self.doubts.append(f"{self.path}, a {type(value).__name__}")

    # --- where paths begin anew ---

    def kind(self, kind: type, depth: int) -> None:
        if id(kind) in self._paths and self._paths[id(kind)] == self.path:
            self.put(f"class {_name(kind)}")
        super().kind(kind, depth)

    def members(self, owner: type) -> Iterator[tuple[str, Any]]:
        around, self.path = self.path, _name(owner)
        for name, value in super().members(owner):
            functions = functions_of(value)
            ran = any(id(f.__code__) in self.codes for f in functions) or is_known(module_of(owner))
            if functions and not ran:
                for number, function in enumerate(functions):
                    self.functions.setdefault(f"{self.path}.{name}.{number}", function)
            else:
                yield name, value
        self.path = around

    def variables(self, space: Space, names: Iterable[str]) -> None:
        self.path = space.name
        super().variables(space, sorted(names))

    def file(self, module: types.ModuleType, depth: int) -> None:
        self.put(f"module {module.__name__} {getattr(module, '__version__', '')}")
        around, self.path = self.path, module.__name__
        super().file(module, depth)
        self.path = around

    def environment(self, names: Iterable[str]) -> None:
        self.path = "environment"
        super().environment(names)

    # --- what is noted ---

    def plain(self, value: Any) -> None:
        self.put(f"{type(value).__name__} {value!r}")

    def tensor(self, value: Tensor) -> None:
        """A tensor that is not a weight: by its contents too."""
        if id(value) in self.seen:
            self.again(value)
            return
        self.seen[id(value)] = len(self.seen)
        self.objects[self.path] = value
        about = f"tensor {value.dtype} {tuple(value.shape)} {value.device} {value.requires_grad}"
        if type(value) not in (Tensor, nn.Parameter) or value.is_meta or value.nbytes > _BYTES:
            self.doubt(value)
        else:
            self.put(f"{about} {self._layout(value)}{tensor_digest(value)}")

    def _layout(self, tensor: Tensor) -> str:
        return f"{tensor.stride()} {tensor.storage_offset()} " if self.scope.layouts else ""

    def head(self, module: nn.Module) -> None:
        self.objects[self.path] = module
        self.put(f"{_name(type(module))} {'training' if module.training else 'eval'}")

    def weight(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        around, self.path = self.path, f"{self.path}.{name}"
        kind = "buffer" if name in module._buffers else "parameter"
        if tensor is None:
            self.put(f"no {kind}")
        else:
            known = self._paths.setdefault(id(tensor), self.path)
            self.seen.setdefault(id(tensor), len(self.seen))
            same = "" if known == self.path else f", same as {known}"
            wants = " wants" * (kind == "buffer" and tensor.requires_grad)
            shape = tuple(tensor.shape)
            self.put(f"{kind} {tensor.dtype} {shape} {tensor.device} {self._layout(tensor)}{wants}{same}")
            if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                self.doubt(tensor)
        self.path = around

    def opened(self, value: Any) -> None:
        self.objects[self.path] = value
        self.put(_name(type(value)))

    def function(self, function: types.FunctionType, depth: int) -> None:
        self.functions.setdefault(self.path, function)
        text = f"function {function.__module__}.{function.__qualname__}"
        ran = id(function.__code__) in self.codes
        self.put(f"{text} with the code {_code_digest(function.__code__)[:16]}" if ran else text)
        super().function(function, depth)

    def same(self, value: Any) -> None:
        if isinstance(value, (type, types.FunctionType, types.ModuleType)) or self.path in self.lines:
            return
        named = f"{getattr(value, '__module__', '')} {getattr(value, '__qualname__', '')}".strip()
        text = repr(value)
        self.put(f"{type(value).__name__} {named or ('' if ' at 0x' in text else text)}")

    def mute(self, value: Any) -> None:
        self.put(type(value).__name__)

    def valued(self, value: Any) -> None:
        text = f"{_name(type(value))}.{value.name}" if isinstance(value, enum.Enum) else repr(value)
        if " at 0x" in text and not _is_of_a_tool(value):
            self.doubt(value)
        else:
            self.put(f"{_name(type(value))} {getattr(value, '__qualname__', text)}")

    def buffer(self, value: Any) -> None:
        view = memoryview(value)
        self.put(f"{_name(type(value))} {view.shape} {hashlib.sha256(view.tobytes()).hexdigest()[:32]}")

    def length(self, value: Any, entries: int) -> None:
        self.put(f"{type(value).__name__} of {entries}")

    def members_of_set(self, value: Any) -> None:
        inner = Content()
        for number, entry in enumerate(value):
            inner.of(str(number), entry)
        self.doubts += [f"{self.path}, {d}" for d in inner.doubts]
        texts = (inner.lines[str(number)] for number in range(len(value)))
        self.put(f"{type(value).__name__} {sorted(texts)}")

    def again(self, value: Any) -> None:
        if not isinstance(value, (type, types.ModuleType, types.FunctionType)):
            self.put(f"same as {self._paths[id(value)]}")
        elif not isinstance(value, types.FunctionType):
            self.put(f"{'class' if isinstance(value, type) else 'module'} {value.__name__}")

    def hidden(self, value: Any, why: str) -> None:
        if self.scope.reads(self.at.name):
            self.doubt(value)
        else:
            self.put(f"a {_name(type(value))}")


# --- code: what has an equal digest does the same, on the same lines of its file, wherever that is ---


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _code_digest(code: types.CodeType) -> str:
    """The same in every process for the same source, version of Python and place in its file."""
    known = _known.get(id(code))
    if known is None or known[0] is not code:
        parts = (
            code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
            code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags,
            code.co_qualname, code.co_firstlineno, code.co_linetable.hex(), code.co_exceptiontable.hex(),
            [_constant(c) for c in code.co_consts],
        )  # fmt: skip
        known = _known[id(code)] = code, _digest(repr(parts))
    return known[1]


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _code_digest(value)
    if isinstance(value, frozenset):  # its order differs between processes
        return f"frozenset {sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return f"{type(value).__name__} {value!r}"


# --- the code that ran, by name ---


def names_of(
    codes: Iterable[types.CodeType], describe: Callable[[Scope], Content]
) -> tuple[list[str], list[str]]:
    """The functions that traces ran, by their names (`package.module:Class.method`); those without one of
    their own by where they are met (`=model.activation`). Second: what cannot be found again."""
    codes = list(codes)
    modules = _modules_of({code.co_filename for code in codes})
    found: dict[str, None] = {}
    waiting: list[types.CodeType] = []
    for code in codes:
        module_name = modules.get(os.path.realpath(code.co_filename), "__main__")
        name = f"{module_name}:{code.co_qualname.split('.<locals>')[0]}"
        if any(code is part for f in _functions_named(name) for part in nested(f.__code__)):
            found[name] = None
        else:
            waiting.append(code)
    left = len(waiting) + 1
    while 0 < len(waiting) < left:
        left, met = len(waiting), describe(ran_of(list(found), describe).scope()).functions
        places = {id(part): path for path, f in reversed(met.items()) for part in nested(f.__code__)}
        found |= {f"={places[id(code)]}": None for code in waiting if id(code) in places}
        waiting = [code for code in waiting if id(code) not in places]
    lost = [f"the function {code.co_qualname} in {os.path.basename(code.co_filename)}" for code in waiting]
    return list(found), lost


def ran_of(names: Sequence[str], describe: Callable[[Scope], Content] | None) -> Ran:
    """The code of the functions of these names. `describe`: the state in a scope, where functions are met
    that have no name of their own."""
    ran = Ran()
    functions = [function for name in names for function in _functions_named(name)]
    waiting = [name[1:] for name in names if name.startswith("=")]
    while True:
        for function in functions:
            for code in nested(function.__code__):
                ran.add(code, function.__globals__)
        met = describe(ran.scope()).functions if waiting and describe is not None else {}
        functions = [met[path] for path in waiting if path in met]
        waiting = [path for path in waiting if path not in met]
        if not functions:
            return ran


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


def _functions_named(name: str) -> list[types.FunctionType]:
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        if isinstance(value, type):
            value = next((vars(k)[part] for k in value.__mro__ if part in vars(k)), None)
        else:
            value = getattr(value, "__dict__", {}).get(part)
    return functions_of(value)


def _is_of_a_tool(value: Any) -> bool:
    """Whether an object is what a package that torch works with has under the object's own name. What it does
    then follows from the package's version."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not isinstance(module, str) or module.partition(".")[0] not in TOOLS or not isinstance(name, str):
        return False
    return getattr(sys.modules.get(module), name, None) is value


def _is_identity_of(owner: Any, number: int) -> bool:
    """Whether a number is the identity of its owner, or its hash: torch notes the former on its wrappers."""
    try:
        is_file = isinstance(owner, (Space, types.ModuleType))
        return not is_file and number in (id(owner), hash(owner))
    except TypeError:
        return False


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def tensor_digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    about = f"{tensor.dtype} {tuple(tensor.shape)}"
    content = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return hashlib.sha256(about.encode() + content).hexdigest()[:32]
