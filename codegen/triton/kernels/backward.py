"""The backward pass: kernels without atomics.

As in FlashAttention-2 (Dao 2023, algorithm 2) weights are computed again from the scores and the rows'
log-sum-exp, but in two kernels. In the first, each program owns a block of queries and sums dq over the keys.
In the second, each program owns a block of keys and sums dk and dv over the queries of all its heads. What a
program owns is the rows of its tiles of scores: the second kernel computes tiles transposed (`turned`), so
that they are multiplied by queries and gradients as they are. As in the forward pass, one loop takes whole
tiles and one those at an edge. Both kernels sum gradients of reads by rows or by columns
(`read_gradients.py`); a read indexed by both the query and the key has a kernel of its own. The order of sums
is fixed, so the same call gives the same gradients.

Weights are exp(s - top) / total. For most rows top is zero and total is the exponential of their log-sum-exp.
Where that is far from zero (all keys masked by a finite fill, large scores) float32 cannot hold enough digits
of it, so the kernel of queries first recomputes such rows: top is their largest score, and total the sum of
exponentials. TRUSTED says that there are none. With p the weights and delta = rowsum(dout * out) - dlse:

    ds = p * (f * (dout . v) - delta)         f: the factor by which the program changes a weight

and from ds back through the program's statements to the dot, and to the tensors that they read: a statement
s' = e(s, dot, r) contributes ds * de/dr to the gradient of r.

The kernels have the same arguments: tensors; numbers per row (`delta`, `tops` and `totals`, which the first
kernel computes for the others); `unseen` `[B, Hkv]`, zeros: the gradient that a row without keys gives to all
values (where there is such a row, the first kernel makes it NaN, as its weights are); results (dense);
lengths; strides; lists of tiles, and of the blocks of queries of a block of keys; sums for reads; for kernels
of pairs, where the sums that they store begin, and their strides; reads and sizes.
"""

import triton
import triton.language as tl

from attngraph.codegen.triton.fold import part

OWN = tl.constexpr(ROWS)
OTHER = tl.constexpr(COLUMNS)
LOG2E = tl.constexpr(1.4426950408889634)
if LINEAR:
    RATE = tl.constexpr(SCALE_IN_BITS)  # scale times log2(e)


@triton.jit(do_not_specialize=COUNTS) if COUNTS else triton.jit
def gradient_of_queries(
    query, key, value, grad, out,
    lse, grad_lse, delta, tops, totals,
    unseen, grad_query, grad_key, grad_value,
    Hq, Sq, Skv,
    query_b, query_h, query_s, query_d,
    key_b, key_h, key_s, key_d,
    value_b, value_h, value_s, value_d,
    grad_b, grad_h, grad_s, grad_d,
    out_b, out_h, out_s, out_d,
    tiles, counts, row_b, row_h, column_tiles, column_counts, column_b, column_h,
    SUMS, B, batch, first_row, sums_owner, sums_row,
    READS,
):  # fmt: skip
    """dq of a block of queries, over its keys."""
    place = tl.program_id(0)
    blocks = tl.cdiv(Sq, OWN)
    first = (blocks - 1 - place % blocks) * OWN if DIAGONAL else place % blocks * OWN
    b = long(place // blocks // Hq)
    h = long(place // blocks % Hq)
    q = long(first + tl.arange(0, OWN)[:, None])
    across = tl.arange(0, OTHER)[None, :]
    down = tl.cast(tl.arange(0, OTHER), tl.int64)[:, None]
    columns()
    kv = head_of_keys()
    row = tl.cast(place // blocks, tl.int64) * Sq + q
    row_lse = tl.load(lse + row, mask=q < Sq, other=0.0)
    # A row without keys spoils the gradient of all values. Which program says so does not matter.
    if KEEPS_NAN:
        lost = tl.max(tl.where(tl.abs(row_lse) < float("inf"), 0, 1))  # rows without keys
        tl.store(unseen + pair_of_heads(), float("nan"), mask=lost > 0)
    key_head = head_at(key, key_b, key_h, kv)
    key_head += down * key_s + d * key_d
    value_head = head_at(value, value_b, value_h, kv)
    value_head += down * value_s + dv * value_d
    OVER_KEYS.before
    find_bounds(OWN, OTHER)
    if LAST_KEYS:
        last_key = tl.minimum(q + SHIFT if SHIFT else q, Skv - 1)  # [OWN, 1]
    if FILL:
        stop = tl.where(tl.min(tl.where(q < Sq, row_lse, float("inf"))) > LOW, stop, every)
    if not TRUSTED:
        sum_far_rows()
    load_gradients()
    out_head = head_at(out, out_b, out_h, h)
    out_tile = rows_at(out_head, q, out_s, dv, out_d, (q < Sq) & IN_DV)
    row_delta = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1, keep_dims=True)
    row_delta -= tl.load(grad_lse + row, mask=q < Sq, other=0.0)
    tl.store(delta + row, row_delta, mask=q < Sq)
    if QUERIES or OF_ROWS:
        load_queries()
        if QUERIES:
            sum = tl.zeros([OWN, D], tl.float32)
        for SUM, SUMS_OF, OF_READ in OF_ROWS:
            SUM = tl.zeros([OWN, 1], tl.float32)
        if LISTED:
            start = tl.load(line) * OTHER
        for i in tl.range(0, whole):
            turn_of_keys(OVER_KEYS.whole)
        for i in tl.range(whole, stop):  # at an edge
            turn_of_keys(OVER_KEYS.edge)
        if QUERIES:
            result = grad_query + row * WIDTH + d
            tl.store(result, scaled(sum, grad_query), mask=(q < Sq) & IN_D)
        for SUM, SUMS_OF, OF_READ in OF_ROWS:
            tl.store(SUMS_OF + row, SUM, mask=q < Sq)


@triton.jit(do_not_specialize=COUNTS) if COUNTS else triton.jit
def gradients_of_keys(*gradient_of_queries):
    """dk and dv of a block of keys, over the queries of all its heads."""
    place = tl.program_id(0)
    blocks = tl.cdiv(Skv, OWN)
    first = place % blocks * OWN
    b = long(place // blocks // (Hq // GROUP) if GROUP > 1 else place // blocks // Hq)
    kv = long(place // blocks % (Hq // GROUP) if GROUP > 1 else place // blocks % Hq)
    k = long(first + tl.arange(0, OWN)[:, None])
    across = tl.arange(0, OTHER)[None, :]
    down = tl.cast(tl.arange(0, OTHER), tl.int64)[:, None]
    columns()
    at = k
    load_keys()
    if LAST_KEYS:
        first_query = k - (long(SHIFT)) if SHIFT else k  # [OWN, 1]
    if KEYS:
        sum_key = tl.zeros([OWN, D], tl.float32)
    if VALUES:
        sum_value = tl.zeros([OWN, DV], tl.float32)
    if GROUP > 1:
        for member in range(GROUP):
            h = kv * GROUP + member
            sum_over_queries()
    else:
        h = kv
        sum_over_queries()
    own = tl.arange(0, OWN)[:, None]
    if KEYS:
        result = grad_key + (tl.cast(place // blocks, tl.int64) * Skv + first + own) * WIDTH + d
        tl.store(result, scaled(sum_key, grad_key), mask=(own < Skv - first) & IN_D)
    if VALUES:
        result = grad_value + (tl.cast(place // blocks, tl.int64) * Skv + first + own) * WIDTH_OF_VALUES + dv
        tl.store(result, of_values(place // blocks), mask=(own < Skv - first) & IN_DV)


for PAIR_NAME, PAIR in PAIRS:

    @triton.jit(do_not_specialize=COUNTS) if COUNTS else triton.jit
    def PAIR_NAME(*gradient_of_queries):
        PAIR.words
        owner = tl.program_id(0)
        first = tl.program_id(1) * OTHER
        row_in_sums = tl.program_id(2) * OWN
        start = first_row + row_in_sums
        columns()
        q = long(start + tl.arange(0, OWN)[:, None])
        at = first + tl.arange(0, OTHER)[:, None]
        k = long(first + tl.arange(0, OTHER)[None, :])
        sum = tl.zeros([OWN, OTHER], tl.float32)
        for member in tl.range(0, members()):
            b = long(PAIR.b)
            h = long(PAIR.h)
            kv = head_of_keys()
            row = (tl.cast(b, tl.int64) * Hq + h) * Sq + q
            load_numbers_of_rows(PAIR.tile)
            row_delta = tl.load(delta + row, mask=q < Sq, other=0.0)
            load_queries()
            load_gradients()
            load_keys()
            PAIR.tile.before
            weigh(PAIR.tile)
            differentiate(PAIR.tile)
            sum += PAIR.gradient
        result = tl.cast(owner, tl.int64) * sums_owner + k
        result += tl.cast(row_in_sums + tl.arange(0, OWN), tl.int64)[:, None] * sums_row
        tl.store(PAIR.sums + result, sum, mask=k < Skv)


# --- parts: a tile ---


@part
def weigh(TILE):
    """The weights of a tile, again."""
    if TILE.turned:
        dot = product(key_tile, query_tile, True)
    else:
        dot = product(query_tile, key_tile, True)
    s = dot
    TILE.scores


@part
def differentiate(TILE):
    """p (weights), ds (the gradient of the dot, without the scale of a linear program) and of_read<i>."""
    weights_again(TILE)
    if TILE.turned:
        weighed = product(value_tile, grad_tile, NARROW)
        row_delta = tl.load(delta + row, mask=q < Sq if TILE.is_edge else True, other=0.0)
    else:
        weighed = product(grad_tile, value_tile, NARROW)
    gradients_of_dots(TILE)


# --- parts: rows ---


@part
def columns():
    d = tl.cast(tl.arange(0, D), tl.int64)[None, :]
    if VALUES_APART:
        dv = tl.cast(tl.arange(0, DV), tl.int64)[None, :]


@part
def load_queries():
    query_head = head_at(query, query_b, query_h, h)
    query_tile = rows_at(query_head, q, query_s, d, query_d, (q < Sq) & IN_D)


@part
def load_gradients():
    grad_head = head_at(grad, grad_b, grad_h, h)
    grad_tile = rows_at(grad_head, q, grad_s, dv, grad_d, (q < Sq) & IN_DV)


@part
def load_keys():
    """Tiles of the keys and values of head kv at positions `at` `[.., 1]`."""
    key_head = head_at(key, key_b, key_h, kv)
    key_tile = rows_at(key_head, at, key_s, d, key_d, (at < Skv) & IN_D)
    value_head = head_at(value, value_b, value_h, kv)
    value_tile = rows_at(value_head, at, value_s, dv, value_d, (at < Skv) & IN_DV)


# --- parts: over keys ---


@part
def turn_of_keys(TILE):
    if not LISTED:
        start = i * OTHER
    k = long(start + across)
    key_tile = next_rows(key_head, key_s, key_there(TILE) & IN_D)
    value_tile = next_rows(value_head, value_s, key_there(TILE) & IN_DV)
    weigh(TILE)
    differentiate(TILE)
    if QUERIES:
        sum = added(sum, ds, key_tile)
    for SUM, SUMS_OF, OF_READ in OF_ROWS:
        SUM += tl.sum(OF_READ, 1, keep_dims=True)
    if LISTED:
        start = tl.load(line + tl.minimum(i + 1, last)) * OTHER


@part
def sum_far_rows():
    """Rows whose log-sum-exp is too large to trust: `row_top` and `row_total` (base-2 logarithms) of all
    rows. The loop loads the queries itself, so that they do not occupy registers in all loops."""
    # A log-sum-exp far from zero holds too few digits: such rows are summed anew.
    far = (tl.abs(row_lse) > LARGEST_TRUSTED) & (tl.abs(row_lse) < float("inf"))
    is_far = tl.max(tl.cast(far, tl.int32)) > 0
    row_top = tl.zeros([OWN, 1], tl.float32) + float("-inf")
    row_sum = tl.zeros([OWN, 1], tl.float32)
    for i in tl.range(0, tl.where(is_far, stop, 0), num_stages=1):
        start = tl.load(line + i) * OTHER if LISTED else i * OTHER
        k = long(start + across)
        load_queries()
        key_tile = next_rows(key_head, key_s, (down < Skv - start) & IN_D)
        dot = dots()
        s = dot
        OVER_KEYS.far
        s = tl.where(k < Skv, s, float("-inf"))
        top = tl.maximum(row_top, tl.max(s, 1, keep_dims=True))
        base = tl.where(top == float("-inf"), 0.0, top)  # a row may have no key yet
        row_sum = row_sum * tl.exp2((row_top - base) * TO_BITS)
        row_sum += tl.sum(tl.exp2((s - base) * TO_BITS), 1, keep_dims=True)
        row_top = top
    if SINK:
        far = far & (row_top > float("-inf"))  # else there is but the sink
        sink = tl.zeros([OWN, 1], tl.float32) + SINK
        row_sum += tl.exp2((sink - row_top) * TO_BITS)
    row_top = tl.where(far, row_top, 0.0)
    row_total = tl.where(far, tl.log2(row_sum), row_lse * LOG2E)
    tl.store(tops + row, row_top, mask=q < Sq)
    tl.store(totals + row, row_total, mask=q < Sq)


# --- parts: over queries ---


@part
def sum_over_queries():
    """The loops over the blocks of queries that see keys of a block. Under a causal mask the first ones are
    at an edge, and so may the last be. Without one the edge comes first: in the other order Triton 3.6's
    products wait for each other (C7515)."""
    query_head = head_at(query, query_b, query_h, h)
    query_head += down * query_s + d * query_d
    grad_head = head_at(grad, grad_b, grad_h, h)
    grad_head += down * grad_s + dv * grad_d
    for SUM, SUMS_OF, OF_READ in OF_COLUMNS:
        SUM = tl.zeros([OWN, 1], tl.float32)
    if LISTED:
        find_line(column_tiles, column_counts, column_b, column_h, Sq, OWN, OTHER)
        if FILL:
            find_lowest(Sq)
            stop = tl.where(tl.min(lowest) > LOW, stop, last + 1)
        start = tl.load(line) * OTHER
        for i in tl.range(0, whole):
            turn_of_queries(OVER_QUERIES.whole)
            start = tl.load(line + tl.minimum(i + 1, last)) * OTHER
        for i in tl.range(whole, stop):  # at an edge
            turn_of_queries(OVER_QUERIES.edge)
            start = tl.load(line + tl.minimum(i + 1, last)) * OTHER
    elif not CAUSAL:
        whole = Sq // OTHER
        stop = tl.cdiv(Sq, OTHER)
        for i in tl.range(whole, stop):  # at an edge
            start = i * OTHER
            turn_of_queries(OVER_QUERIES.edge)
        for i in tl.range(0, whole):
            start = i * OTHER
            turn_of_queries(OVER_QUERIES.whole)
    else:
        stop = tl.cdiv(Sq, OTHER)
        begin = tl.maximum(first - long(SHIFT), 0) // OTHER if SHIFT else first // OTHER
        open = tl.cdiv(last_seen(), OTHER)  # from here on, queries see all keys
        open = tl.minimum(tl.maximum(open, begin), stop)
        whole = tl.maximum(Sq // OTHER, open)
        if FILL:
            find_lowest(tl.minimum(begin * OTHER, Sq))
            begin = tl.where(tl.min(lowest) > LOW, begin, 0)
        for i in tl.range(open, whole):
            start = i * OTHER
            turn_of_queries(OVER_QUERIES.whole)
        for i in tl.range(begin + whole - open, stop):  # at an edge
            start = tl.where(i < whole, i - whole + open, i) * OTHER
            turn_of_queries(OVER_QUERIES.edge)
    for SUM, SUMS_OF, OF_READ in OF_COLUMNS:
        tl.store(SUMS_OF + (tl.cast(b, tl.int64) * Hq + h) * Skv + k, SUM, mask=k < Skv)


@part
def find_lowest(rows):
    """The lowest log-sum-exp of the first rows. All tiles are visited if it is near the fill: then keys
    behind it have weight."""
    lowest = tl.zeros([STRIP], tl.float32) + float("inf")
    for i in tl.range(0, tl.cdiv(rows, STRIP)):
        start = i * STRIP + tl.arange(0, STRIP)
        some = lse + (tl.cast(b, tl.int64) * Hq + h) * Sq + start
        lowest = tl.minimum(lowest, tl.load(some, mask=start < rows, other=float("inf")))


@part
def turn_of_queries(TILE):
    q = long(start + across)
    row = (tl.cast(b, tl.int64) * Hq + h) * Sq + q
    if TILE.is_edge and LAST_KEYS:
        inside = (across >= first_query - start) & (across < Sq - start)
    query_tile = next_rows(query_head, query_s, query_there(TILE) & IN_D)
    grad_tile = next_rows(grad_head, grad_s, query_there(TILE) & IN_DV)
    TILE.before
    weigh(TILE)
    load_numbers_of_rows(TILE)
    differentiate(TILE)
    if VALUES:
        sum_value = added(sum_value, p, grad_tile)
    if KEYS:
        sum_key = added(sum_key, ds, query_tile)
    for SUM, SUMS_OF, OF_READ in OF_COLUMNS:
        SUM += tl.sum(OF_READ, 1, keep_dims=True)


# A product with a transposed tile. TURN: in single precision, which Triton multiplies without tensor cores,
# it is written the other way round, which decides how many registers a kernel takes.
product = part(
    lambda a, b, TURN: (
        tl.trans(tl.dot(b, tl.trans(a), input_precision=EXACT))
        if EXACT and TURN
        else tl.dot(a, tl.trans(b), input_precision=EXACT)
    )
)
added = part(lambda total, a, b: tl.dot(a.to(b.dtype), b, total, input_precision=EXACT))
pair_of_heads = part(lambda: place // blocks // GROUP if GROUP > 1 else place // blocks)
key_there = part(lambda TILE: down < Skv - start if TILE.is_edge else True)
query_there = part(lambda TILE: down < Sq - start if TILE.is_edge else True)
# The batches and heads that a tile of pairs is summed over; none, where a causal mask hides all of it.
members = part(lambda: tl.where(are_seen(), PAIR.members, 0) if DIAGONAL else PAIR.members)
are_seen = part(lambda: first < start + OWN + long(SHIFT) if SHIFT else first < start + OWN)
