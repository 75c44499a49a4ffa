"""What our ops do under differentiation and batching: what they share of it.

PyTorch runs an op that has a kernel and nothing else as if it were constant in forward mode (its tangent is
lost without a word), and warns of a missing gradient only in the backward pass. So every op of ours has its
rules, or one that refuses: `attngraph::attention` has formulas for all modes (`attention.py`),
`attngraph::linear_attention` consists of ops that have them, the others refuse (`refuse_derivatives`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

LIBRARY = torch.library.Library("attngraph", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Holds the rules that are registered here, for as long as the process runs."""

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


def differentiate_by(name: str, rule: Callable[..., Any]) -> None:
    """Register an op's rule for autograd. It is called with the keys of the dispatcher and the arguments."""
    LIBRARY.impl(name, rule, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def refuse_derivatives(name: str, instead: str) -> None:
    """Make an op raise an error where a derivative would flow through it. `instead` says what to do."""
    op = getattr(torch.ops.attngraph, name).default

    def rule(keys: Any, *args: Any) -> Any:
        require_no_derivative(name, instead, args)
        return run_kernel(op, keys, *args)

    differentiate_by(name, rule)


def require_no_derivative(name: str, instead: str, args: Any) -> None:
    """Raise NotImplementedError where a derivative would flow through an op that has none."""
    if has_tangent(args) or is_recorded(args):
        raise NotImplementedError(f"attngraph::{name} has no derivatives; {instead}.")


def batch_one_by_one(name: str, together: Callable[..., Any] | None = None) -> None:
    """Make `torch.vmap` call an op once for each entry of the batch and stack the results.

    `together(size, dims, args)` may compute the whole batch at once instead; it returns None where it cannot.
    """
    op = getattr(torch.ops.attngraph, name).default

    def rule(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        found = None if together is None else together(info.batch_size, dims, args)
        if found is None:
            entries = [op(*_entry(args, dims, place)) for place in range(info.batch_size)]
            found = [torch.stack(values) for values in zip(*entries, strict=True)]
        kind = tuple if len(op._schema.returns) > 1 else list  # several results, or one list of them
        return kind(found), kind([0] * len(found))

    torch.library.register_vmap(f"attngraph::{name}", rule, lib=LIBRARY)


def _entry(values: Any, dims: Any, place: int) -> list[Any]:
    """The arguments of one entry of the batch; `dims` says along which dimension a tensor is batched."""
    found: list[Any] = []
    for value, dim in zip(values, _dims(values, dims), strict=True):
        if isinstance(value, (list, tuple)):
            found.append(_entry(value, dim, place))
        else:
            found.append(value if dim is None else value.select(dim, place))
    return found


def _dims(values: Any, dims: Any) -> Any:
    return [None] * len(values) if dims is None else dims
