"""What is found out about a model by running it before a trace, mostly on tensors without data.

Some models' first call differs from later ones: they fill a table that later calls read. A graph of such a
call would not fill it. Whether a change is of this kind is found by running the model twice on tensors
without data. Then its first call is run as it is, and the model is captured after it. A decoder is captured
before it, so that tables are computed for any number of tokens, and leaves them unfilled. Where the first
call writes to tensors that are there (it rescales weights, say), it is run for a decoder as well: nothing
could take such a write back.

Others run a loop over tokens. A trace with symbolic sizes stops where it comes to such a loop, maybe long
after it began: the steps before the loop compute with quotients of the number of tokens, which torch
compares for seconds. So the call is run for few tokens and for many, and its operations are counted.
"""

import contextlib
import functools
import io
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.capture.guards import things
from attngraph.capture.instead import replaced
from attngraph.capture.state.fingerprint import fingerprint
from attngraph.capture.state.ran import recorded
from attngraph.capture.state.scope import Ran
from attngraph.capture.state.snapshot import Snapshot
from attngraph.capture.structure import Args, Named, Target, flatten, unflatten
from attngraph.errors import CaptureError

T = TypeVar("T")
MANY = 4099
"""More tokens than a chunk or a block has; a prime number, so that chunks do not divide it."""
TIMES = 2
"""A loop over tokens is taken to run where so many tokens take more than so many times the operations."""


def once_settled(make: Callable[[], T], target: Target, args: Args, kwargs: Named) -> T:
    """What `make` makes of a capture of this call. A target that fills a table runs the call first, without
    gradients."""
    try:
        return make()
    except CaptureError as problem:
        if not fills_a_table(problem, target, args, kwargs):
            raise
    run_first(target, args, kwargs)
    return make()


def run_first(target: Target, args: Args, kwargs: Named) -> None:
    with torch.no_grad():
        target(*args, **kwargs)


def answers_alike(target: Target, args: Args, kwargs: Named) -> bool:
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
        with torch.no_grad(), recorded(Ran(), kept.add):
            once, again = (flatten(target(*given, **named))[0] for _ in range(2))
    finally:
        kept.restore()

    def equal(a: Any, b: Any) -> bool:
        tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
        return torch.equal(a.nan_to_num(), b.nan_to_num()) if tensors else bool(a == b)

    return len(once) == len(again) and all(map(equal, once, again))


def fills_a_table(problem: CaptureError, target: Target, args: Args, kwargs: Named) -> bool:
    """Whether the target could not be captured because it changes its state in its first call alone."""
    return problem.changes_state and settles(target, args, kwargs)


class _NoData(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses tensors with data, of which torch's FakeTensorMode computes with, and writes to, those of one
    element. (One that the code has just made of Python numbers is `lifted`: replaced by a fake tensor.)"""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        lifted = func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
        if not lifted and not all(isinstance(t, FakeTensor) for t in tensors):
            raise ValueError("a tensor with data")
        return func(*args, **(kwargs or {}))


def settles(target: Target, args: Args, kwargs: Named) -> bool:
    """Whether the target changes its state in its first call alone, as code does that keeps a table for later
    calls; drawing random numbers changes it in each. Runs it twice on tensors without data, as a trace would;
    the state is restored."""
    exporting = (replaced(torch.compiler, f"_is_{what}_flag", True) for what in ("compiling", "exporting"))
    try:
        executed = Ran()
        with next(exporting), next(exporting), without_data(target, args, kwargs, executed) as (run, kept):
            run()
            if kept.has_drawn():
                return False
            scope = executed.scope()
            once = fingerprint([target], scope), [*map(id, _tensors(target))]
            run()
            return once == (fingerprint([target], scope), [*map(id, _tensors(target))])
    except Exception:  # for example, what it does depends on values
        return False


def writes_to_tensors(target: Target, args: Args, kwargs: Named) -> bool:
    """Whether a call, run on tensors without data, writes to weights or buffers; the state is restored."""
    with without_data(target, args, kwargs) as (run, _):
        tensors = _tensors(target)
        before = [t._version for t in tensors]
        run()
        return before != [t._version for t in tensors]


@contextlib.contextmanager
def without_data(
    target: Target, args: Args, kwargs: Named, executed: Ran | None = None
) -> Iterator[tuple[Callable[[], Any], Snapshot]]:
    """The call on tensors without data, in the place of all that the target holds and its code reads, and the
    state before it, which is restored. `executed`: gets the code that runs."""
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
            with recorded(executed or Ran(), kept.add):
                yield functools.partial(target, *given, **named), kept
    finally:
        kept.restore()


def _tensors(target: Target) -> list[Tensor]:
    modules = target.modules() if isinstance(target, nn.Module) else ()
    held = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values()))
    return [t for t in held if t is not None]


# --- loops over tokens ---


class _TooMany(Exception):
    """More operations than were asked for."""


class _Counted(TorchDispatchMode):
    """Counts operations up to a limit (0: none), and notes the extents of what they give."""

    supports_higher_order_operators = True

    def __init__(self, limit: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.limit, self.extents = 0, limit, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.limit and self.count > self.limit:
            raise _TooMany
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            self.extents.update(value.shape if isinstance(value, Tensor) else ())
        return result


def extents_of_loop(
    target: Target, args: Args, kwargs: Named, tokens: Collection[tuple[int, int]]
) -> frozenset[int] | None:
    """The extents of what the operations of a call give, if there are many more operations for many tokens;
    None if there are not, or if that cannot be told. Operations after one that needs data do not count.
    `tokens`: the dimensions, (tensor argument, dimension), that count the tokens."""
    leaves, spec = flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    counts = {tensors[place].shape[dim] for place, dim in tokens}

    def longer(leaf: Any) -> Any:
        """Extents that are equal to the number of tokens count them too."""
        if not isinstance(leaf, Tensor) or counts.isdisjoint(leaf.shape):
            return leaf
        return leaf.new_zeros([MANY if n in counts else n for n in leaf.shape])

    few = _operations(target, args, kwargs)
    args, kwargs = unflatten([longer(leaf) for leaf in leaves], spec)
    more = _operations(target, args, kwargs, limit=TIMES * few.count)
    return frozenset(few.extents) if more.count > more.limit > 0 else None


def _operations(target: Target, args: Args, kwargs: Named, limit: int = 0) -> _Counted:
    counted = _Counted(limit)
    try:
        with without_data(target, args, kwargs) as (run, _), torch.no_grad(), counted:
            run()
    except Exception:  # it may need data, or take no so many tokens
        pass
    return counted
