"""Within one trace, operations on operands of equal sizes are inferred once, and formulas computed once.

What a traced operation gives (shapes, dtypes, and whose memory) follows from the same of its operands and
from its other arguments. Torch infers it anew for each operation, by Python code that compares symbolic
sizes: most of a trace's time, and equal layers have equal operations. Here a result is described by what it
follows from, and where that is equal, a result is made from the description. An operation that writes to an
operand, or whose result depends on values, is left to torch.

Torch also computes with symbolic sizes at every operation, some forty times, and each takes sympy long. The
result follows from the formulas of both sides. Where torch records the computation in the graph, it is left
to torch. So is what follows from the values of tensors. Used by `faster/__init__.py`.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from attngraph.capture.instead import instead
from attngraph.capture.lines import user_lines
from attngraph.ir.graph.call import BY_VALUES
from attngraph.ir.graph.source import short_path

_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_SYMBOLIC = frozenset({torch.SymInt, torch.SymFloat, torch.SymBool})


def equal_calls_inferred_once() -> contextlib.AbstractContextManager[None]:
    """Let torch's inference of results look up what is known already."""
    known: dict[Any, Result | None] = {}

    def looking_up(infer: Callable[..., Any]) -> Callable[..., Any]:
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
                try:
                    known[key] = Result.of(call, result)
                except NotDescribed:
                    known[key] = None
            return result

        return dispatched

    return instead((FakeTensorMode, "dispatch", looking_up))


class NotDescribed(Exception):
    """A value of another kind than those that are described, or a call that did something else than plain
    operations on its operands."""


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
        """A number, a size, a tensor without data, or a container of these; else raises NotDescribed."""
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
        """A tensor, by its layout; raises NotDescribed if it has more, as one that wraps others has."""
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


class Made(NamedTuple):
    """One tensor of a result. `base`: the number of the operand whose memory it has; None: memory of its
    own. `is_known`: whether the trace knows its value, which then has no elements."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    base: int | None
    is_known: bool
    wants_gradient: bool

    @staticmethod
    def of(call: Call, tensor: Any, gradients: bool) -> "Made | int":
        """The description of a tensor, or the number of the operand that it is."""
        number = next((n for n, t in enumerate(call.tensors) if t is tensor), None)
        if number is not None:
            return number
        wants = tensor.requires_grad
        if type(tensor) is not FakeTensor or not _is_plain(tensor) or (wants and not gradients):
            raise NotDescribed
        _, _, offset = _layout(tensor)
        memory = memory_of(tensor)
        base = next((n for n, t in enumerate(call.tensors) if memory_of(t) == memory), None)
        if base is None and offset != 0:
            raise NotDescribed
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        about = tensor.dtype, tensor.device, shape, stride, tensor.storage_offset()
        return Made(*about, base, tensor.constant is not None, wants)

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
        value = torch.empty(self.shape, dtype=self.dtype, device=self.device) if self.is_known else None
        return FakeTensor(call.mode, memory, self.device, constant=value)

    def differentiable(self, call: Call) -> Any:
        """Another tensor like it, with a gradient that flows to operands, or to nothing."""
        if self.base is not None:
            return torch.as_strided(call.tensors[self.base], self.shape, self.stride, self.offset)
        return self.tensor(call).requires_grad_().clone()  # no code may write to one that nothing made


def tensors_of(result: Any) -> list[Any]:
    return [result] if isinstance(result, Tensor) else list(result)


@dataclasses.dataclass
class Result:
    """What a call gave: a tensor, or several (of the class `kind`). A number stands for the operand of that
    number itself."""

    parts: list[Made | int | None]
    kind: Any

    @staticmethod
    def of(call: Call, result: Any, gradients: bool = False) -> "Result":
        """Raises NotDescribed if it is something else, or two of its tensors lie in one memory of their own.
        `gradients`: whether a tensor that has a gradient is described."""
        if not isinstance(result, (Tensor, list, tuple)):
            raise NotDescribed
        tensors = tensors_of(result)
        parts = [None if t is None else Made.of(call, t, gradients) for t in tensors]
        pairs = zip(tensors, parts, strict=True)
        own = [memory_of(t) for t, p in pairs if isinstance(p, Made) and p.base is None]
        if len(set(own)) < len(own):
            raise NotDescribed
        return Result(parts, None if isinstance(result, Tensor) else type(result))

    def made(self, call: Call) -> Any:
        """The result of a call with an equal key."""
        given, each = call.tensors, self.parts
        found = (p.tensor(call) if isinstance(p, Made) else None if p is None else given[p] for p in each)
        return self.together(list(found))

    def together(self, tensors: list[Any]) -> Any:
        if self.kind is None:
            return tensors[0]
        return self.kind(*tensors) if hasattr(self.kind, "_fields") else self.kind(tensors)


# --- formulas ---

_METHODS = ("add", "sub", "mul", "int_floordiv", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min")
_NUMBERS = frozenset({int, float, bool, type(None)})


@functools.lru_cache(maxsize=1 << 14)
def follows_from_sizes(formula: Any) -> bool:
    """Whether a formula has no sizes that follow from the values of tensors."""
    return not free_unbacked_symbols(formula)


def equal_formulas_computed_once() -> contextlib.AbstractContextManager[None]:
    """Let torch's operations on symbolic sizes look up what is known already."""
    methods = ((SymNode, f"_{name}", _computing_once) for name in _METHODS)
    return instead(*methods, (ShapeEnv, "evaluate_expr", _asking_once))


def _asking_once(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Torch forgets what a formula is in the example whenever it notes another condition on sizes. The answer
    stays the same, and so does the condition that was noted with it. Where it notes none, what the formula
    is in the example is the answer, which torch would first try to prove for all sizes."""
    known: dict[Any, Any] = {}

    def evaluated(
        env: Any, formula: Any, hint: Any = None, node: Any = None, oblivious: bool = False, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        if not follows_from_sizes(formula):
            return evaluate(env, formula, hint, node, oblivious, *args, **kwargs)
        if env._suppress_guards_tls() and hint is not None and type(hint) in _NUMBERS and not oblivious:
            return sympy.sympify(hint)
        key = env, formula, hint, node, oblivious, args, tuple(kwargs.items()), env._suppress_guards_tls()
        if key not in known:
            before = len(env.guards)
            known[key] = evaluate(env, formula, hint, node, oblivious, *args, **kwargs)
            lines = user_lines(sys._getframe(1)) if len(env.guards) > before else ()
            for place in range(before, len(env.guards) if lines else 0):
                # Torch would name this file: to it, what is not its own is the user's.
                guard, where = env.guards[place], f"{short_path(lines[-1][0])}:{lines[-1][1]}"
                sloc = dataclasses.replace(guard.sloc, maybe_user_loc=where)
                env.guards[place] = guard._replace(sloc=sloc)
        return known[key]

    return evaluated


def _computing_once(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    known: dict[Any, Any] = {}
    recording = proxy_tensor.get_proxy_mode

    def computed(one: Any, other: Any) -> Any:
        examples_are_numbers = type(one._hint) in _NUMBERS and type(other._hint) in _NUMBERS
        if not examples_are_numbers or one.fx_node or other.fx_node or recording() is not None:
            return compute(one, other)
        key = one.shape_env, one.expr, one.pytype, one._hint, other.expr, other.pytype, other._hint
        if key not in known:
            known[key] = compute(one, other)
        return known[key]

    return computed
