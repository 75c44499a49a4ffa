"""Sums over earlier tokens that are carried from step to step.

    attngraph::running_sum(q?, k?, v, decay?, state, starts, inclusive) -> (out, after)

A step computes new tokens of several rows, packed (`ir/ops/cached_attention.py`): tokens starts[r] ..
starts[r + 1] - 1 belong to row r. For every row and head a matrix is carried,

    S_t = decay_t * S_(t-1) + k_t v_t^T         out_t = q_t S_t    (not inclusive: q_t S_(t-1))

from `state` to `after`, both `[rows, H, D, Dv]`. q, k are `[N, H, D]`, v and out `[N, H, Dv]`, decay is
`[N, H, D]` or `[N, H, 1]`. Without q and k the matrix is a vector: D is 1, and both count as 1.

Many tokens are computed in chunks by matrix products, at a cost linear in the tokens. The decay between two
tokens of a chunk is the product of the decays between them: nothing is divided, and no exponential of a
positive number is taken, so products that vanish do no harm (Yang et al. 2024, arXiv 2312.06635, section 4;
Dao & Gu 2024, arXiv 2405.21060, section 6).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from attngraph.ir.ops.cached_attention import INSTEAD
from attngraph.ir.ops.transforms import refuse_derivatives

CHUNK, CHUNK_OF_VECTORS = 64, 16
"""Tokens computed at once; where every key digit has a decay of its own, products of decays are larger."""

torch.library.define(
    "attngraph::running_sum",
    "(Tensor? q, Tensor? k, Tensor v, Tensor? decay, Tensor state, Tensor starts, bool inclusive=True) "
    "-> (Tensor, Tensor)",
)


@torch.library.impl("attngraph::running_sum", "CompositeExplicitAutograd")
def _running_sum(
    q: Tensor | None, k: Tensor | None, v: Tensor, decay: Tensor | None, state: Tensor, starts: Tensor,
    inclusive: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, rows = v.shape[0], state.shape[0]
    if tokens == rows:
        lengths = (starts[1:] - starts[:-1]).tolist()
        if all(n == 1 for n in lengths):
            return _one_token(q, k, v, decay, state, inclusive)
    else:
        lengths = (starts[1:] - starts[:-1]).tolist()
    given = [None if t is None else _by_rows(t, lengths, fill) for t, fill in
             ((q, 0.0), (k, 0.0), (v, 0.0), (decay, 1.0))]  # fmt: skip
    assert given[2] is not None
    out, after = _many_tokens(given[0], given[1], given[2], given[3], state, inclusive)
    if len(lengths) == 1:
        return out[0, :tokens].clone(), after
    return torch.cat([row[:n] for row, n in zip(out, lengths, strict=True)]), after


def _one_token(
    q: Tensor | None, k: Tensor | None, v: Tensor, decay: Tensor | None, state: Tensor, inclusive: bool
) -> tuple[Tensor, Tensor]:
    added = v.unsqueeze(-2) if k is None else k.unsqueeze(-1) * v.unsqueeze(-2)
    after = (state if decay is None else state * decay.unsqueeze(-1)) + added
    read = after if inclusive else state
    out = read.squeeze(-2) if q is None else torch.matmul(q.unsqueeze(-2).to(read.dtype), read).squeeze(-2)
    return out.to(v.dtype) if out.dtype != v.dtype else out.clone(), after.to(state.dtype)


def _by_rows(value: Tensor, lengths: list[int], fill: float) -> Tensor:
    """A packed value as `[rows, longest, ...]`."""
    if len(set(lengths)) == 1:
        return value.reshape(len(lengths), lengths[0], *value.shape[1:])
    made = value.new_full((len(lengths), max(lengths), *value.shape[1:]), fill)
    starts = [0, *itertools.accumulate(lengths)]
    for row, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        made[row, :length] = value[start : start + length]
    return made


def _many_tokens(
    q: Tensor | None, k: Tensor | None, v: Tensor, decay: Tensor | None, state: Tensor, inclusive: bool
) -> tuple[Tensor, Tensor]:
    """`[rows, T, H, ...]` each."""
    if q is None and k is None and decay is None:  # a vector is added up
        sums = v.cumsum(1).to(state.dtype) + state.squeeze(-2).unsqueeze(1)
        last = sums[:, -1:] if v.shape[1] else state.squeeze(-2).unsqueeze(1)
        read = sums if inclusive else torch.cat([state.squeeze(-2).unsqueeze(1), sums[:, :-1]], 1)
        return read.to(v.dtype), last.squeeze(1).unsqueeze(-2).clone()
    of_vectors = decay is not None and decay.shape[-1] > 1
    chunk = CHUNK_OF_VECTORS if of_vectors else CHUNK
    ones = v.new_ones(()).expand(*v.shape[:3], 1)
    parts = [
        None if t is None else torch.split(t.to(state.dtype).transpose(1, 2), chunk, 2)
        for t in (ones if q is None else q, ones if k is None else k, v, decay)
    ]
    outs: list[Tensor] = []
    assert parts[0] is not None and parts[1] is not None and parts[2] is not None
    for place in range(len(parts[2])):
        d = None if parts[3] is None else parts[3][place]
        out, state = _chunk(parts[0][place], parts[1][place], parts[2][place], d, state, inclusive)
        outs.append(out)
    found = torch.cat(outs, 2).transpose(1, 2) if outs else v
    return found.to(v.dtype), state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor, inclusive: bool
) -> tuple[Tensor, Tensor]:
    """One chunk, `[rows, H, C, D or Dv]`, and the matrix that is carried on."""
    count = q.shape[2]
    if decay is None:
        scores = (q @ k.mT).tril(0 if inclusive else -1)
        return scores @ v + q @ state, state + k.mT @ v
    from_start = decay.cumprod(2)  # [rows, H, C, E]
    between = _between(decay)  # [rows, H, C, C, E]
    if inclusive:
        kept, before = between, from_start
    else:  # what a token reads has not decayed at the token itself
        one = torch.ones_like(from_start[:, :, :1])
        kept = torch.cat([torch.zeros_like(between[:, :, :1]), between[:, :, :-1]], 2)
        before = torch.cat([one, from_start[:, :, :-1]], 2)
    if decay.shape[-1] == 1:
        scores = (q @ k.mT) * kept.squeeze(-1)
    else:
        scores = torch.einsum("rhtd,rhsd,rhtsd->rhts", q, k, kept)
    out = scores @ v + (q * before) @ state
    carried = k * between[:, :, count - 1]
    return out, state * from_start[:, :, count - 1].unsqueeze(-1) + carried.mT @ v


def _between(decay: Tensor) -> Tensor:
    """For tokens t >= s of a chunk, `[t, s]`: the product of the decays after s up to t; zero for t < s."""
    count = decay.shape[2]
    later = torch.ones(count, count, dtype=torch.bool, device=decay.device).tril(-1)
    factors = torch.where(later.unsqueeze(-1), decay.unsqueeze(3), 1.0)
    seen = torch.ones(count, count, dtype=torch.bool, device=decay.device).tril()
    return torch.where(seen.unsqueeze(-1), factors.cumprod(2), 0.0)


@torch.library.register_fake("attngraph::running_sum")  # type: ignore[untyped-decorator]
def _running_sum_fake(
    q: Tensor | None, k: Tensor | None, v: Tensor, decay: Tensor | None, state: Tensor, starts: Tensor,
    inclusive: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(v), torch.empty_like(state)


running_sum = torch.ops.attngraph.running_sum.default
refuse_derivatives("running_sum", INSTEAD)
