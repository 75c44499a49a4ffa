"""The backward kernel of GPUs whose warps form groups (sm_90), in Gluon: five products where the two kernels
of `backward.py` have seven. It takes what the first of these prepares (`delta`, `tops`, `totals`).

A program owns 128 keys of a head, 64 for each of two groups of four warps, the consumers. One warp, the
producer, copies tiles of queries and of gradients of the output, of all heads that share the keys, to shared
memory. A consumer's turn makes the weights p of a tile anew and, of these, ds, the gradients of scores, both
with keys as rows. From registers they are multiplied by the gradients and the queries; dv and dk are summed
in registers. From shared memory, transposed, ds is multiplied by the keys: a part of dq, to which all blocks
of keys contribute. One more warp, the adder, lets the machine add it in memory (TMA), in single precision.

ORDERED says that dq is summed in the order of the keys, so that the same call gives the same gradients: each
tile of queries has a number, `turns`, of blocks of keys that have been added, and the adder of block n waits
until it is n (of lists: as many as `ranks` says). Programs begin in the order of their numbers, so the one
that is waited for runs or has ended.

Barriers are explained in `gluon_forward.py`, parts of a tile in `parts.py`, names in capitals in `emit.py`.
"""

import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
import triton.experimental.gluon.language.nvidia.hopper as hopper
import triton.experimental.gluon.language.nvidia.hopper.mbarrier as mbarrier
import triton.experimental.gluon.language.nvidia.hopper.tma as tma
import triton.language as tl

from attngraph.codegen.triton.fold import part

OWN = tl.constexpr(ROWS)
OTHER = tl.constexpr(COLUMNS)
STAGES = tl.constexpr(TILES_IN_FLIGHT)
GROUP_ROWS = tl.constexpr(ROWS // 2)  # keys of a group of warps
LOG2E = tl.constexpr(1.4426950408889634)
if LINEAR:
    RATE = tl.constexpr(SCALE_IN_BITS)  # scale times log2(e)
# How the numbers of a tile of scores, and of sums for keys, for values and for queries, lie in registers.
SCORES = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
OF_KEYS = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
OF_VALUES = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16]))
OF_QUERIES = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16]))
IN_MEMORY = tl.constexpr(gl.NVMMASharedLayout.get_default_for([ROWS // 2, COLUMNS], DTYPE))


@gluon.jit
def consume(
    WHICH: gl.constexpr,
    query, grad, delta, tops, totals, lse, grad_query,
    keys, values, queries, grads, deltas, all_tops, all_totals, all_lse, slopes, sums,
    keys_there, query_there, query_free, grad_there, grad_free, sums_there, sums_free,
    turns, ranks, unseen, grad_key, grad_value,
    b, kv, first, place, Hq, Sq, Skv,
    column_tiles, column_counts, column_b, column_h,
    READS,
):  # fmt: skip
    """dk and dv of the keys of one group of warps, and their part of dq."""
    at = first + WHICH * GROUP_ROWS
    k = long(at + rows_in(SCORES))  # [GROUP_ROWS, 1]
    across = columns_in(SCORES, OTHER)
    blank = gl.zeros([GROUP_ROWS, OTHER], tl.float32, SCORES)
    key_tile = keys.index(WHICH).reshape([GROUP_ROWS, D])
    value_tile = values.index(WHICH).reshape([GROUP_ROWS, DV])
    sum_key = gl.zeros([GROUP_ROWS, D], tl.float32, OF_KEYS)
    sum_value = gl.zeros([GROUP_ROWS, DV], tl.float32, OF_VALUES)
    # The first query that sees a key; none sees one behind the end.
    if LAST_KEYS:
        first_query = tl.where(k < Skv, k - (long(SHIFT)) if SHIFT else k, Sq)  # [GROUP_ROWS, 1]
    else:
        first_query = tl.where(k < Skv, 0, Sq)
    mbarrier.wait(keys_there, 0)
    over_queries("consume")
    k = at + rows_in(OF_KEYS)
    column = columns_in(OF_KEYS, D)
    result = grad_key + (tl.cast(place, tl.int64) * Skv + k) * WIDTH + column
    tl.store(result, scaled(sum_key, grad_key), mask=k < Skv)
    k = at + rows_in(OF_VALUES)
    column = columns_in(OF_VALUES, DV)
    result = grad_value + (tl.cast(place, tl.int64) * Skv + k) * WIDTH_OF_VALUES + column
    tl.store(result, of_values(place), mask=k < Skv)


@gluon.jit
def produce(*consume):
    """Copy the tiles of queries and of gradients that see the keys to shared memory."""
    over_queries("produce")


@gluon.jit
def add(*consume):
    """Add the groups' parts of dq to what other programs have made."""
    over_queries("add")


@gluon.jit(do_not_specialize=COUNTS) if COUNTS else gluon.jit
def KERNEL(
    query, key, value, grad, delta, tops, totals, lse, grad_query,
    turns, ranks, unseen, grad_key, grad_value,
    Hq, Sq, Skv,
    column_tiles, column_counts, column_b, column_h,
    READS,
):  # fmt: skip
    """dk and dv of a block of keys, and its part of dq."""
    program = tl.program_id(0)
    blocks = tl.cdiv(Skv, OWN)
    first = program % blocks * OWN
    place = program // blocks
    b = place // (Hq // GROUP) if GROUP > 1 else place // Hq
    kv = place % (Hq // GROUP) if GROUP > 1 else place % Hq
    keys = room_for(key, 2)
    values = room_for(value, 2)
    queries = room_for(query, STAGES)
    grads = room_for(grad, STAGES)
    deltas = room_for(delta, STAGES)
    all_tops = room_for(tops, STAGES)
    all_totals = room_for(totals, STAGES)
    all_lse = room_for(lse, STAGES)
    slopes = gl.allocate_shared_memory(key.dtype, [2, GROUP_ROWS, OTHER], IN_MEMORY)  # ds
    sums = room_for(grad_query, 2)
    keys_there = barriers(1)
    query_there = barriers(STAGES)
    query_free = barriers(STAGES)
    grad_there = barriers(STAGES)
    grad_free = barriers(STAGES)
    sums_there = barriers(2)
    sums_free = barriers(2)
    mbarrier.init(keys_there.index(0), count=1)
    for n in gl.static_range(2):
        mbarrier.init(sums_there.index(n), count=1)
        mbarrier.init(sums_free.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(query_there.index(n), count=1)
        mbarrier.init(query_free.index(n), count=2)
        mbarrier.init(grad_there.index(n), count=1)
        mbarrier.init(grad_free.index(n), count=2)
    mbarrier.expect(keys_there.index(0), ROWS * (D + DV) * BYTES)
    for n in gl.static_range(2):
        COPY_IN(key, [b, kv, first + n * GROUP_ROWS, 0], keys_there.index(0), keys.index(n))
        COPY_IN(value, [b, kv, first + n * GROUP_ROWS, 0], keys_there.index(0), values.index(n))
    given = (
        query, grad, delta, tops, totals, lse, grad_query,
        keys, values, queries, grads, deltas, all_tops, all_totals, all_lse, slopes, sums,
        keys_there.index(0), query_there, query_free, grad_there, grad_free, sums_there, sums_free,
        turns, ranks, unseen, grad_key, grad_value, b, kv, first, place, Hq, Sq, Skv,
        column_tiles, column_counts, column_b, column_h,
        GIVEN,
    )  # fmt: skip
    gl.warp_specialize(
        [(consume, (0,) + given), (consume, (1,) + given), (produce, (2,) + given), (add, (2,) + given)],
        [4, 1, 1],
        [REGISTERS, REGISTERS_OF_PRODUCER, REGISTERS_OF_PRODUCER],
    )


# --- parts ---


@part
def over_queries(ROLE):
    """The tiles of queries that see the keys, of all heads that share them."""
    begin = 0
    stop = tl.cdiv(Sq, OTHER)
    if CAUSAL and not LISTED:
        begin = tl.maximum(first - long(SHIFT), 0) // OTHER if SHIFT else first // OTHER
        begin = tl.minimum(begin, stop)
    n = 0
    for member in range(GROUP):
        h = kv * GROUP + member
        if LISTED:
            find_line(column_tiles, column_counts, column_b, column_h, Sq, OWN, OTHER)
        for i in range(begin, stop):
            start = tl.load(line + i) * OTHER if LISTED else i * OTHER
            if ROLE == "consume":
                turn()
            elif ROLE == "produce":
                fetch()
            else:
                add_sums()
            n += 1


@part
def turn():
    """The n-th turn of a consumer's loop. Masks are in branches of it: of two loops, for whole tiles and for
    those at an edge, the second would find no registers."""
    query_tile = queries.index(n % STAGES).reshape([OTHER, D])
    grad_tile = grads.index(n % STAGES).reshape([OTHER, DV])
    mbarrier.wait(query_there.index(n % STAGES), n // STAGES & 1)
    dot = hopper.warpgroup_mma(key_tile, query_tile.permute((1, 0)), blank, use_acc=False, is_async=True)
    mbarrier.wait(grad_there.index(n % STAGES), n // STAGES & 1)
    weighed = hopper.warpgroup_mma(value_tile, grad_tile.permute((1, 0)), blank, use_acc=False, is_async=True)
    dot = hopper.warpgroup_mma_wait(1, deps=(dot,))
    s = dot
    q = long(start + across)
    TILE.before
    TILE.scores
    row_lse = numbers_of(all_lse)
    row_top = numbers_of(all_tops)
    row_total = numbers_of(all_totals)
    weights_again(TILE)
    weighed = hopper.warpgroup_mma_wait(0, deps=(weighed,))
    row_delta = numbers_of(deltas)
    gradients_of_dots(TILE)
    p = p.to(queries.dtype)
    ds = ds.to(queries.dtype)
    is_edge = (start + OTHER > Sq) | (first + OWN > Skv)
    if LISTED:
        is_edge = is_edge | (i >= whole)
    elif LAST_KEYS:
        is_edge = is_edge | (start < last_seen())
    if is_edge:
        # Outside of the tile, numbers of rows and formulas may be NaN or infinite.
        MASK
        inside = (q >= first_query) & (q < Sq) & KEPT
        p = tl.where(inside, p, 0.0)
        ds = tl.where(inside, ds, 0.0)
    own = slopes.index(WHICH)
    own.store(ds)
    hopper.fence_async_shared()
    weights = gl.convert_layout(p, gl.DotOperandLayout(0, OF_VALUES, 2))
    sum_value = hopper.warpgroup_mma(weights, grad_tile, sum_value, is_async=True)
    weights = gl.convert_layout(ds, gl.DotOperandLayout(0, OF_KEYS, 2))
    sum_key = hopper.warpgroup_mma(weights, query_tile, sum_key, is_async=True)
    sum_value = hopper.warpgroup_mma_wait(1, deps=(sum_value,))
    mbarrier.arrive(grad_free.index(n % STAGES))
    sum_key = hopper.warpgroup_mma_wait(0, deps=(sum_key,))
    mbarrier.arrive(query_free.index(n % STAGES))
    mbarrier.wait(sums_free.index(WHICH), n & 1 ^ 1)
    sum_query = sums.index(WHICH).reshape([OTHER, D])
    # A half at a time: for all columns at once there are no registers.
    none = gl.zeros([OTHER, D // 2], tl.float32, OF_QUERIES)
    for half in gl.static_range(2):
        columns = key_tile.slice(half * (D // 2), D // 2, dim=1)
        total = hopper.warpgroup_mma(own.permute((1, 0)), columns, none, use_acc=False, is_async=True)
        total = hopper.warpgroup_mma_wait(0, deps=(total,))
        sum_query.slice(half * (D // 2), D // 2, dim=1).store(total)
    hopper.fence_async_shared()
    mbarrier.arrive(sums_there.index(WHICH))


@part
def fetch():
    """Copy a tile when its place is free."""
    mbarrier.wait(query_free.index(n % STAGES), n // STAGES & 1 ^ 1)
    row = (b * Hq + h) * Sq + start
    mbarrier.expect(query_there.index(n % STAGES), COLUMNS * (D * BYTES + 4 * NUMBERS))
    COPY_IN(query, [b, h, start, 0], query_there.index(n % STAGES), queries.index(n % STAGES))
    COPY_IN(tops, [row], query_there.index(n % STAGES), all_tops.index(n % STAGES))
    COPY_IN(totals, [row], query_there.index(n % STAGES), all_totals.index(n % STAGES))
    COPY_IN(lse, [row], query_there.index(n % STAGES), all_lse.index(n % STAGES))
    mbarrier.wait(grad_free.index(n % STAGES), n // STAGES & 1 ^ 1)
    mbarrier.expect(grad_there.index(n % STAGES), COLUMNS * (DV * BYTES + 4))
    COPY_IN(grad, [b, h, start, 0], grad_there.index(n % STAGES), grads.index(n % STAGES))
    COPY_IN(delta, [row], grad_there.index(n % STAGES), deltas.index(n % STAGES))


@part
def add_sums():
    """Add both groups' parts of a tile when they have come; if sums are ordered, when it is their turn."""
    if ORDERED:
        turn = turns + (b * Hq + h) * tl.cdiv(Sq, OTHER) + start // OTHER
        if LISTED:
            rank = tl.load(ranks + block * tl.cdiv(Sq, OTHER) + start // OTHER)
        else:
            rank = first // OWN
        while tl.atomic_add(turn, 0, sem="acquire") < rank:
            pass
    for half in gl.static_range(2):
        mbarrier.wait(sums_there.index(half), n & 1)
        tma.async_atomic_add(grad_query, [b, h, start, 0], sums.index(half))
        if ORDERED:
            tma.store_wait(0, read_only=False)
            mbarrier.arrive(sums_free.index(half))
    if ORDERED:
        tl.atomic_add(turn, 1, sem="release")
    else:
        tma.store_wait(0)
        for half in gl.static_range(2):
            mbarrier.arrive(sums_free.index(half))


# A number for each query of the tile.
numbers_of = part(lambda all: tl.expand_dims(all.index(n % STAGES).load(gl.SliceLayout(0, SCORES)), 0))
