"""`attngraph::running_sum` against the recurrence that it stands for, token by token in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from attngraph.ir.ops.running_sum import running_sum


def one_by_one(
    q: Tensor | None, k: Tensor | None, v: Tensor, decay: Tensor | None, state: Tensor, inclusive: bool,
    left: Tensor | None, right: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    outs = []
    for t in range(len(v)):
        before = state
        added = v[t, :, None] if k is None else k[t, :, :, None] * v[t, :, None]
        if left is not None and right is not None:
            added = added + left[t].mT @ (right[t] @ state)
        state = (state if decay is None else state * decay[t, :, :, None]) + added
        read = state if inclusive else before
        outs.append(read[:, 0] if q is None else (q[t, :, :, None] * read).sum(1))
    return torch.stack(outs) if outs else v, state


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("across", [0, 1, 2])
@pytest.mark.parametrize("kind", ["sum", "plain", "scalar", "vector", "zeros and signs"])
@pytest.mark.parametrize("lengths", [(1, 1), (1,), (150,), (70, 0, 3), (2, 0), (5, 5)])
def test_it_is_the_recurrence(lengths: tuple[int, ...], kind: str, inclusive: bool, across: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    n, heads, width, values = sum(lengths), 2, 1 if kind == "sum" else 3, 4
    q, k = (None, None) if kind == "sum" else (draw(n, heads, width), draw(n, heads, width))
    v, state = draw(n, heads, values), draw(len(lengths), heads, width, values)
    decay = None
    if kind == "scalar":
        decay = draw(n, heads, 1).sigmoid()
    elif kind == "vector":
        decay = draw(n, heads, width).exp().neg().exp()
    elif kind == "zeros and signs":
        decay = draw(n, heads, width).tanh().masked_fill(draw(n, heads, width) > 1, 0.0)
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    left = right = None
    if across:
        left, right = (draw(n, heads, across, width).tanh() / 3 for _ in range(2))
    out, after = running_sum(q, k, v, decay, state, starts, inclusive, left, right)
    for row, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        parts = [None if t is None else t[start:end] for t in (q, k, v, decay, left, right)]
        wanted, last = one_by_one(*parts[:4], state[row], inclusive, *parts[4:])  # type: ignore[arg-type]
        torch.testing.assert_close(out[start:end], wanted)
        torch.testing.assert_close(after[row], last)


def test_a_decay_that_vanishes_over_many_tokens_gives_no_nan() -> None:
    v, k = torch.ones(200, 1, 2), torch.ones(200, 1, 3)
    decay = torch.full((200, 1, 1), 1e-20)
    out, after = running_sum(k, k, v, decay, torch.zeros(1, 1, 3, 2), torch.tensor([0, 200]))
    torch.testing.assert_close(out, torch.full((200, 1, 2), 3.0))
    assert after.isfinite().all()


def test_counts_are_exact() -> None:
    v = torch.ones(50, 1, 1, dtype=torch.int64)
    state = torch.full((1, 1, 1, 1), 2**60)
    out, after = running_sum(None, None, v, None, state, torch.tensor([0, 50]))
    assert out[-1].item() == after.item() == 2**60 + 50
