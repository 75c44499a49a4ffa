"""The forward kernel: the online softmax (Milakov and Gimelshein 2018, section 3) over blocks of keys, as in
FlashAttention-2 (Dao 2023, algorithm 1). One program per block of queries of one head. It has two loops with
the same turn: over whole tiles, then over those at an edge (the end of the keys, the diagonal of a causal
mask). Only the second evaluates bounds and the causal predicate. A causal program's loops end at its
diagonal. Where other masks leave out tiles, the kernel gets lists of the tiles to visit (`visits.py`): first
those in which no mask hides anything. Tiles in which all keys are behind a finite fill come last, in a third
loop, and only where the largest score of some row is near the fill.

AHEAD is for GPUs with warp groups. Without it a turn takes one tile: scores, weights, sums. The tensor cores
wait for weights, and warps for scores. With it a turn multiplies the queries and keys of tile `start`, and
joins weights and values of the tile before, `behind`, of which the turn before left the exponents. The warps
of sm_90 go on after they have asked for products, so exponentials are computed beside the products of scores,
and the rows' maxima beside those of values (Shah et al. 2024, FlashAttention-3, section 3.2, without dividing
the warps). What makes the compilers do so was found by reading machine code. Exponents are left to the next
turn: where scores are, Triton waits for all products first. Keys and values come by descriptors, that is by
the machine's own copies of blocks: they need no registers, and with loads by addresses ptxas computes all
exponentials before it asks for products. Queries lie in registers, which leaves shared memory to keys: Triton
leaves sums of products there, laid out as the next products need them, so queries become sums of no products.

Names in capitals, and those that a plan may not have (`acc_rest`, `multiple`), are explained in `emit.py`.
"""

import triton
import triton.language as tl

from attngraph.codegen.triton.fold import part

BLOCK_Q = tl.constexpr(ROWS)
BLOCK_K = tl.constexpr(COLUMNS)
if LINEAR:
    RATE = tl.constexpr(SCALE_IN_BITS)  # scale times log2(e)
else:
    LOG2E = tl.constexpr(1.4426950408889634)


if AHEAD:

    @triton.jit
    def prepare(m, s):
        """The rows' maximum with scores s, the exponents of their weights, and what older sums weigh."""
        top = largest()
        return top, exponents_now(), tl.exp2(fall())

else:

    @triton.jit
    def absorb(m, l, acc, acc_rest, s, multiple, value_tile, value_rest):
        """Join a tile of scores and values to the rows' maximum m, sum l and weighted sum acc."""
        top = largest()
        w = tl.exp2(exponents_now())
        shrink = tl.exp2(fall())
        sum_weights(value_tile)
        return top, l, weighted_sum(value_tile, acc), weighted_sum(value_rest, acc_rest)


@triton.jit(do_not_specialize=COUNTS) if COUNTS else triton.jit
def KERNEL(
    query, key, value, out, lse,
    Hq, Sq, Skv,
    query_b, query_h, query_s, query_d,
    key_b, key_h, key_s, key_d,
    value_b, value_h, value_s, value_d,
    tiles, counts, row_b, row_h,
    READS,
):  # fmt: skip
    """Output and log-sum-exp of a block of queries of one head."""
    place = tl.program_id(0)
    blocks = tl.cdiv(Sq, BLOCK_Q)
    if CAUSAL:
        first = (blocks - 1 - place % blocks) * BLOCK_Q  # blocks with the most keys go first
    else:
        first = place % blocks * BLOCK_Q
    b = long(place // blocks // Hq)
    h = long(place // blocks % Hq)
    q = long(first + tl.arange(0, BLOCK_Q)[:, None])  # [BLOCK_Q, 1]
    across = tl.arange(0, BLOCK_K)[None, :]
    if not AHEAD:
        down = tl.cast(tl.arange(0, BLOCK_K), tl.int64)[:, None]
    d = tl.cast(tl.arange(0, D), tl.int64)[None, :]
    d_rest = D + tl.cast(tl.arange(0, D_REST), tl.int64)[None, :]
    if VALUES_APART:
        dv = tl.cast(tl.arange(0, DV), tl.int64)[None, :]
        dv_rest = DV + tl.cast(tl.arange(0, DV_REST), tl.int64)[None, :]
    query_head = head_at(query, query_b, query_h, h)
    query_beside = query_head + tl.cast(q, tl.int64) * query_s + d_rest * query_d
    query_head += tl.cast(q, tl.int64) * query_s + d * query_d
    if not AHEAD:
        key_head = head_at(key, key_b, key_h, head_of_keys())
        key_beside = key_head + down * key_s + d_rest * key_d
        key_head += down * key_s + d * key_d
        value_head = head_at(value, value_b, value_h, head_of_keys())
        value_beside = value_head + down * value_s + dv_rest * value_d
        value_head += down * value_s + dv * value_d
    query_tile = tl.load(query_head, mask=(q < Sq) & IN_D, other=0.0)
    query_rest = tl.load(query_beside, mask=(q < Sq) & IN_D_REST, other=0.0)
    BEFORE
    begin_rows(False, tl.zeros([BLOCK_Q, 1], tl.float32))
    acc = tl.zeros([BLOCK_Q, DV], tl.float32)
    acc_rest = tl.zeros([BLOCK_Q, DV_REST], tl.float32)
    find_bounds(BLOCK_Q, BLOCK_K)
    if LAST_KEYS:
        last_key = tl.minimum(q + SHIFT if SHIFT else q, Skv - 1)  # [BLOCK_Q, 1]
    if AHEAD:
        query_tile = in_registers(query_tile)  # the same, in registers
        start = tl.load(line) * BLOCK_K if LISTED else 0
        multiply(EDGE)
        score(EDGE)
        if LISTED:
            behind = start
            start = tl.load(line + tl.minimum(1, tl.maximum(last, 0))) * BLOCK_K
        m, exponents, shrink = prepare(m, s)
        multiple = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32) + EDGE.multiple
    elif LISTED:
        start = tl.load(line) * BLOCK_K
    for i in tl.range(1 if AHEAD else 0, whole):
        turn(WHOLE)
    for i in tl.range(tl.maximum(whole, 1) if AHEAD else whole, stop):  # at an edge
        turn(EDGE)
    if FILL:
        # A row that has a larger score than the fill gives no weight to keys behind it.
        every = tl.where(tl.min(tl.where(q < Sq, m, float("inf"))) > LOW, stop, every)
        for i in tl.range(tl.maximum(stop, 1) if AHEAD else stop, every):  # behind the fill
            turn(EDGE)
    if AHEAD:
        if not LISTED:
            behind = (tl.maximum(every if FILL else stop, 1) - 1) * BLOCK_K
        absorb_behind()
    out_row = out + ((tl.cast(b, tl.int64) * Sq + q) * Hq + h) * WIDTH_OF_VALUES
    out_tile = divided(acc)
    tl.store(out_row + dv, out_tile, mask=(q < Sq) & IN_DV)
    out_rest = divided(acc_rest)
    tl.store(out_row + dv_rest, out_rest, mask=(q < Sq) & IN_DV_REST)
    tl.store(lse + tl.cast(place // blocks, tl.int64) * Sq + q, log_sum(m), mask=q < Sq)


# --- parts ---


@part
def turn(TILE):
    """One turn of a loop. It counts tiles, not elements: from a loop by steps of a tile, ptxas takes the
    products of sm_90 one at a time (warning C7515). The start of a listed tile is loaded one turn ahead, so
    that fetching the tile does not wait for it; both starts are, since where one is the other of the turn
    before, Triton does not fetch tiles early."""
    if not LISTED:
        start = i * BLOCK_K
        behind = start - BLOCK_K
    multiply(TILE)
    if AHEAD:
        absorb_behind()
        score(TILE)
        m, exponents, shrink = prepare(m, s)
        multiple = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32) + TILE.multiple
    else:
        score(TILE)
        value_tile = next_rows(value_head, value_s, there(TILE) & IN_DV)
        value_rest = next_rows(value_beside, value_s, there(TILE) & IN_DV_REST)
        m, l, acc, acc_rest = absorb(m, l, acc, acc_rest, s, TILE.multiple, value_tile, value_rest)
    if LISTED:
        behind = tl.load(line + i) * BLOCK_K
        start = tl.load(line + tl.minimum(i + 1, last)) * BLOCK_K


@part
def multiply(TILE):
    """The dots of a tile, and the scores where these are the dots at first."""
    if TILE.uses_k:
        k = long(start + across)
    if AHEAD:
        key_tile = key.load([b, head_of_keys(), start, 0]).reshape(BLOCK_K, D)
    else:
        key_tile = next_rows(key_head, key_s, there(TILE) & IN_D)
        key_rest = next_rows(key_beside, key_s, there(TILE) & IN_D_REST)
    if TILE.uses_dot:
        dot = product()
    else:
        s = product()
    if TILE.uses_both:
        s = dot


@part
def score(TILE):
    """The scores by the program's formulas, minus infinity where keys are hidden."""
    TILE.scores
    if TILE.is_edge:
        s = tl.where(across <= last_key - start if LAST_KEYS else across < Skv - start, s, float("-inf"))


@part
def absorb_behind():
    """Join the weights and values of the tile behind to the sums. Weights are computed before values are
    waited for, which is beside the products of scores."""
    w = tl.exp2(exponents)
    sum_weights(query_tile)
    value_tile = value.load([b, head_of_keys(), behind, 0]).reshape(BLOCK_K, DV)
    acc = weighted_sum(value_tile, acc)


there = part(lambda TILE: down < Skv - start if TILE.is_edge else True)
product = part(
    lambda: tl.dot(query_rest, tl.trans(key_rest), dots(), input_precision=EXACT) if D_REST else dots()
)
in_registers = part(
    lambda tile: tl.dot(
        tl.zeros([BLOCK_Q, 16], tile.dtype),
        tl.zeros([16, D], tile.dtype),
        tile.to(tl.float32),
        input_precision=EXACT,
    ).to(tile.dtype)
)
