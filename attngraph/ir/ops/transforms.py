"""What our ops ask about a call: whether it is differentiated, recorded, or part of a transformation.

What operations keep for each other (`shared`) is kept within one run of a graph, or one backward pass. What
follows from a tensor's values holds until somebody writes to it, and torch does not count every write: a
kernel of the user's, a CUDA graph that is replayed and `.data` leave the version as it is. While a graph runs
(`runtime/machine.py`) nothing but its operations computes, and these write to none of their inputs; in a
backward pass autograd relies on the same.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def tensors_in(args: Any) -> Iterator[Tensor]:
    """The tensors among an op's arguments, those in lists included."""
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def has_tangent(args: Any) -> bool:
    """Whether forward-mode differentiation is carried on through one of these arguments."""
    # torch.compile enters the level without setting its number in Python. There is only level 0.
    compiling = torch._guards.TracingContext.try_get() is not None
    if forward_ad._current_level < 0 and not is_transformed() and not compiling:
        return False
    unpack: Callable[..., Any] = forward_ad.unpack_dual
    return any(t.is_floating_point() and unpack(t, level=0).tangent is not None for t in tensors_in(args))


def is_recorded(args: Any) -> bool:
    """Whether autograd records what is computed from these arguments."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args))


def is_transformed() -> bool:
    """Whether the call is inside a transformation of torch.func (`grad`, `jvp`, `vmap`)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def are_batched(args: Any) -> bool:
    """Whether the backward pass computes a batch of gradients (`is_grads_batched`, `vectorize=True`). PyTorch
    has a vmap of its own for that, and ops cannot have rules for it."""
    return any(torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors_in(args))


def run_kernel(op: Any, keys: Any, *args: Any, kernel: Callable[..., Any] | None = None) -> Any:
    """Call an op's kernel from its rule for autograd. (The kernel may use autograd itself.) `kernel`: the
    function registered for all devices, if it is known here: where no mode and no wrapper comes between, it
    is called as it is, which saves the dispatcher's second turn of the arguments."""
    keys = keys & torch._C._after_autograd_keyset
    if kernel is not None and keys.highestPriorityTypeId() in _DEVICES:
        return kernel(*args)
    return op.redispatch(keys, *args)


@contextlib.contextmanager
def autograd_inside() -> Iterator[None]:
    """Let a kernel use autograd, also where its caller has turned it off: DTensor does around the operations
    on its parts, and gradients would be zero without a word."""
    excluded, keys = torch._C._dispatch_tls_local_exclude_set(), torch._C.DispatchKey
    for key in (keys.AutogradFunctionality, keys.AutogradCPU, keys.AutogradCUDA, keys.AutogradOther):
        excluded = excluded - torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


_local = threading.local()


class _Run(dict[Any, Any]):
    """What the operations of a run keep for each other. The run alone holds it: it is gone when the run ends,
    also where an interrupt leaves this thread's reference behind."""


@contextlib.contextmanager
def one_run() -> Iterator[None]:
    """The operations that this thread calls inside are those of one run of a graph."""
    outer, own = getattr(_local, "run", None), _Run()
    try:
        _local.run = weakref.ref(own)
        yield
    finally:
        _local.run = outer


def shared() -> dict[Any, Any] | None:
    """What the operations of this run, or of this backward pass, keep for each other; None outside."""
    reference = getattr(_local, "run", None)
    run: dict[Any, Any] | None = None if reference is None else reference()
    if run is not None:
        return run
    task = torch._C._current_graph_task_id()
    if task == -1:
        return None
    known: tuple[int, dict[Any, Any]] | None = getattr(_local, "backward", None)
    if known is None or known[0] != task:
        known = _local.backward = task, {}
    return known[1]
