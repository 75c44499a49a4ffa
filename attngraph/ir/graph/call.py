"""A call: its arguments by the names of its operation's schema, its overload, and what it gives.

The text of a graph omits overload names. The first overload, in a fixed order, whose schema accepts the
arguments is chosen. As in PyTorch, a number is accepted for a tensor; `default` and `Tensor` overloads come
first: `add(%0, 2.0)` is `add.Tensor`.

What a call gives is inferred by running its operation on fake tensors, so nothing is computed. Equal layers
have equal calls. For each environment of symbolic sizes, results are known by what inference depends on; a
result that follows from values is inferred each time, because its sizes are new ones.
"""

import functools
import re
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument, given by position or by name; else the schema's default, or `default` where the schema
    has no such argument."""
    place, otherwise = _parameters(node.target).get(name, (len(node.args), default))
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, otherwise)


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments by name, in the order of the schema, with its defaults."""
    return {name: argument(node, name) for name in _parameters(node.target)}


@functools.cache
def _parameters(target: Any) -> MappingProxyType[str, tuple[int, Any]]:
    """For each argument of an operation its position and its default. (Arguments that are given by name
    alone come last, behind all that a call has.)"""
    schema = getattr(target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return MappingProxyType({a.name: (place, a.default_value) for place, a in enumerate(arguments)})


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


_KNOWN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""For each environment of symbolic sizes the results of calls."""
BY_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Tags of operations whose results follow from values."""


def infer(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any = None) -> Any:
    """The fake result of an op on nodes' fake values; `mode` is used where no argument is a tensor."""
    values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    tensors = [v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, Tensor)]
    mode = getattr(tensors[0], "fake_mode", None) if tensors else mode
    if mode is None:
        return target(*values[0], **values[1])
    # Without the Python dispatcher, composite ops specialise symbolic sizes to numbers. Guards are suppressed
    # because inference after the trace must not add conditions to the trace's own.
    with mode, enable_python_dispatcher(), mode.shape_env.suppress_guards(), torch.no_grad():
        return target(*values[0], **values[1])


def infer_once(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    """As `infer`; what is known of an equal call is not inferred again. Nobody may write to the result."""
    if mode is None or mode.shape_env is None or not _is_of_sizes(target):
        return infer(target, args, kwargs, mode)
    known = _KNOWN.setdefault(mode.shape_env, {})
    try:
        call = target, described(fx.map_arg((args, kwargs), lambda n: n.meta["val"]))
        found = known.get(call)
    except (TypeError, RuntimeError, AttributeError):  # an operand without a plain layout
        return infer(target, args, kwargs, mode)
    if found is None:
        found = known[call] = infer(target, args, kwargs, mode)
    return found


@functools.lru_cache(maxsize=4096)
def _is_of_sizes(target: Any) -> bool:
    """Whether an op's result has no sizes that follow from values."""
    return not any(tag in getattr(target, "tags", ()) for tag in BY_VALUES)


def described(value: Any) -> Any:
    """A value, or operands, by types, layouts and formulas of sizes; equal for equal layers."""
    if isinstance(value, Tensor):
        layout = (tuple(map(described, value.shape)), tuple(map(described, value.stride())))
        return value.dtype, value.device, layout
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return torch.SymInt, value.node.expr  # a formula alone does not bear to be compared with a pair
    if isinstance(value, (list, tuple)):
        return tuple(map(described, value))
    if isinstance(value, dict):
        return tuple((name, described(inner)) for name, inner in value.items())
    if isinstance(value, slice):
        return slice, described((value.start, value.stop, value.step))
    return type(value), repr(value) if isinstance(value, float) else value  # zeros have signs
