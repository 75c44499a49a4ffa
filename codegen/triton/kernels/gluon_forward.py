"""The forward kernel of GPUs whose warps form groups (sm_90), in Gluon: the sums of `forward.py`, made by two
kinds of warps. One warp, the producer, copies tiles of keys and values to shared memory (TMA). Two groups of
four warps, the consumers, take 64 queries each, so that a tile is fetched once for 128.

A consumer's turn is that of `forward.py` with AHEAD: it asks for the products of queries and the keys of tile
i; beside these it makes weights of the exponents that the turn before has left, and asks for their products
with the values of tile i - 1. And the groups take turns (`turns`): while one's products are computed the
other makes exponentials (Shah et al. 2024, FlashAttention-3, section 3.1).

Barriers lie in shared memory. One is in phase 0 or 1, and `wait(p)` waits until phase p has ended, which it
does when all who are counted have arrived and all bytes that are expected have come. Tile i is in place
i % STAGES, in round i // STAGES: it is `there` when it has been copied, and its place is `free` when both
groups have read it, which is when they have waited for the products that read it.

Names in capitals, and those that a plan may not have (`acc_rest`, `multiple`), are explained in `emit.py`.
"""

import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
import triton.experimental.gluon.language.nvidia.hopper as hopper
import triton.experimental.gluon.language.nvidia.hopper.mbarrier as mbarrier
import triton.experimental.gluon.language.nvidia.hopper.tma as tma
import triton.language as tl

from attngraph.codegen.triton.fold import part

BLOCK_Q = tl.constexpr(ROWS)
BLOCK_K = tl.constexpr(COLUMNS)
STAGES = tl.constexpr(TILES_IN_FLIGHT)
GROUP_ROWS = tl.constexpr(ROWS // 2)  # queries of a group of warps
if LINEAR:
    RATE = tl.constexpr(SCALE_IN_BITS)  # scale times log2(e)
else:
    LOG2E = tl.constexpr(1.4426950408889634)
# How the numbers of a tile of scores, and of sums of values, lie in the registers of a group.
SCORES = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
for VALUE, VALUES, TOTAL, LAYOUT, PART_OF_D, BEGIN, INSIDE in VALUE_PARTS:
    LAYOUT = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_OF_D, 16]))


@gluon.jit
def consume(
    WHICH: gl.constexpr,
    key, value, key_rest, value_rest,
    queries, keys, values, queries_rest, keys_rest, values_rest,
    query_there, key_there, key_free, value_there, value_free, turns, told, all_told,
    out, lse,
    b, h, first, Hq, Sq, Skv,
    whole, stop, every, line,
    READS,
):  # fmt: skip
    """Output and log-sum-exp of the queries of one group of warps."""
    at = first + WHICH * GROUP_ROWS
    q = long(at + rows_in(SCORES))  # [GROUP_ROWS, 1]
    across = columns_in(SCORES, BLOCK_K)
    blank = gl.zeros([GROUP_ROWS, BLOCK_K], tl.float32, SCORES)
    BEFORE
    if SINK:
        begin_rows(False, gl.zeros([GROUP_ROWS, 1], tl.float32, SCORES))
        m = tl.max(m, 1)  # [GROUP_ROWS]
        l = tl.max(l, 1)
    else:
        begin_rows(False, gl.zeros([GROUP_ROWS], tl.float32, gl.SliceLayout(1, SCORES)))
    for VALUE, VALUES, TOTAL, LAYOUT, PART_OF_D, BEGIN, INSIDE in VALUE_PARTS:
        TOTAL = gl.zeros([GROUP_ROWS, PART_OF_D], tl.float32, LAYOUT)
    if LAST_KEYS:
        last_key = tl.minimum(q + SHIFT if SHIFT else q, Skv - 1)  # [GROUP_ROWS, 1]
    mbarrier.wait(query_there, 0)
    i = 0
    mbarrier.wait(key_there.index(0), 0)
    multiply()
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(key_free.index(0))
    score(EDGE)
    prepare()
    for i in range(1, whole):
        turn(WHOLE)
    for i in range(tl.maximum(whole, 1), stop):  # at an edge
        turn(EDGE)
    if FILL:
        tell_lowest()
        hear_lowest(4)
        for i in range(tl.maximum(stop, 1), every):  # behind the fill
            turn(EDGE)
    i = tl.maximum(every if FILL else stop, 1)
    absorb_behind()
    wait_for_sums()
    q = long(at + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, SCORES)))
    tl.store(lse + (tl.cast(b, tl.int64) * Hq + h) * Sq + q, log_sum(m), mask=q < Sq)
    weight = l
    for VALUE, VALUES, TOTAL, LAYOUT, PART_OF_D, BEGIN, INSIDE in VALUE_PARTS:
        l = by_rows(weight, LAYOUT)
        q = long(at + rows_in(LAYOUT))
        column = BEGIN + columns_in(LAYOUT, PART_OF_D)
        result = out + ((tl.cast(b, tl.int64) * Sq + q) * Hq + h) * WIDTH_OF_VALUES + column
        tl.store(result, divided(TOTAL), mask=(q < Sq) & INSIDE)


@gluon.jit
def produce(*consume):
    """Copy the tiles that the queries visit to shared memory."""
    kv = head_of_keys()
    for i in range(0, tl.maximum(stop, 1)):
        fetch()
    if FILL:
        hear_lowest(1)
        for i in range(tl.maximum(stop, 1), every):
            fetch()


@gluon.jit(do_not_specialize=COUNTS) if COUNTS else gluon.jit
def KERNEL(
    query, key, value, query_rest, key_rest, value_rest, out, lse,
    Hq, Sq, Skv,
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
    b = place // blocks // Hq
    h = place // blocks % Hq
    find_bounds(BLOCK_Q, BLOCK_K)
    for QUERY, QUERIES, KEY, KEYS, PART_OF_D, BEGIN in KEY_PARTS:
        QUERIES = room_for(QUERY, 2)
        KEYS = room_for(KEY, STAGES)
    for VALUE, VALUES, TOTAL, LAYOUT, PART_OF_D, BEGIN, INSIDE in VALUE_PARTS:
        VALUES = room_for(VALUE, STAGES)
    query_there = barriers(1)
    key_there = barriers(STAGES)
    key_free = barriers(STAGES)
    value_there = barriers(STAGES)
    value_free = barriers(STAGES)
    turns = barriers(2)
    if FILL:
        told = gl.allocate_shared_memory(tl.float32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        all_told = barriers(1)
        mbarrier.init(all_told.index(0), count=2)
    mbarrier.init(query_there.index(0), count=1)
    for n in gl.static_range(2):
        mbarrier.init(turns.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(key_there.index(n), count=1)
        mbarrier.init(key_free.index(n), count=2)
        mbarrier.init(value_there.index(n), count=1)
        mbarrier.init(value_free.index(n), count=2)
    mbarrier.expect(query_there.index(0), ROWS * WIDTH_OF_KEYS * BYTES)
    for n in gl.static_range(2):
        for QUERY, QUERIES, KEY, KEYS, PART_OF_D, BEGIN in KEY_PARTS:
            COPY_IN(QUERY, [b, h, first + n * GROUP_ROWS, BEGIN], query_there.index(0), QUERIES.index(n))
    mbarrier.arrive(turns.index(0))  # which group is first
    given = (
        key, value, key_rest, value_rest,
        queries, keys, values, queries_rest, keys_rest, values_rest,
        query_there.index(0), key_there, key_free, value_there, value_free, turns, told, all_told.index(0),
        out, lse, b, h, first, Hq, Sq, Skv, whole, stop, every, line,
        GIVEN,
    )  # fmt: skip
    gl.warp_specialize(
        [(consume, (0,) + given), (consume, (1,) + given), (produce, (2,) + given)],
        [4, 1],
        [REGISTERS, REGISTERS_OF_PRODUCER],
    )


# --- parts ---


@part
def turn(TILE):
    """One turn of a consumer's loops, as `turn` of `forward.py` with AHEAD."""
    mbarrier.wait(key_there.index(i % STAGES), i // STAGES & 1)
    mbarrier.wait(turns.index(WHICH), (i - 1) & 1)
    multiply()
    absorb_behind()
    mbarrier.arrive(turns.index(1 - WHICH))
    s = hopper.warpgroup_mma_wait(PRODUCTS_OF_VALUES, deps=(s,))
    mbarrier.arrive(key_free.index(i % STAGES))
    score(TILE)
    prepare()
    wait_for_sums()


@part
def multiply():
    """Ask for the dots of tile i."""
    s = blank
    for QUERY, QUERIES, KEY, KEYS, PART_OF_D, BEGIN in KEY_PARTS:
        key_tile = KEYS.index(i % STAGES).reshape([BLOCK_K, PART_OF_D]).permute((1, 0))
        query_tile = QUERIES.index(WHICH).reshape([GROUP_ROWS, PART_OF_D])
        s = hopper.warpgroup_mma(query_tile, key_tile, s, use_acc=BEGIN > 0, is_async=True)


@part
def score(TILE):
    """The scores of tile i by the program's formulas, minus infinity where keys are hidden."""
    if TILE.uses_k or TILE.is_edge:
        start = tl.load(line + i) * BLOCK_K if LISTED else i * BLOCK_K
    if TILE.uses_k:
        k = long(start + across)
    if TILE.uses_dot:
        dot = s
    TILE.scores
    if TILE.is_edge:
        # In this form: differences that no turn changes would be kept in registers, and without room ptxas
        # computes all exponentials before it asks for products.
        s = tl.where(start + across <= last_key if LAST_KEYS else start + across < Skv, s, float("-inf"))
    multiple = blank + TILE.multiple


@part
def prepare():
    """The rows' maximum with scores s, the exponents of their weights, and what older sums weigh."""
    top = largest()
    shrink = tl.exp2(fall())
    m = top
    top = tl.expand_dims(top, 1)
    exponents = exponents_now()


@part
def absorb_behind():
    """Make weights of the exponents of tile i - 1, and ask for their products with its values."""
    w = tl.exp2(exponents)
    sum_weights(queries)
    mbarrier.wait(value_there.index((i - 1) % STAGES), (i - 1) // STAGES & 1)
    for VALUE, VALUES, TOTAL, LAYOUT, PART_OF_D, BEGIN, INSIDE in VALUE_PARTS:
        value_tile = VALUES.index((i - 1) % STAGES).reshape([BLOCK_K, PART_OF_D])
        weights = gl.convert_layout(w, gl.DotOperandLayout(0, LAYOUT, 2))
        TOTAL = hopper.warpgroup_mma(weights, value_tile, TOTAL * by_rows(shrink, LAYOUT), is_async=True)


@part
def wait_for_sums():
    """Wait for the products with values, whose place is free then."""
    TOTALS = hopper.warpgroup_mma_wait(0, deps=[TOTALS])
    mbarrier.arrive(value_free.index((i - 1) % STAGES))


@part
def fetch():
    """Copy tile i when its place is free."""
    start = tl.load(line + i) * BLOCK_K if LISTED else i * BLOCK_K
    n = i % STAGES
    mbarrier.wait(key_free.index(n), i // STAGES & 1 ^ 1)
    mbarrier.expect(key_there.index(n), COLUMNS * WIDTH_OF_KEYS * BYTES)
    for QUERY, QUERIES, KEY, KEYS, PART_OF_D, BEGIN in KEY_PARTS:
        COPY_IN(KEY, [b, kv, start, BEGIN], key_there.index(n), KEYS.index(n))
    mbarrier.wait(value_free.index(n), i // STAGES & 1 ^ 1)
    mbarrier.expect(value_there.index(n), COLUMNS * WIDTH_IN_TILES * BYTES)
    for VALUE, VALUES, TOTAL, LAYOUT, PART_OF_D, BEGIN, INSIDE in VALUE_PARTS:
        COPY_IN(VALUE, [b, kv, start, BEGIN], value_there.index(n), VALUES.index(n))


@part
def tell_lowest():
    """A row that has a larger score than the fill gives no weight to keys behind it. Whether there is another
    row both groups and the producer must know."""
    lowest = tl.min(tl.where(q < Sq, tl.expand_dims(m, 1), float("inf")))
    told.index(WHICH).store(gl.full([32], lowest, tl.float32, gl.BlockedLayout([1], [32], [4], [0])))
    BARRIER
    mbarrier.arrive(all_told)


@part
def hear_lowest(WARPS):
    mbarrier.wait(all_told, 0)
    lowest = told.index(0).load(gl.BlockedLayout([1], [32], [WARPS], [0]))
    lowest = tl.minimum(lowest, told.index(1).load(gl.BlockedLayout([1], [32], [WARPS], [0])))
    every = tl.where(tl.min(lowest, 0) > LOW, stop, every)


# Numbers of rows beside a tile in a layout.
by_rows = part(
    lambda numbers, LAYOUT: tl.expand_dims(gl.convert_layout(numbers, gl.SliceLayout(1, LAYOUT)), 1)
)
