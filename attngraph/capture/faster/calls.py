"""Within one trace, operations on operands of equal sizes are inferred once.

What a traced operation gives (shapes, dtypes, and whose memory) follows from the same of its operands and
from its other arguments. Torch infers it anew for each operation, by Python code that compares symbolic
sizes: most of a trace's time, and equal layers have equal operations. Here a result is described by what it
follows from, and where that is equal, a result is made from the description. An operation that writes to an
operand, or whose result depends on values, is left to torch. Used by `faster/__init__.py`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from attngraph.capture.faster.formulas import follows_from_sizes
from attngraph.capture.instead import instead

_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_SYMBOLIC = frozenset({torch.SymInt, torch.SymFloat, torch.SymBool})
BY_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Tags of operations whose results follow from values."""


def equal_calls_inferred_once() -> contextlib.AbstractContextManager[None]:
    """Let torch's inference of results look up what is known already."""
    return instead((FakeTensorMode, "dispatch", _looking_up))


def _looking_up(infer: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, _Result | None] = {}

    def dispatched(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, env = kwargs or {}, mode.shape_env
        # Else the result may follow from something else, or torch notes no conditions on sizes.
        follows = env is not None and _is_inferred(op) and not mode.in_kernel_invocation
        call = Call.of(mode, args, kwargs) if follows and not env._suppress_guards_tls() else None
        if call is None:
            return infer(mode, op, types, args, kwargs)
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
        key = mode, op, call.key, state
        found = known.get(key)
        if found is not None:
            return found.made(call)
        result = infer(mode, op, types, args, kwargs)
        if key not in known:
            known[key] = _Result.of(call, result)
        return result

    return dispatched


class NotDescribed(Exception):
    """A value of another kind than those that are described."""


@dataclasses.dataclass
class Call:
    """What a call of an operation or of a function is given, described by what its result can follow from.
    `key`: all of that. `tensors`: those among it."""

    mode: Any
    tensors: list[Any] = dataclasses.field(default_factory=list)
    key: Any = None

    @staticmethod
    def of(mode: Any, args: Any, kwargs: Any) -> "Call | None":
        """None where something is met that a key cannot describe."""
        call = Call(mode)
        try:
            told = call.described(args), tuple([(name, call.described(v)) for name, v in kwargs.items()])
        except NotDescribed:
            return None
        call.key = told, call.sharing()
        return call

    def described(self, value: Any) -> Any:
        """A number, a size, a tensor without data, or a container of these.

        Raises:
            NotDescribed: it is something else.
        """
        kind = type(value)
        if kind is FakeTensor:
            return self.tensor(value)
        if kind in _PLAIN:
            return kind, value
        if kind is float:
            return kind, repr(value)
        if kind in _SYMBOLIC:
            return _size(value)
        if isinstance(value, (list, tuple)):
            return tuple([self.described(v) for v in value])
        if kind is slice:
            return kind, *(self.described(n) for n in (value.start, value.stop, value.step))
        if value is Ellipsis:
            return value
        raise NotDescribed

    def tensor(self, tensor: Any) -> Any:
        """A tensor, by its layout.

        Raises:
            NotDescribed: it has more than a layout, as one that wraps others has.
        """
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self.mode or not _is_plain(tensor):
            raise NotDescribed
        self.tensors.append(tensor)
        return tensor.dtype, tensor.device, tensor.requires_grad, *_layout(tensor)

    def sharing(self) -> Any:
        """Which tensors are the same, and which share their memory."""
        if len(self.tensors) < 2:
            return ()
        first: dict[tuple[bool, int], int] = {}
        each = ((t, n) for t in self.tensors for n in ((True, id(t)), (False, memory_of(t))))
        return tuple(first.setdefault(n, place) for place, (_, n) in enumerate(each))

    def number(self, tensor: Any) -> int | None:
        """The number of the tensor that is this very one."""
        return next((n for n, t in enumerate(self.tensors) if t is tensor), None)

    def number_of_memory(self, tensor: Any) -> int | None:
        """The number of a tensor that has its memory where this one has it."""
        memory = memory_of(tensor)
        return next((n for n, t in enumerate(self.tensors) if memory_of(t) == memory), None)


@functools.cache
def _is_inferred(op: Any) -> bool:
    """Whether an operation gives tensors that follow from the sizes of others, and does nothing else."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims"):
        return False
    gives_tensors = all(str(result.type) in ("Tensor", "List[Tensor]") for result in op._schema.returns)
    return gives_tensors and not op._schema.is_mutable and not any(tag in op.tags for tag in BY_VALUES)


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor without data is described by its layout: it has no known value either, but for one
    that has no elements."""
    turned = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    is_known = tensor.constant is not None and 0 not in tensor.constant.shape
    return not is_known and tensor.layout is torch.strided and not turned


def _layout(tensor: Any) -> tuple[Any, ...]:
    sizes, strides = tuple([_size(n) for n in tensor.shape]), tuple([_size(n) for n in tensor.stride()])
    return sizes, strides, _size(tensor.storage_offset())


def _size(value: Any) -> Any:
    """A size as a number or a formula."""
    if type(value) is int:
        return value
    formula = value.node.expr
    if not follows_from_sizes(formula):
        raise NotDescribed
    return type(value), formula


@contextlib.contextmanager
def within_kernels(mode: Any) -> Iterator[None]:
    """Let operations in the body be those of kernels on tensors without data: nothing records them, and no
    conditions on sizes are noted."""
    with in_kernel_invocation_manager(mode), mode.shape_env.suppress_guards():
        yield


def memory_of(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclasses.dataclass
class Made:
    """One tensor of a result. `base`: the number of the operand whose memory it has; None: memory of its
    own. `is_known`: whether the trace knows its value, which then has no elements."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    base: int | None
    is_known: bool = False

    @staticmethod
    def of(call: Call, tensor: Any) -> "Made":
        if type(tensor) is not FakeTensor or not _is_plain(tensor):
            raise NotDescribed
        _, _, offset = _layout(tensor)
        base = call.number_of_memory(tensor)
        if base is None and offset != 0:
            raise NotDescribed
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        is_known = tensor.constant is not None
        return Made(tensor.dtype, tensor.device, shape, stride, tensor.storage_offset(), base, is_known)

    def tensor(self, call: Call) -> Any:
        """Another tensor like it, for a call with an equal key."""
        with within_kernels(call.mode):
            return self.fake(call, self.memory(call))

    def memory(self, call: Call) -> Any:
        """Its memory without data, made where torch already runs kernels and notes no conditions."""
        base = None if self.base is None else call.tensors[self.base]
        if base is None:  # memory of no bytes: how many there would be takes long to compute
            base = torch.empty(0, dtype=self.dtype, device="meta")
        if base.dtype == self.dtype:
            made = torch.as_strided(base, self.shape, self.stride, self.offset)
        else:  # a view with another dtype; that its memory suffices is compared once more
            made = torch.empty(0, dtype=self.dtype, device="meta")
            made.set_(base.untyped_storage(), self.offset, self.shape, self.stride)
        return made

    def fake(self, call: Call, memory: Any) -> Any:
        """The tensor with this memory."""
        value = torch.empty(self.shape, dtype=self.dtype, device=self.device) if self.is_known else None
        return FakeTensor(call.mode, memory, self.device, constant=value)

    def differentiable(self, call: Call) -> Any:
        """Another tensor like it, with a gradient that flows to operands, or to nothing."""
        if self.base is not None:
            return torch.as_strided(call.tensors[self.base], self.shape, self.stride, self.offset)
        return self.tensor(call).requires_grad_().clone()  # no code may write to one that nothing made


def taken_apart(result: Any) -> tuple[Any, list[Any]]:
    """The tensors of a result, and the class of what holds them; None for a tensor itself."""
    return (None, [result]) if isinstance(result, Tensor) else (type(result), list(result))


def put_together(kind: Any, tensors: list[Any]) -> Any:
    """The result of this class."""
    if kind is None:
        return tensors[0]
    return kind(*tensors) if hasattr(kind, "_fields") else kind(tensors)


def own_memories(tensors: Sequence[Any], parts: Sequence[Any]) -> bool:
    """Whether all tensors of a result that lie in no operand's memory have a memory of their own."""
    own = [
        memory_of(t) for t, p in zip(tensors, parts, strict=True) if isinstance(p, Made) and p.base is None
    ]
    return len(set(own)) == len(own)


@dataclasses.dataclass
class _Result:
    """What a call gave: a tensor, or several (of the class `kind`). A number stands for the operand of that
    number itself."""

    parts: Sequence[Made | int | None]
    kind: Any

    @staticmethod
    def of(call: Call, result: Any) -> "_Result | None":
        """None where it is something else."""
        if not isinstance(result, (Tensor, list, tuple)):
            return None
        kind, tensors = taken_apart(result)
        try:
            parts = [_part(call, t) for t in tensors]
        except NotDescribed:
            return None
        return _Result(parts, kind) if own_memories(tensors, parts) else None

    def made(self, call: Call) -> Any:
        """The result of a call with an equal key."""
        each = self.parts
        found = (
            p.tensor(call) if isinstance(p, Made) else None if p is None else call.tensors[p] for p in each
        )
        return put_together(self.kind, list(found))


def _part(call: Call, tensor: Any) -> Made | int | None:
    number = call.number(tensor)
    if number is not None or tensor is None:
        return number
    if tensor.requires_grad:
        raise NotDescribed
    return Made.of(call, tensor)
