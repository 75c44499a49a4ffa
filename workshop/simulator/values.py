"""What is in registers: tensors with a dtype and a distributed layout, which must agree as Gluon asks.

Numbers are computed by torch on the CPU, in the dtypes that the kernel names. Scalars are Python's numbers.
Unsigned integers of 32 bits are kept in 64.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gluon

from workshop.simulator.order import Wrong

_NAMES = {
    "int1": "bool", "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64", "uint8": "uint8",
    "float8e4nv": "float8_e4m3fn", "float8e5": "float8_e5m2", "float16": "float16", "bfloat16": "bfloat16",
    "float32": "float32", "float64": "float64",
}  # fmt: skip
_TORCH: dict[str, torch.dtype] = {
    getattr(gluon, ours).name: getattr(torch, theirs) for ours, theirs in _NAMES.items()
}
_TORCH["uint32"] = torch.int64
_GLUON = {getattr(torch, theirs): getattr(gluon, ours) for ours, theirs in _NAMES.items()}
UNSIGNED = 0xFFFFFFFF


def dtype_of(dtype: Any) -> torch.dtype:
    """Torch's for Gluon's."""
    if dtype.name not in _TORCH:
        raise Wrong(f"the simulator has no {dtype}")
    return _TORCH[dtype.name]


def gluon_dtype(dtype: torch.dtype) -> Any:
    """Gluon's for torch's."""
    return _GLUON[dtype]


def size_of(dtype: Any) -> int:
    """Bytes of an element."""
    return max(1, int(dtype.primitive_bitwidth) // 8)


def shape_of(shape: Sequence[Any]) -> list[int]:
    """As integers."""
    return [int(getattr(n, "value", n)) for n in shape]


class Value:
    """A tensor in registers; a layout of None is left open."""

    __slots__ = ("layout", "unsigned", "v")

    def __init__(self, v: Tensor, layout: Any, dtype: Any = None, unsigned: bool = False) -> None:
        self.v, self.layout = v, None if isinstance(layout, gluon.AutoLayout) else layout
        self.unsigned = unsigned or (dtype is not None and dtype.name == "uint32")

    @property
    def shape(self) -> list[int]:
        return list(self.v.shape)

    @property
    def dtype(self) -> Any:
        return gluon.uint32 if self.unsigned else gluon_dtype(self.v.dtype)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=self.layout, shape=self.shape, element_ty=self.dtype)

    def __getitem__(self, at: Any) -> Value:
        found = self
        for axis, part in enumerate(at if isinstance(at, tuple) else (at,)):
            if part is None:
                found = expand_dims(found, axis)
            elif part != slice(None):
                raise Wrong(f"a tensor's index is : or None, not {part}")
        return found

    def permute(self, *order: Any) -> Value:
        return Value(self.v.permute(*order), None, unsigned=self.unsigned)

    def reshape(self, *shape: Any) -> Value:
        return Value(self.v.reshape(*shape), None, unsigned=self.unsigned)

    def __neg__(self) -> Any:
        return apply(operator.neg, self)

    def __invert__(self) -> Any:
        return apply(operator.invert, self)

    def __bool__(self) -> bool:
        raise Wrong("a tensor of several elements decides a branch")

    __hash__ = None  # type: ignore[assignment]


def known(value: Any) -> None:
    """Complain of what cannot be computed with."""
    if not isinstance(value, Value | int | float):
        raise Wrong(f"an operation on {value}, which is neither a tensor nor a number")


def apply(function: Callable[..., Any], *given: Any) -> Any:
    """A function of elements, of tensors or numbers, whose layouts and ranks must agree."""
    layout, unsigned, ranks, raw = None, False, set(), []
    for one in given:
        if isinstance(one, Value):
            if one.layout is not None and one.layout is not layout:
                if layout is not None and one.layout != layout:
                    raise Wrong(f"layouts differ: {layout} and {one.layout}")
                layout = one.layout
            unsigned |= one.unsigned
            ranks.add(one.v.dim())
            raw.append(one.v)
        else:
            known(one)
            raw.append(one)
    if not ranks:
        return function(*map(torch.tensor, raw)).item()
    if len(ranks - {0}) > 1:
        raise Wrong(f"ranks differ: {' and '.join(str(g.shape) for g in given if isinstance(g, Value))}")
    found = function(*raw)
    if unsigned and found.dtype == torch.int64:
        return Value(found & UNSIGNED, layout, unsigned=True)
    return Value(found, layout)


def _operator(name: str, function: Callable[..., Any]) -> None:
    def forward(self: Value, other: Any) -> Any:
        return apply(function, self, other) if isinstance(other, Value | int | float) else NotImplemented

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", lambda self, other: apply(function, other, self))


for _name in (
    "add",
    "sub",
    "mul",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
):
    _operator(_name, getattr(operator, f"{_name}_" if _name in ("and", "or") else _name))
_operator("truediv", lambda a, b: torch.true_divide(torch.as_tensor(a), torch.as_tensor(b)))


def floor_divide(a: Any, b: Any) -> Any:
    """`//` of Triton, which rounds towards zero."""
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return apply(lambda x, y: torch.div(x, y, rounding_mode="trunc"), a, b)


def modulo(a: Any, b: Any) -> Any:
    """`%` of Triton, with the sign of the dividend."""
    if isinstance(a, int) and isinstance(b, int):
        return a - b * floor_divide(a, b)
    return apply(lambda x, y: torch.fmod(torch.as_tensor(x), torch.as_tensor(y)), a, b)


def convert(value: Any, dtype: Any, bitcast: bool = False) -> Any:
    """`value.to(dtype)`."""
    known(value)
    wanted, to_unsigned = dtype_of(dtype), dtype.name == "uint32"
    if not isinstance(value, Value):
        if to_unsigned:
            return Value(torch.tensor(int(value) & UNSIGNED), None, dtype)
        return torch.tensor(value).to(wanted).item()
    v = value.v.to(torch.int32) if bitcast and value.unsigned else value.v
    v = v.view(torch.int32 if to_unsigned else wanted) if bitcast else v.to(wanted)
    return Value(v.to(torch.int64) & UNSIGNED if to_unsigned else v, value.layout, dtype)


def expand_dims(value: Value, axis: int) -> Value:
    """One more dimension of size 1; the layout must be a slice of one with that dimension."""
    axis = axis + len(value.shape) + 1 if axis < 0 else axis
    layout = value.layout
    if layout is not None:
        if not isinstance(layout, gluon.SliceLayout) or layout.dim != axis:
            raise Wrong(f"dimension {axis} is added to a tensor that lies as {layout}")
        layout = layout.parent
    return Value(value.v.unsqueeze(axis), layout, unsigned=value.unsigned)


_slices: dict[tuple[int, int], tuple[Any, Any]] = {}


def slice_layout(dim: int, parent: Any) -> Any:
    """`SliceLayout`, each only once, so that equal ones are mostly the same object."""
    if (dim, id(parent)) not in _slices:
        if len(_slices) > 9999:
            _slices.clear()
        _slices[dim, id(parent)] = parent, gluon.SliceLayout(dim, parent)
    return _slices[dim, id(parent)][1]


def reduced(function: Callable[[Tensor, int], Tensor]) -> Callable[..., Any]:
    """A reduction over one dimension, or over all."""

    def reduce(value: Value, axis: Any = None, keep_dims: bool = False) -> Any:
        if axis is None or (len(value.shape) == 1 and not keep_dims):
            return function(value.v.reshape(-1), 0).item()
        layout = None if value.layout is None else slice_layout(axis, value.layout)
        result = Value(function(value.v, axis), layout, unsigned=value.unsigned)
        return expand_dims(result, axis) if keep_dims else result

    return reduce


def largest(v: Tensor, axis: int) -> Tensor:
    """As on the card, NaN is passed over."""
    found = v.amax(axis)
    if v.is_floating_point() and bool(found.isnan().any()):
        some = torch.where(v.isnan(), float("-inf"), v).amax(axis)
        found = torch.where(v.isnan().all(axis), float("nan"), some)
    return found
