"""Models whose first call differs from later ones: they fill a table that later calls read.

A graph of such a call would not fill the table. Whether a change is of this kind is found by running the
model twice on tensors without data. Then its first call is run as it is, and the model is captured after it.
A decoder is captured before it, so that tables are computed for any number of tokens, and leaves them
unfilled. Where the first call writes to tensors that are there (it rescales weights, say), it is run for a
decoder as well: nothing could take such a write back.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.capture.guards import things
from attngraph.capture.instead import replaced
from attngraph.capture.state.fingerprint import fingerprint
from attngraph.capture.state.ran import Executed, recorded
from attngraph.capture.state.snapshot import Snapshot
from attngraph.capture.structure import flatten, unflatten
from attngraph.errors import CaptureError

T = TypeVar("T")


def once_settled(
    make: Callable[[], T], target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    """What `make` makes of a capture of this call. A target that fills a table runs the call first, without
    gradients.

    Raises:
        CaptureError: the target cannot be captured then either.
    """
    try:
        return make()
    except CaptureError as problem:
        if not fills_a_table(problem, target, args, kwargs):
            raise
    run_first(target, args, kwargs)
    return make()


def run_first(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the first call, without gradients."""
    with torch.no_grad():
        target(*args, **kwargs)


def answers_alike(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the target's first call has the results of its second. Its attributes and containers are
    restored; where it writes to tensors, copies of them are there for the time of both calls."""
    leaves, spec = flatten((args, kwargs))
    writes = writes_to_tensors(target, args, kwargs)
    kept = Snapshot([target, *things(leaves)])
    given, named = unflatten(leaves, spec)
    try:
        if writes:
            copies = {id(t): t.detach().clone() for t in _tensors(target)}
            kept.replace_tensors(lambda t: copies.get(id(t), t))
        with torch.no_grad(), recorded(Executed(), kept.add):
            once, again = (flatten(target(*given, **named))[0] for _ in range(2))
    finally:
        kept.restore()
    return len(once) == len(again) and all(map(_equal, once, again))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.nan_to_num(), b.nan_to_num())
    return bool(a == b)


def fills_a_table(
    problem: CaptureError, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether the target could not be captured because it changes its state in its first call alone."""
    return problem.changes_state and settles(target, args, kwargs)


class _NoData(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses tensors with data, of which torch's FakeTensorMode computes with, and writes to, those of one
    element. (One that the code has just made of Python numbers is `lifted`: replaced by a fake tensor.)"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        lifted = func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
        if not lifted and not all(isinstance(t, FakeTensor) for t in tensors):
            raise ValueError("a tensor with data")
        return func(*args, **(kwargs or {}))


def settles(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the target changes its state in its first call alone, as code does that keeps a table for later
    calls. Runs it twice on tensors without data, as a trace would; the state is restored."""
    exporting = (replaced(torch.compiler, f"_is_{what}_flag", True) for what in ("compiling", "exporting"))
    try:
        executed = Executed()
        with next(exporting), next(exporting), without_data(target, args, kwargs, executed) as run:
            run()
            scope = executed.ran.scope()
            once = fingerprint([target], scope), _weights(target)
            run()
            return once == (fingerprint([target], scope), _weights(target))
    except Exception:  # for example, what it does depends on values
        return False


def writes_to_tensors(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call, run on tensors without data, writes to weights or buffers; the state is restored."""
    with without_data(target, args, kwargs) as run:
        tensors = _tensors(target)
        before = [t._version for t in tensors]
        run()
        return before != [t._version for t in tensors]


@contextlib.contextmanager
def without_data(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    executed: Executed | None = None,
) -> Iterator[Callable[[], Any]]:  # fmt: skip
    """The call on tensors without data, in the place of all that the target holds and its code reads; the
    state is restored. `executed`: gets the code that runs."""
    leaves, spec = flatten((args, kwargs))
    kept = Snapshot([target, *things(leaves)])
    try:
        refusing = _NoData()  # type: ignore[no-untyped-call]
        with (
            FakeTensorMode() as mode, refusing, contextlib.redirect_stdout(io.StringIO()),
            kept.iterators_refused(lambda place: None),
        ):  # fmt: skip
            emptied = functools.partial(mode.from_tensor, static_shapes=True)
            kept.replace_tensors(emptied)
            fake = [emptied(x) if isinstance(x, Tensor) else x for x in leaves]
            given, named = unflatten(fake, spec)
            with recorded(executed or Executed(), kept.add):
                yield functools.partial(target, *given, **named)
    finally:
        kept.restore()


def _tensors(target: Callable[..., Any]) -> list[Tensor]:
    modules = target.modules() if isinstance(target, nn.Module) else ()
    held = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values()))
    return [t for t in held if t is not None]


def _weights(target: Callable[..., Any]) -> list[int]:
    return [id(t) for t in _tensors(target)]
