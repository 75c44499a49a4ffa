"""Collectives as nodes of a graph that every rank of a group runs: what is sent, and what its gradient is.

    attngraph::all_reduce(x, group) -> Tensor           the sum of the ranks' x
    attngraph::sum_gradients(x, group) -> Tensor        x, which is the same on every rank
    attngraph::all_gather(x, dim, ranks, group) -> Tensor   the ranks' x side by side along `dim`

A graph for several ranks has two kinds of values: replicated ones, equal on all ranks, whose gradient is
equal as well, and a rank's own part. `all_reduce` and `all_gather` lead from parts to replicated values, so a
rank's gradient of its own part is the gradient of the whole (cut, for a gather). `sum_gradients` stands where
a replicated value enters what ranks compute differently: each rank has a part of its gradient, and the
backward pass adds them up (Shoeybi et al. 2019, Megatron-LM, section 3, operators g and f). The gradients of
torch.distributed's own functional collectives are those of losses that differ by rank and are added, so they
are not used; these ops call them without gradients.

`group` is a process group's name. Collectives along the token axis are in `token_collectives.py`.

Operations that exchange values with their neighbours on the way do so as members of a `Team`, so many ranks
of a process group, which run them at the same time. Where ranks are simulated in one process, `together` runs
one for one rank after the other, and again from its beginning after every exchange, until all are done.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from attngraph.ir.kept import holding
from attngraph.ir.ops.declare import declare, differentiated, has_tangent, is_recorded, with_gradients

_OPS, FUNCTIONAL = torch.ops.attngraph, torch.ops._c10d_functional
Together = Callable[[Sequence[Any], Sequence[Tensor]], Sequence[Tensor]]
COLLECTIVES: dict[Any, Together] = {}
"""Every collective, with what computes it for all ranks in one process: from the node's other arguments and
the ranks' operands to their results, with the gradients that the ranks would have."""
_Function = TypeVar("_Function", bound=Callable[..., Tensor])


def collective(
    *, fake: Callable[[Any], Tensor], gradient: Callable[..., Tensor], together: Together, same: bool = False
) -> Callable[[_Function], _Function]:
    """Declare a collective, whose first argument is what is sent. `gradient` gives the operand's from the
    result's and the other arguments; `same`: the result is the operand, so nothing is computed."""

    def made(function: _Function) -> _Function:
        name = function.__name__.lstrip("_")

        def sent(x: Tensor, *about: Any) -> Tensor:
            return with_gradients(
                lambda own: [x.view_as(x) if same else function(own[0], *about)],
                lambda grads: [gradient(grads[0], *about)], x,
            )[0]  # fmt: skip

        recorded = differentiated(name, sent)

        def rule(keys: Any, *args: Any) -> Any:
            is_free = same and not has_tangent(args) and not is_recorded(args)
            return args[0] if is_free else recorded(keys, *args)

        result = declare(fake=fake, derivatives=rule, runs=False, plain=True)(function)
        COLLECTIVES[getattr(_OPS, name).default] = together
        return result

    return made


def total(parts: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def for_each(parts: Sequence[Tensor], of: Callable[[Sequence[Tensor]], Tensor]) -> list[Tensor]:
    """What every rank has of all parts; its gradient of its own part is that of its own result alone."""
    ranks = range(len(parts))
    return [of([p if r == rank else p.detach() for r, p in enumerate(parts)]) for rank in ranks]


def rank_in(group: Any) -> int:
    return torch.distributed.get_rank(torch._C._distributed_c10d._resolve_process_group(group))


def gathered(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """The ranks' x one after the other, with this dimension as the first."""
    first = x.movedim(dim, 0).contiguous()
    found: Tensor = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_gather_into_tensor(first, ranks, group))
    return found


@collective(
    fake=lambda a: torch.empty_like(a.x, memory_format=torch.contiguous_format),
    gradient=lambda grad, group: grad,
    together=lambda args, parts: for_each(parts, total),
)
def _all_reduce(x: Tensor, group: str) -> Tensor:
    found: Tensor = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_reduce(x.contiguous(), "sum", group))
    return found


@collective(
    fake=lambda a: torch.empty_like(a.x, memory_format=torch.contiguous_format),
    gradient=lambda grad, group: _all_reduce(grad, group),
    together=lambda args, parts: with_gradients(
        lambda values: [v.clone() for v in values], lambda grads: [total(grads)] * len(grads), *parts
    ),
    same=True,
)
def _sum_gradients(x: Tensor, group: str) -> Tensor:
    return x.clone()


@collective(
    fake=lambda a: a.x.new_empty([n * a.ranks if d == a.dim else n for d, n in enumerate(a.x.shape)]),
    gradient=lambda grad, dim, ranks, group: grad.chunk(ranks, dim)[rank_in(group)],
    together=lambda args, parts: for_each(parts, lambda own: torch.cat(list(own), args[0])),
)
def _all_gather(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return gathered(x, dim, ranks, group).movedim(0, dim).contiguous()


ALL_REDUCE, SUM_GRADIENTS, ALL_GATHER = (
    _OPS.all_reduce.default, _OPS.sum_gradients.default, _OPS.all_gather.default,
)  # fmt: skip


def bytes_sent(target: Any, size: int, ranks: int) -> int:
    """The bytes that each rank sends in a ring for one collective whose operand has `size` bytes."""
    if target is ALL_REDUCE:
        return 2 * size * (ranks - 1) // ranks
    return size * (ranks - 1) if target is ALL_GATHER else 0


EXCHANGING: set[Any] = set()
"""The operations that exchange; their last argument is the process group."""
_RUN: ContextVar["_Run | None"] = ContextVar("_RUN", default=None)


@dataclasses.dataclass(frozen=True)
class Team:
    """`size` neighbours among the `ranks` of a process group."""

    size: int
    ranks: int
    group: str

    @property
    def member(self) -> int:
        """Which of its team this rank is."""
        run = _RUN.get()
        return (rank_in(self.group) if run is None else run.rank) % self.size

    def swapped(self, parts: Tensor) -> Tensor:
        """Send `parts[n]` to member n; what the members sent to this rank, `[team, ...]`."""
        run = _RUN.get()
        if run is not None:
            return run.swapped(parts, self)
        rank = rank_in(self.group)
        first = rank - rank % self.size
        counts = [int(first <= other < first + self.size) for other in range(self.ranks)]
        found = FUNCTIONAL.all_to_all_single(parts.contiguous(), counts, counts, self.group)
        return FUNCTIONAL.wait_tensor(found)  # type: ignore[no-any-return]


class _Waits(Exception):
    """An operation of a simulated rank has come to an exchange that the others have not come to yet."""

    def __init__(self, parts: Tensor, team: Team) -> None:
        super().__init__("an exchange of simulated ranks")
        self.parts, self.team = parts, team


@dataclasses.dataclass
class _Run:
    """An operation run for one simulated rank. `received`: what it gets in the exchanges that are done."""

    rank: int
    received: list[Tensor]
    done: int = 0

    def swapped(self, parts: Tensor, team: Team) -> Tensor:
        if self.done == len(self.received):
            raise _Waits(parts, team)
        self.done += 1
        return self.received[self.done - 1]


def together(runs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run an operation for all ranks of a group, `runs[n]` for rank n; the results. RuntimeError where some
    ranks exchange and others do not."""
    received: list[list[Tensor]] = [[] for _ in runs]
    while True:
        waiting, results = list[_Waits](), []
        for rank, run in enumerate(runs):
            try:
                with holding(_RUN, _Run(rank, received[rank])):
                    results.append(run())
            except _Waits as exchange:
                waiting.append(exchange)
        if not waiting:
            return results
        if results:
            raise RuntimeError("some ranks exchange values and others do not. Please report it.")
        size = waiting[0].team.size
        for rank, own in enumerate(received):
            first = rank - rank % size
            own.append(torch.stack([w.parts[rank - first] for w in waiting[first : first + size]]))
