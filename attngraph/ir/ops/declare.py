"""How an op of ours is declared: once, as the function that computes it.

    @declare(fake=lambda a: (torch.empty_like(a.x), torch.empty_like(a.state)), derivatives=INSTEAD)
    def running_fold(x: Tensor, state: Tensor, ..., how: str) -> tuple[Tensor, Tensor]: ...

The signature is the op's schema. From the declaration follow its registration, its results without data, what
it does under differentiation and batching, and who may name it in the text of a graph.

PyTorch runs an op that has a kernel and nothing else as if it were constant in forward mode (its tangent is
lost without a word), and warns of a missing gradient only in the backward pass. So every op of ours has its
rule, or consists of operations that have theirs, or refuses.

What operations keep for each other (`shared`) is kept within one run of a graph, or one backward pass. What
follows from a tensor's values holds until somebody writes to it, and torch does not count every write: a
kernel of the user's, a CUDA graph that is replayed and `.data` leave the version as it is. While a graph runs
(`runtime/machine.py`) nothing but its operations computes, and these write to none of their inputs; in a
backward pass autograd relies on the same.
"""

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngraph.errors import BackendError
from attngraph.ir.operations import READABLE

LIBRARY = torch.library.Library("attngraph", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Holds the rules that are registered here, for as long as the process runs."""
RUNNERS: defaultdict[str, list[Callable[..., Any]]] = defaultdict(list)
"""By an op without derivatives: what may compute a call of it, in order of preference. None for a call that
is not supported; the declared function computes what nothing else does."""
INSTEAD = "a decoder has no gradients: differentiate the model itself"
"""What to do where a derivative of a decoder's operation is asked for."""

Size: TypeAlias = Annotated[int, "a symbol"]
Sizes: TypeAlias = Annotated[list[int], "symbols"]
"""Kinds of arguments that may be symbols, where others are plain numbers."""
_KINDS: dict[Any, str] = {
    Tensor: "Tensor", Tensor | None: "Tensor?", list[Tensor]: "Tensor[]", Sequence[Tensor]: "Tensor[]",
    int: "int", Size: "SymInt", list[int]: "int[]", Sequence[int]: "int[]", Sizes: "SymInt[]",
    bool: "bool", float: "float", str: "str", torch.device | None: "Device?",
    tuple[Tensor, Tensor]: "(Tensor, Tensor)",
}  # fmt: skip
_NOTHING = contextlib.nullcontext()
_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def declare(
    *, fake: Callable[[Any], Any] | None = None, derivatives: str | Callable[..., Any] = "",
    batched: Callable[..., Any] | None = None, plain: bool = False, runs: bool | None = True,
    after: Callable[[Any], Any] | None = None, schema: str = "", tags: tuple[Any, ...] = (),
) -> Callable[[_Function], _Function]:  # fmt: skip
    """Declare the op of a function's name.

    Args:
        fake: from the arguments by name to the results, without data. None: the function consists of
            operations that have everything themselves.
        derivatives: the rule for autograd, called with the keys of the dispatcher and the arguments; or what
            to do instead, where there are none.
        batched: computes a batch of `torch.vmap` as `batch_one_by_one` says.
        plain: the name goes on to stand for the function; else it stands for the op.
        runs: whether a graph from a file may run it; None: it may not even name it.
        after: what the op does with the function's result.
        schema: where the signature does not say it.
    """

    def declared(function: _Function) -> _Function:
        name = function.__name__.lstrip("_")
        torch.library.define(f"attngraph::{name}", schema or _schema(function), tags=tags)
        op: Any = getattr(torch.ops.attngraph, name).default
        kernel: Any = function
        if isinstance(derivatives, str) and derivatives:
            kernel = _without_gradients(name, function, after)
        how = "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd"
        torch.library.impl(f"attngraph::{name}", how)(kernel)
        if fake is not None:
            torch.library.register_fake(f"attngraph::{name}")(_named(function, fake))
        if derivatives:
            rule = derivatives if callable(derivatives) else functools.partial(_refuse, name, derivatives)
            LIBRARY.impl(name, rule, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
        if batched is not None:
            batch_one_by_one(op, batched)
        if runs is not None:
            READABLE[name] = runs
        return function if plain else op

    return declared


def _schema(function: Callable[..., Any]) -> str:
    about = inspect.signature(function, eval_str=True)
    texts = (
        f"{_KINDS[p.annotation]} {p.name}" + f"={p.default!r}" * (p.default is not p.empty)
        for p in about.parameters.values()
    )
    return f"({', '.join(texts)}) -> {_KINDS[about.return_annotation]}"


def _named(function: Callable[..., Any], fake: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function of the arguments by name as one of the arguments in their order."""
    about = inspect.signature(function)

    def call(*args: Any, **more: Any) -> Any:
        given = about.bind(*args, **more)
        given.apply_defaults()
        return fake(types.SimpleNamespace(**given.arguments))

    return call


def _without_gradients(name: str, function: Callable[..., Any], after: Callable[[Any], Any] | None) -> Any:
    """The function, which autograd inside must not record: weights among its operands may want gradients."""

    def kernel(*args: Any) -> Any:
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            for runner in RUNNERS[name]:
                if (found := runner(*args)) is not None:
                    return found
            return function(*args) if after is None else after(function(*args))

    return kernel


def differentiated(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an op with a gradient in reverse mode alone: `apply` computes it where autograd records."""

    def rule(keys: Any, *args: Any) -> Any:
        if has_tangent(args):
            raise NotImplementedError(f"attngraph::{name} has no forward-mode derivative.")
        if is_recorded(args):
            return apply(*args)
        return run_kernel(getattr(torch.ops.attngraph, name).default, keys, *args)

    return rule


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: Any, back: Any, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(of(given))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, *ctx.back(grads)


def with_gradients(
    of: Callable[[Sequence[Tensor]], Sequence[Tensor]], back: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    *given: Tensor,
) -> Sequence[Tensor]:  # fmt: skip
    """What `of` makes of tensors, whose gradients are what `back` makes of those of its results."""
    found: Sequence[Tensor] = _WithGradients.apply(of, back, *given)
    return found


def with_value(differentiable: Tensor, value: Tensor) -> Tensor:
    """A value that one computation gives, with the derivatives of another one of the same function."""
    return with_gradients(lambda _: [value.clone()], lambda grads: grads, differentiable)[0]


def _refuse(name: str, instead: str, keys: Any, *args: Any) -> Any:
    require_no_derivative(name, instead, args)
    return run_kernel(getattr(torch.ops.attngraph, name).default, keys, *args)


def require_no_derivative(name: str, instead: str, args: Any) -> None:
    """Raise NotImplementedError where a derivative would flow through an op that has none."""
    if has_tangent(args) or is_recorded(args):
        raise NotImplementedError(f"attngraph::{name} has no derivatives; {instead}.")


def require_no_order(in_order: bool, tensor: Tensor, what: str) -> None:
    """Raise BackendError where a program is `in order` and no code here computes it so. The proofs compute
    in float64, in any order."""
    if in_order and tensor.dtype != torch.float64:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise BackendError(
            f"nothing here computes {what} in one order of sums ({dtype} on {tensor.device.type}), as "
            "consistent=True asks for: it needs a C compiler on a CPU, and Triton on a GPU.\nWhat to do: "
            "install it (where it is there, attngraph's log says what stood in the way), or leave "
            "consistent=True out."
        )


def batch_one_by_one(op: Any, together: Callable[..., Any]) -> None:
    """Make `torch.vmap` call an op once for each entry of the batch and stack the results, where
    `together(size, dims, args)` does not compute the whole batch at once, but returns None."""

    def rule(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        found = together(info.batch_size, dims, args)
        if found is None:
            entries = [op(*_entry(args, dims, place)) for place in range(info.batch_size)]
            found = [torch.stack(values) for values in zip(*entries, strict=True)]
        kind = tuple if len(op._schema.returns) > 1 else list  # several results, or one list of them
        return kind(found), kind([0] * len(found))

    torch.library.register_vmap(op.name(), rule, lib=LIBRARY)


def _entry(values: Any, dims: Any, place: int) -> list[Any]:
    """The arguments of one entry of the batch; `dims` says along which dimension a tensor is batched."""
    found: list[Any] = []
    for value, dim in zip(values, [None] * len(values) if dims is None else dims, strict=True):
        if isinstance(value, (list, tuple)):
            found.append(_entry(value, dim, place))
        else:
            found.append(value if dim is None else value.select(dim, place))
    return found


# --- what is asked about a call ---


def tensors_in(args: Any) -> Iterator[Tensor]:
    """The tensors among an op's arguments, those in lists included."""
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def are_wide(tensors: Sequence[Tensor]) -> bool:
    """Whether programs are run in float64: where a tensor is in it."""
    return any(t.dtype == torch.float64 for t in tensors)


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
