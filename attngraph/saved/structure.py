"""The structure of a call's results as JSON: containers, classes of results, sizes and fixed values.

A class is looked up by its name among the modules that are loaded; nothing is imported. Only classes that are
made of their parts alone are accepted: those registered with torch's pytrees, and plain objects.
"""

import collections
import enum
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attngraph.capture.captured import Structure
from attngraph.errors import SavedError
from attngraph.ir.graph.formula import size_of, size_text
from attngraph.ir.records import dtype_of

_LEAF = pytree.tree_flatten(0)[1]
_PLAIN = (str, int, float, bool, type(None))


def write_structure(structure: Structure, names: Mapping[str, str]) -> dict[str, Any]:
    """The structure as a JSON value. `names`: of sizes in the file by those in the structure. SavedError
    where something in it has no form in a file."""
    leaves = [
        [kind, size_text(value, names) if kind == "size" else _value(value)]
        for kind, value in structure.leaves
    ]
    found = {"tree": _tree(structure.tree), "leaves": leaves}
    if read_structure(found, {}).tree != structure.tree:
        raise SavedError(f"results of the structure {structure.tree} have no form in a file")
    return found


def read_structure(found: Mapping[str, Any], names: Mapping[str, str]) -> Structure:
    """The structure that `write_structure` wrote. SavedError where a class of the results is not loaded;
    ValueError, KeyError or TypeError where it is no structure."""
    leaves = tuple(
        (kind, size_of(value, names) if kind == "size" else _made(value)) for kind, value in found["leaves"]
    )
    return Structure(_spec(found["tree"]), leaves)


def _tree(spec: Any) -> Any:
    if spec.is_leaf():
        return None
    return {
        "type": _class_name(spec.type), "context": _value(spec.context),
        "children": [_tree(child) for child in spec.children()],
    }  # fmt: skip


def _spec(found: Any) -> Any:
    if found is None:
        return _LEAF
    kind = _class(found["type"])
    if kind not in pytree.SUPPORTED_NODES:
        raise SavedError(f"results of the class {kind.__qualname__} cannot be made from their parts")
    context = _made(found["context"])
    if kind is collections.namedtuple and not (isinstance(context, type) and issubclass(context, tuple)):
        raise SavedError(f"{context!r:.80} is no named tuple")
    if kind is collections.defaultdict:
        raise SavedError("a defaultdict among results cannot be made from its parts")
    return pytree.TreeSpec(kind, context, [_spec(child) for child in found["children"]])


def _value(value: Any) -> Any:
    """A fixed value, or what a container is besides its parts."""
    if isinstance(value, enum.Enum):
        return {"enum": _class_name(type(value)), "name": value.name}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        return [_value(v) for v in value]
    for name, (kind, written, _) in _KINDS.items():
        if isinstance(value, kind):
            return {name: written(value)}
    raise SavedError(f"a {type(value).__name__} in a result has no form in a file")


def _made(found: Any) -> Any:
    if isinstance(found, _PLAIN):
        return found
    if isinstance(found, list):
        return [_made(v) for v in found]
    ((kind, value), *more) = found.items()
    if kind == "enum":
        members: Any = _class(value)
        if not issubclass(members, enum.Enum):
            raise ValueError(f"{value} is no enumeration")
        return members[more[0][1]]
    if kind not in _KINDS:
        raise ValueError(f"{kind!r} is no kind of value")
    return _KINDS[kind][2](value)


_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, lambda v: [_value(part) for part in v], lambda v: tuple(_made(part) for part in v)),
    "class": (type, lambda v: _class_name(v), lambda v: _class(v)),
    "dtype": (torch.dtype, str, dtype_of),
    "device": (torch.device, str, torch.device),
}
"""Values that are no plain ones, by the names of their kinds: how they are written and read."""


def _class_name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class(name) is not kind:
        raise SavedError(
            f"results of the class {kind.__qualname__} cannot be made: it has no name of its own"
        )
    return name


def _class(name: str) -> type:
    """A loaded class that is made of its parts alone; SavedError where there is none."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = None if found is None else vars(found).get(part)
    if not isinstance(found, type):
        raise SavedError(f"the class {path} of its results is not loaded; import {module} first")
    root = found.__module__.partition(".")[0]
    named_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
    of_python = root in ({"torch", *sys.stdlib_module_names} - {"__main__"}) and not named_tuple
    known = found in pytree.SUPPORTED_NODES or issubclass(found, enum.Enum)
    if not known and (hasattr(found, "__del__") or of_python):
        raise SavedError(f"results of the class {path} cannot be made from their parts")
    return found
