"""Products, maxima, minima and log-sum-exps over earlier tokens, carried from step to step.

A step computes new tokens of several rows, packed (`ir/ops/cached_attention.py`): tokens starts[r] ..
starts[r + 1] - 1 belong to row r, which has seen first[r] tokens before. x and out are `[N, ...]`, what is
carried is `[rows, ...]`, and counts for nothing in a row without earlier tokens. `how` is one of `FOLDS`. A
log-sum-exp is carried as such, so it is as stable as PyTorch's own. All is computed in the state's dtype,
which may be wider (`running_sum.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from attngraph.ir.ops.cached_attention import Rows, counts
from attngraph.ir.ops.declare import INSTEAD, declare

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
def running_fold(
    x: Tensor, state: Tensor, starts: Tensor, first: Tensor, how: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
