"""Sums over earlier tokens that are carried from step to step.

A step computes new tokens of several rows, packed (`ir/ops/cached_attention.py`): tokens starts[r] ..
starts[r + 1] - 1 belong to row r. For every row and head a matrix is carried,

    S_t = decay_t * S_(t-1) + k_t v_t^T         out_t = q_t S_t    (not inclusive: q_t S_(t-1))

from `state` to `after`, both `[rows, H, D, Dv]`. q, k are `[N, H, D]`, v and out `[N, H, Dv]`, decay is `[N,
H, D]` or `[N, H, 1]`, to which 1 is added if it is given `less_one`: so a decay near 1 has more digits.
Without q and k the matrix is a vector: D is 1, and both count as 1. With left and right, `[N, H, M, D]`, what
a token carries on also depends on what M of its vectors make of the matrix (a delta rule: left = -beta k,
right = k):

    S_t = decay_t * S_(t-1) + left_t^T (right_t S_(t-1)) + k_t v_t^T

Then left_t are M more keys, whose values u_t = right_t S_(t-1) are unknown. Within a chunk they are what
solves a triangular system (Yang et al. 2024, arXiv 2406.06484, section 3.2).

`in_order`: token after token, so that chunks of any length give the same numbers, bit for bit. Elsewhere many
tokens are computed in chunks by matrix products, at a cost linear in the tokens. The decay between two
tokens of a chunk is the product of the decays between them: nothing is divided, and no exponential of a
positive number is taken, so products that vanish do no harm (Yang et al. 2024, arXiv 2312.06635, section 4;
Dao & Gu 2024, arXiv 2405.21060, section 6).

The state may be wider than the operands: what is carried over many tokens is then rounded as little as sums
of a whole sequence are, which PyTorch adds up in float64 or by blocks. What is computed within a chunk is
not.
"""

import itertools

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attngraph.ir.ops.cached_attention import numbers_of
from attngraph.ir.ops.declare import INSTEAD, declare, require_no_order

CHUNK, CHUNK_OF_VECTORS = 64, 16
"""Tokens computed at once; where every key digit has a decay of its own, products of decays are larger."""


@declare(fake=lambda a: (torch.empty_like(a.v), torch.empty_like(a.state)), derivatives=INSTEAD)
def running_sum(
    q: Tensor | None, k: Tensor | None, v: Tensor, decay: Tensor | None, state: Tensor, starts: Tensor,
    inclusive: bool = True, left: Tensor | None = None, right: Tensor | None = None, less_one: bool = False,
    in_order: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    require_no_order(in_order, v, "sums over earlier tokens")
    if decay is not None:
        decay = decay.to(state.dtype) + 1 if less_one else decay.to(state.dtype)
    tokens = v.shape[0]
    lengths = [b - a for a, b in itertools.pairwise(numbers_of(starts))]
    if all(n == 1 for n in lengths):
        return _one_token(q, k, v, decay, state, inclusive, left, right)
    given = [None if t is None else _by_rows(t, lengths, fill) for t, fill in
             ((q, 0.0), (k, 0.0), (v, 0.0), (decay, 1.0), (left, 0.0), (right, 0.0))]  # fmt: skip
    assert given[2] is not None
    out, after = _many_tokens(given[0], given[1], given[2], given[3], state, inclusive, *given[4:])
    if len(lengths) == 1:
        return out[0, :tokens].clone(), after
    return torch.cat([row[:n] for row, n in zip(out, lengths, strict=True)]), after


def _one_token(
    q: Tensor | None, k: Tensor | None, v: Tensor, decay: Tensor | None, state: Tensor, inclusive: bool,
    left: Tensor | None, right: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    added = v.unsqueeze(-2) if k is None else k.unsqueeze(-1) * v.unsqueeze(-2)
    if left is not None and right is not None:
        added = added + left.mT.to(state.dtype) @ (right.to(state.dtype) @ state)
    after = (state if decay is None else state * decay.unsqueeze(-1)) + added
    read = after if inclusive else state
    out = read.squeeze(-2) if q is None else torch.matmul(q.unsqueeze(-2).to(read.dtype), read).squeeze(-2)
    return out.to(v.dtype) if out.dtype != v.dtype else out.clone(), after.to(state.dtype)


def _by_rows(value: Tensor, lengths: list[int], fill: float) -> Tensor:
    """A packed value as `[rows, longest, ...]`."""
    if len(set(lengths)) == 1:
        return value.reshape(len(lengths), lengths[0], *value.shape[1:])
    return pad_sequence(list(torch.split(value, lengths)), batch_first=True, padding_value=fill)


def _many_tokens(
    q: Tensor | None, k: Tensor | None, v: Tensor, decay: Tensor | None, state: Tensor, inclusive: bool,
    left: Tensor | None, right: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`[rows, T, H, ...]` each."""
    if q is None and k is None and decay is None and left is None:  # a vector is added up
        sums = v.cumsum(1, dtype=state.dtype) + state.squeeze(-2).unsqueeze(1)
        last = sums[:, -1:] if v.shape[1] else state.squeeze(-2).unsqueeze(1)
        read = sums if inclusive else torch.cat([state.squeeze(-2).unsqueeze(1), sums[:, :-1]], 1)
        return read.to(v.dtype), last.squeeze(1).unsqueeze(-2).clone()
    of_vectors = decay is not None and decay.shape[-1] > 1
    chunk = CHUNK_OF_VECTORS if of_vectors else CHUNK
    ones = v.new_ones(()).expand(*v.shape[:3], 1)
    outs: list[Tensor] = []
    within = v.dtype if v.dtype.itemsize >= 4 else state.dtype
    for start in range(0, v.shape[1], chunk):
        q_c, k_c, v_c, decay_c, left_c, right_c = (
            None if t is None else t[:, start : start + chunk].to(dtype).transpose(1, 2)
            for t, dtype in (
                (ones if q is None else q, within), (ones if k is None else k, within), (v, within),
                (decay, state.dtype), (left, within), (right, within),
            )
        )  # fmt: skip
        assert q_c is not None and k_c is not None and v_c is not None
        decays = _Decays(decay_c, k_c)
        out, added = _chunk(decays, q_c, k_c, v_c, state.to(within), inclusive, left_c, right_c)
        state = decays.over(state) + added
        outs.append(out)
    found = torch.cat(outs, 2).transpose(1, 2) if outs else v
    return found.to(v.dtype), state


class _Decays:
    """The decays of a chunk: `until`, from its beginning to after each token, `[rows, H, C, E]`, and
    `between` two tokens, `[rows, H, C, C, E]`; E is 1 or D. `before` and `earlier` are without the later
    token's own."""

    def __init__(self, decay: Tensor | None, like: Tensor) -> None:
        self.decay = decay
        if decay is None:
            self.until = like.new_ones(like.shape[2], 1).expand(*like.shape[:2], -1, -1)
            self.between = like.new_ones(like.shape[2], like.shape[2]).tril()[None, None, :, :, None]
        else:
            self.until, self.between = decay.cumprod(2).to(like.dtype), _between(decay.to(like.dtype))

    def over(self, state: Tensor) -> Tensor:
        """A matrix at the end of the chunk."""
        return state if self.decay is None else state * self.decay.prod(2).unsqueeze(-1)

    def before(self) -> Tensor:
        return torch.cat([torch.ones_like(self.until[:, :, :1]), self.until[:, :, :-1]], 2)

    def earlier(self) -> Tensor:
        return torch.cat([torch.zeros_like(self.between[:, :, :1]), self.between[:, :, :-1]], 2)


def _scores(q: Tensor, k: Tensor, between: Tensor) -> Tensor:
    """`[rows, H, C * n, C * m]`, of n queries and m keys for each of C tokens: `[rows, H, C, n or m, D]`."""
    if between.shape[-1] == 1:
        found = torch.einsum("rhtnd,rhsmd->rhtnsm", q, k) * between.squeeze(-1)[:, :, :, None, :, None]
    else:
        found = torch.einsum("rhtnd,rhsmd,rhtsd->rhtnsm", q, k, between)
    return found.flatten(4, 5).flatten(2, 3)


def _chunk(
    decays: _Decays, q: Tensor, k: Tensor, v: Tensor, state: Tensor, inclusive: bool, left: Tensor | None,
    right: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One chunk, `[rows, H, C, D or Dv]`, and what it adds to the matrix that is carried."""
    q, keys, values = q.unsqueeze(3), k.unsqueeze(3), v.unsqueeze(3)  # [rows, H, C, 1, D or Dv]
    if left is not None and right is not None:
        seen, before = decays.earlier(), decays.before().unsqueeze(3)
        known = _scores(right, keys, seen) @ v + ((right * before) @ state.unsqueeze(2)).flatten(2, 3)
        system = -_scores(right, left, seen)
        u = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        keys = torch.cat([keys, left], 3)
        values = torch.cat([values, u.unflatten(2, right.shape[2:4])], 3)
    kept, reached = decays.between, decays.until
    if not inclusive:  # what a token reads has not decayed at the token itself
        kept, reached = decays.earlier(), decays.before()
    out = _scores(q, keys, kept) @ values.flatten(2, 3)
    out = out + ((q * reached.unsqueeze(3)) @ state.unsqueeze(2)).flatten(2, 3)
    carried = keys * decays.between[:, :, -1].unsqueeze(3)
    return out, carried.flatten(2, 3).mT @ values.flatten(2, 3)


def _between(decay: Tensor) -> Tensor:
    """For tokens t >= s of a chunk, `[t, s]`: the product of the decays after s up to t; zero for t < s."""
    count = decay.shape[2]
    later = torch.ones(count, count, dtype=torch.bool, device=decay.device).tril(-1)
    factors = torch.where(later.unsqueeze(-1), decay.unsqueeze(3), 1.0)
    seen = torch.ones(count, count, dtype=torch.bool, device=decay.device).tril()
    return torch.where(seen.unsqueeze(-1), factors.cumprod(2), 0.0)
