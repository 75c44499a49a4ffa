"""Loops over tokens that are carried from step to step.

A step of a decoder computes new tokens of several rows, packed (`ir/ops/cached_attention.py`): tokens
starts[r] .. starts[r + 1] - 1 belong to row r, which has seen first[r] tokens before. Each takes one step of
`program` (`ir/language/step_program.py`): from its own values in `tokens`, each `[N, ...]`, from what its row
carries, `[rows, ...]`, and from tensors that all tokens share. `out` is `[N, ...]`.

Steps of all rows that have another token are taken at once, one token after the other: that is what the model
says, where what a step hands on is no sum (a maximum, a gate, any cell). A registered runner takes all steps
of the calls that it supports, plain PyTorch those of the others. Sums are computed in chunks by
`attngraph::running_sum`.

`running_fold` has products, maxima, minima and log-sum-exps of x over earlier tokens, of each row of its own,
carried in the same way. A log-sum-exp is carried as such, so it is as stable as PyTorch's own. All is
computed in the state's dtype, which may be wider.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attngraph.ir.language.step_program import parse
from attngraph.ir.ops.cached_attention import Rows, counts
from attngraph.ir.ops.declare import INSTEAD, are_wide, declare

RUNNERS: list[Callable[..., Tensor | None]] = []
"""In order of preference. `run(text, tokens, shared, carried, begins, counts, out)` takes `counts[r]` steps
of `text` from token `begins[r]` of each row on, and writes to `carried`. It returns the tokens' results:
`out`, if that is given; None for a call that it does not support."""


def _shapes(a: Any) -> list[Tensor]:
    rows, count = a.first.shape[0], a.tokens[0].shape[0]
    taken = [t.new_empty((rows, *t.shape[1:])) for t in a.tokens]
    out = parse(a.program, are_wide([*a.tokens, *a.shared])).step(rows, taken, a.shared, a.carried)[0]
    return [out.new_empty((count, *out.shape[1:])), *map(torch.empty_like, a.carried)]


@declare(fake=_shapes, derivatives=INSTEAD)
def loop(
    tokens: list[Tensor], shared: list[Tensor], carried: list[Tensor], starts: Tensor, first: Tensor,
    program: str,
) -> list[Tensor]:  # fmt: skip
    step = parse(program, are_wide([*tokens, *shared]))
    lengths, seen, _ = counts(Rows(first, starts, first, first))
    begins = [n == 0 for n in seen]
    rows, count = len(lengths), tokens[0].shape[0]
    if count == rows and not any(begins) and all(n == 1 for n in lengths):
        value, *news = step.step(rows, tokens, shared, carried)
        given = [*tokens, *carried]
        after = [_own(a.to(c.dtype), given) for a, c in zip(news, carried, strict=True)]
        return [_own(value, [*given, *news]), *after]
    after = [value.clone() for value in carried]
    places = [int(n) for n in starts.tolist()][:-1]
    beginning = [(row, places[row]) for row in range(rows) if begins[row] and lengths[row]]
    out = _steps(step.begin, tokens, shared, after, beginning, None)
    places = [at + first for at, first in zip(places, begins, strict=True)]
    lengths = [max(n - first, 0) for n, first in zip(lengths, begins, strict=True)]
    for run in RUNNERS if any(lengths) else ():
        found = run(program, tokens, shared, after, places, lengths, out)
        if found is not None:
            return [found, *after]
    for place in range(max(lengths, default=0)):
        taking = [(row, places[row] + place) for row in range(rows) if lengths[row] > place]
        out = _steps(step.step, tokens, shared, after, taking, out)
    if out is None:  # no row has a token
        out = step.step(rows, [t.new_zeros((rows, *t.shape[1:])) for t in tokens], shared, carried)[0][:0]
    return [out, *after]


def _steps(
    body: Callable[..., list[Tensor]], tokens: list[Tensor], shared: list[Tensor], carried: list[Tensor],
    taking: list[tuple[int, int]], out: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """One step of some rows, each with the place of its token: writes what is carried, and the result."""
    if not taking:
        return out
    rows, at = torch.tensor(taking, device=tokens[0].device).unbind(1)
    value, *news = body(len(taking), [t[at] for t in tokens], shared, [c[rows] for c in carried])
    if out is None:
        out = value.new_empty((tokens[0].shape[0], *value.shape[1:]))
    out[at] = value
    for kept, new in zip(carried, news, strict=True):
        kept[rows] = new.to(kept.dtype)
    return out


def _own(value: Tensor, given: list[Tensor]) -> Tensor:
    """A result in memory of its own."""
    return value.clone() if any(value is t for t in given) or value._is_view() else value


FOLDS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "prod": (torch.mul, lambda x: x.cumprod(0, dtype=x.dtype)),
    "max": (torch.maximum, lambda x: x.cummax(0).values),
    "min": (torch.minimum, lambda x: x.cummin(0).values),
    "logsumexp": (torch.logaddexp, lambda x: x.logcumsumexp(0)),
}
"""Of two values, and of all values up to each."""
EXACT = ("max", "min")
"""Those that round nothing."""


@declare(fake=lambda a: (torch.empty_like(a.x), torch.empty_like(a.state)), derivatives=INSTEAD)
def running_fold(x: Tensor, state: Tensor, starts: Tensor, first: Tensor, how: str) -> tuple[Tensor, Tensor]:
    of_two, of_all = FOLDS[how]
    lengths, seen, _ = counts(Rows(first, starts, first, first))
    if x.shape[0] == len(lengths) and all(n == 1 for n in lengths):
        after = of_two(state, x.to(state.dtype))
        if not all(seen):
            after = torch.where((first > 0).view(-1, *(1 for _ in x.shape[1:])), after, x)
        return after.to(x.dtype, copy=True), after
    outs, after = [], state.clone()
    for row, part in enumerate(torch.split(x.to(state.dtype), lengths)):
        if lengths[row]:
            known = [state[row : row + 1]] if seen[row] else []
            outs.append(of_all(torch.cat([*known, part]))[len(known) :])
            after[row] = outs[-1][-1]
    return torch.cat(outs).to(x.dtype) if outs else x.clone(), after
