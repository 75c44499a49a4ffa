"""What stands in the way of torch's and Python's functions during a trace.

`instead` puts other things in the places of attributes of classes and modules. Many of them are private to
torch: a version of torch that has none of that name is left as it is. `python_followed` lets a trace follow
what torch.export cannot: numpy's functions of sizes, flags that follow from sizes, `tensor.data`, and more.

A trace has the process for itself: torch.export replaces a model's weights by fake tensors while it traces,
and checking a traced graph changes process-wide settings, so no call may run meanwhile. Any number of calls
run concurrently; a trace waits for them, and new calls wait until it is done. The lock is taken to trace in
`build.py`, `derive.py`, `bisect.py` and `convert.py` of `api/`, and to call in `runtime/machine.py`. A model
that is called directly cannot wait: it must not be called while another thread traces it.
"""

import builtins
import contextlib
import functools
import importlib
import logging
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from attngraph.ir.kept import holding

Row = tuple[Any, str, Callable[[Any], Any]]
"""A class or a module (or the name of one), the name of an attribute, and what makes of this what is to stand
in its place."""
_MISSING = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any, adds: bool = False) -> Iterator[None]:
    """Set an attribute of a class or a module (or of the module of that name) while the context is active. If
    there is no such attribute, do nothing, or with `adds` add it."""
    owner = _found(owner)
    if not adds and not hasattr(owner, name):
        yield
        return
    before, found = vars(owner).get(name, _MISSING), getattr(owner, name, _MISSING)
    if isinstance(vars(type(owner)).get(name), types.GetSetDescriptorType):  # a function's code, say
        before = found
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is not _MISSING:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
            if found is not _MISSING and not hasattr(owner, name):  # it had it by no other means
                setattr(owner, name, found)


@contextlib.contextmanager
def instead(*rows: Row) -> Iterator[None]:
    """While it is active, these attributes are what the rows make of them."""
    with contextlib.ExitStack() as stack:
        for owner, name, make in rows:
            owner = _found(owner)
            if hasattr(owner, name):
                stack.enter_context(replaced(owner, name, make(getattr(owner, name))))
        yield


@contextlib.contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Hide what these loggers of torch's say while the context is active, but for what is critical."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _found(owner: Any) -> Any:
    """The class or the module; None if there is no module of this name."""
    try:
        return importlib.import_module(owner) if isinstance(owner, str) else owner
    except ImportError:
        return None


_FIXING = ["log", "log2", "log10", "sin", "cos", "tan", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"]
"""Functions that torch.export has no symbolic form of: the size becomes a number."""
_OF_NUMPY: dict[str, Any] = {
    "sqrt": torch.sym_sqrt,
    "exp": lambda x: math.e**x,
    "floor": lambda x: torch.sym_float(math.floor(x)),
    "ceil": lambda x: torch.sym_float(math.ceil(x)),
    **{n: lambda size, n=n: getattr(math, n.replace("arc", "a"))(size) for n in _FIXING},
}
"""numpy applies a function to an object that it does not know by calling the object's method of that name."""


def _with_plain_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which takes symbolic comparisons as flags (`is_causal=tokens > 1`). Each is decided for
    the sizes of the example; that it holds becomes a condition of the graph."""

    def plain(value: Any) -> Any:
        return bool(value) if isinstance(value, torch.SymBool) else value

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})

    return run


def _without_stand_ins(begin: Callable[..., None]) -> Callable[..., None]:
    """Torch hands out modules that are registered twice themselves, and no stand-in for each name: a model
    may ask whether two are the same. (A stand-in would say by which name its operations were reached.)"""

    def begins(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.enable_attr_proxy = False

    return begins


_FOR_A_FILE: ContextVar[bool] = ContextVar("for_a_file", default=False)


def for_a_file() -> contextlib.AbstractContextManager[bool]:
    """The graphs that are traced in the body are written to files. Others serve the model's own calls: they
    run its code for these, and not what it has for files, which may have to do without an operation."""
    return holding(_FOR_A_FILE, True)


def told_of_files(is_exporting: bool) -> bool:
    """What the user's code is told that asks torch. Torch's own is told that torch.export traces."""
    root = str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0]
    return is_exporting and (_FOR_A_FILE.get() or root in ("torch", "attngraph"))


def _asking_us() -> bool:
    """The body of `torch.compiler.is_exporting` in a trace, under whatever name code has bound it; its
    variables are those of torch.compiler."""
    from attngraph.capture.instead import told_of_files

    return told_of_files(_is_exporting_flag)  # type: ignore[name-defined]  # noqa: F821


def scanned(combine: Callable[[Any, Any], Any], values: Any, dim: int, reverse: bool) -> Any:
    """What `associative_scan` gives, as a loop over the places of the dimension."""
    leaves, spec = pytree.tree_flatten(values)
    steps = list(zip(*(leaf.unbind(dim) for leaf in leaves), strict=True))
    found = [pytree.tree_unflatten(steps[-1 if reverse else 0], spec)]
    for step in reversed(steps[:-1]) if reverse else steps[1:]:
        found.append(combine(found[-1], pytree.tree_unflatten(step, spec)))
    each = zip(*map(pytree.tree_leaves, reversed(found) if reverse else found), strict=True)
    return pytree.tree_unflatten([torch.stack(leaf, dim) for leaf in each], spec)


def _scanned(combine_fn: Any, xs: Any, dim: int, reverse: bool, combine_mode: str) -> Any:
    """The body of `associative_scan` in a trace, under whatever name code has bound it."""
    from attngraph.capture.instead import scanned

    return scanned(combine_fn, xs, dim, reverse)


def _symbolic(length: Callable[[Any], int]) -> Callable[[Any], Any]:
    """`len`, which of a tensor gives the size that the trace knows. (`Tensor.__len__` must give a number.)"""

    @functools.wraps(length)
    def found(value: Any, /) -> Any:
        plain = isinstance(value, Tensor) and type(value).__len__ is Tensor.__len__ and value.ndim
        return value.shape[0] if plain else length(value)

    return found


_FOLLOWED: tuple[Row, ...] = (
    (builtins, "len", _symbolic),
    # torch.export records the operator only where Dynamo traces.
    (
        importlib.import_module("torch._higher_order_ops.associative_scan").associative_scan,
        "__code__", lambda _: _scanned.__code__,
    ),
    (torch.compiler.is_exporting, "__code__", lambda _: _asking_us.__code__),
    (torch.nn.functional, "scaled_dot_product_attention", _with_plain_flags),
    (torch._C._nn, "scaled_dot_product_attention", _with_plain_flags),
    # torch.export takes `tensor.data` for a constant: it is `tensor.detach()`.
    (Tensor, "data", lambda own: property(Tensor.detach, torch._C.TensorBase.data.__set__)),  # type: ignore[attr-defined]
    # torch.vmap leaves a level with the batch as the first dimension and moves it then (`out_dims`):
    # torch.export cannot record the other way.
    (
        "torch._functorch.vmap", "_remove_batch_dim",
        lambda leave: lambda value, level, size, dim: leave(value, level, size, 0).movedim(0, dim),
    ),
    # torch.nn's transformer layers look whether a mask's values are causal, to pass a hint with the mask.
    (
        torch.nn.modules.transformer, "_detect_is_causal_mask",
        lambda _: lambda mask, is_causal=None, size=None: bool(is_causal),
    ),
    (proxy_tensor._ModuleStackTracer, "__init__", _without_stand_ins),
)  # fmt: skip


@contextlib.contextmanager
def python_followed() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in (torch.SymInt, torch.SymFloat):
            for name, function in _OF_NUMPY.items():
                stack.enter_context(replaced(kind, name, function, adds=True))
        stack.enter_context(instead(*_FOLLOWED))
        yield


_PRODUCTS: dict[Any, str] = {torch.einsum: "einsum", torch.tensordot: "tensordot"}


def products_cast() -> contextlib.AbstractContextManager[Any]:
    """While it is active, products under autocast that torch writes out as other products are recorded as
    these, whose operands autocast casts. (torch.export records them before.)"""
    return _WrittenOut() if torch._C._is_any_autocast_enabled() else contextlib.nullcontext()


class _WrittenOut(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        name = _PRODUCTS[func]
        with replaced(torch._VF, name, getattr(torch.ops.aten, name).default.decompose):
            return func(*args, **(kwargs or {}))


class TraceLock:
    """A reader-writer lock: calls share it, a trace holds it exclusively. It is reentrant: the tracing thread
    may trace and call. A thread that is interrupted has given back what it took: it is kept under an object
    of its own, inside of the block that gives it back."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: dict[object, int] = {}  # the thread of each
        self._tracer: int | None = None
        self._waiting: dict[object, int] = {}  # who wants to trace: no new call overtakes them
        self.begun = 0
        """Traces that have begun; two equal counts, and no trace at the second, had none in between."""

    def is_tracing(self) -> bool:
        return self._tracer is not None

    def traces_here(self) -> bool:
        """Whether the current thread is the one that traces."""
        return self._tracer == threading.get_ident()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        me, mine = threading.get_ident(), object()

        def may_call() -> bool:
            is_inside = me in self._calls.values() or self._tracer == me
            return is_inside or (self._tracer is None and not self._waiting)

        try:
            with self._changed:
                self._wait(may_call)
                self._calls[mine] = me
            yield
        finally:
            self._calls.pop(mine, None)
            with self._changed:
                self._changed.notify_all()

    @contextlib.contextmanager
    def trace(self) -> Iterator[None]:
        me, mine = threading.get_ident(), object()
        outer = self._tracer == me
        try:
            with self._changed:
                self._waiting[mine] = me
                self._wait(lambda: self._tracer in (None, me) and not set(self._calls.values()) - {me})
                self._tracer = me
                self.begun += 1
                del self._waiting[mine]
            yield
        finally:
            if not outer and self._tracer == me:
                self._tracer = None
            self._waiting.pop(mine, None)
            with self._changed:
                self._changed.notify_all()

    def _wait(self, holds: Callable[[], bool]) -> None:
        """Wait until this holds. It is looked at now and then, as a thread may be interrupted before it
        tells."""
        while not self._changed.wait_for(holds, timeout=1.0):
            pass


LOCK = TraceLock()
"""One lock for all models, because they may share weights."""
