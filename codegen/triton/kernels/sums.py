"""Sums that a decoder carries from token to token (`ir/ops/running_sum.py`).

A program takes one row, one head and some columns of its matrix, which stays in registers while the row's few
new tokens are added: a column depends on no other one. The matrix is read and written once, whatever the
tokens. What names in capitals say is in `SumsPlan`.
"""

import triton
import triton.language as tl

from attngraph.codegen.triton.fold import part

DEPTH = tl.constexpr(ELEMENTS)
COLUMNS = tl.constexpr(COLUMNS_AT_ONCE)
if DELTAS:
    VECTORS = tl.constexpr(DELTAS)


@triton.jit
def running_sum(
    q, k, v, decay, left, right,
    state, after, out, starts,
    heads, width,
    q_t, q_h, q_d,
    k_t, k_h, k_d,
    v_t, v_h, v_d,
    decay_t, decay_h, decay_d,
    left_t, left_h, left_m, left_d,
    right_t, right_h, right_m, right_d,
):  # fmt: skip
    """A row's new tokens, for one head and some columns of its matrix."""
    head = tl.program_id(0)
    b, h = head // heads, head % heads
    e = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, ROWS)
    inside = e < width
    place = (tl.cast(head, tl.int64) * DEPTH + d[:, None]) * width + e[None, :]
    within = (d < DEPTH)[:, None] & inside[None, :]
    matrix = tl.load(state + place, mask=within, other=0.0).to(SUMS)
    for t in tl.range(tl.load(starts + b), tl.load(starts + b + 1)):
        values = tl.load(v + t * v_t + h * v_h + e * v_d, mask=inside, other=0.0).to(SUMS)[None, :]
        keys = of_key(k + t * k_t + h * k_h + d * k_d)[:, None]
        if DECAY == "each":
            rate = more(of_key(decay + t * decay_t + h * decay_h + d * decay_d)[:, None])
        elif DECAY:
            rate = more(tl.load(decay + t * decay_t + h * decay_h).to(SUMS))
        following = kept() + added()
        if DELTAS:
            for m in tl.static_range(VECTORS):
                reading = of_key(right + t * right_t + h * right_h + m * right_m + d * right_d)[:, None]
                writing = of_key(left + t * left_t + h * left_h + m * left_m + d * left_d)[:, None]
                following += writing * tl.sum(matrix * reading, 0)[None, :]
        queries = of_key(q + t * q_t + h * q_h + d * q_d)[:, None]
        tl.store(out + (t * heads + h) * width + e, tl.sum(read(), 0), mask=inside)
        matrix = following
    tl.store(after + place, matrix, mask=within)


# --- parts ---


# A number for each element of a key.
of_key = part(lambda place: tl.load(place, mask=d < DEPTH, other=0.0).to(SUMS))
more = part(lambda rate: rate + 1.0 if LESS_ONE else rate)
kept = part(lambda: matrix * rate if DECAY else matrix)
added = part(lambda: keys * values if KEYS else values)
read = part(lambda: queries * carried() if QUERIES else carried())
carried = part(lambda: following if INCLUSIVE else matrix)
