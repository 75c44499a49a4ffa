"""Resolves the overload of a call that names none, so that the text of a graph can omit overload names.

The first overload, in a fixed order, whose schema accepts the arguments is chosen. As in PyTorch, a number is
accepted for a tensor; `default` and `Tensor` overloads come first: `add(%0, 2.0)` is `add.Tensor`.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

_FIRST = ("default", "Tensor", "self", "int", "dim", "dim_IntList", "start")


def kind_of(value: Any) -> Any:
    """The kind of an argument, for `implied`: "tensor", "int", "dtype", ..., or a tuple for a list."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, (list, tuple)):
        return tuple(dict.fromkeys(kind_of(v) for v in value))
    for name, types in (
        ("tensor", Tensor), ("bool", (bool, torch.SymBool)), ("int", (int, torch.SymInt)),
        ("float", (float, torch.SymFloat)), ("str", str), ("device", torch.device),
        ("dtype", (torch.dtype, torch.memory_format, torch.layout)),
    ):  # fmt: skip
        if isinstance(value, types):  # type: ignore[arg-type]
            return name
    return "none" if value is None else "other"


def implied(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first overload of an op's packet that accepts these arguments, or None."""
    kinds = tuple(kind_of(a) for a in args)
    return _implied(packet, kinds, tuple(sorted((k, kind_of(v)) for k, v in kwargs.items())))


@functools.lru_cache(maxsize=4096)
def _implied(packet: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Any:
    for overload in _ordered(packet):
        if _fits(overload._schema, args, dict(kwargs)):
            return overload
    return None


@functools.lru_cache(maxsize=1024)
def _ordered(packet: Any) -> tuple[Any, ...]:
    names = [n for n in packet.overloads() if not n.endswith("out")]
    names.sort(key=lambda n: (_FIRST.index(n) if n in _FIRST else len(_FIRST), n))
    found = [getattr(packet, name) for name in names]
    return tuple(o for o in found if isinstance(o, torch._ops.OpOverload))


def _fits(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = dict(kwargs)
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    if len(args) > len(positional):
        return False
    for name, kind in zip(positional, args, strict=False):
        if name in given:
            return False
        given[name] = kind
    for argument in schema.arguments:
        if argument.name not in given:
            if not argument.has_default_value():
                return False
        elif not _is_of(str(argument.type), given.pop(argument.name)):
            return False
    return not given


def _is_of(wanted: str, kind: Any) -> bool:
    found = re.fullmatch(r"(Optional|List)\[(.*)\]", wanted)
    if found and found[1] == "Optional":
        return kind == "none" or _is_of(found[2], kind)
    if found:
        return isinstance(kind, tuple) and all(_is_of(found[2], k) for k in kind)
    fitting: dict[str, tuple[str, ...]] = {
        "Tensor": ("tensor", "int", "float", "bool"), "number": ("int", "float", "bool"),
        "int": ("int", "dtype"), "SymInt": ("int",), "float": ("float", "int"), "bool": ("bool",),
        "str": ("str",), "Device": ("device",),
    }  # fmt: skip
    return kind in fitting.get(wanted, ())
