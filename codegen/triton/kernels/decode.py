"""Attention over a cache: a few new queries per row, with its keys split.

In the first kernel, each program takes some queries of one row (those of all heads that share a key head form
one tile, so keys are loaded once for them) and one part of the row's keys: pages looked up in the row's
table, and in the last part the new tokens. It stores the weighted sum, the maximum and the normaliser of its
part. The second combines the parts ("split-KV", Dao et al. 2023, Flash-Decoding), with a program for each
query and head. Both take lengths from memory alone, so launches that a CUDA graph has captured serve rows
that have grown. SHARED: values are the first elements of the keys, as for latents; each tile is loaded once
and used as both. IN_ORDER: parts have SPAN positions each, and tiles are counted from position 0, so what a
query adds up does not depend on which keys are in pages, nor on what other tokens there are. KEPT: pages of 8
bits have a scale for each token and head; a tile of them is widened, multiplied by its scales and rounded to
the dtype of queries, as PyTorch does.
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
if PAGED:
    PAGE = tl.constexpr(PAGED)


if not SHARED_OUT:

    @triton.jit
    def absorb(m, l, acc, s, multiple, value_tile):
        """Join a tile of scores and values to the rows' maximum m, sum l and weighted sum acc."""
        top = largest()
        w = tl.exp2(exponents_now())
        shrink = tl.exp2(fall())
        sum_weights(value_tile)
        return top, l, weighted_sum(value_tile, acc)


@triton.jit(do_not_specialize=COUNTS) if COUNTS else triton.jit
def KERNEL(
    query, key, value, new_key, new_value, key_scale, value_scale,
    part_acc, part_m, part_l,
    table, starts, first, held,
    Hq, Hkv, columns, page, splits, news,
    query_h, query_s, query_d,
    key_p, key_h, key_s, key_d,
    value_p, value_h, value_s, value_d,
    new_key_h, new_key_s, new_key_d,
    new_value_h, new_value_s, new_value_d,
    key_scale_p, key_scale_h, key_scale_s,
    value_scale_p, value_scale_h, value_scale_s,
    READS,
):  # fmt: skip
    """Some queries of one row over one part of its keys: their sum, maximum and normaliser."""
    place = tl.program_id(0)
    part, item = place % splits, place // splits
    shares = tl.num_programs(1)
    share = tl.program_id(1)
    kv, b = item % Hkv, item // Hkv
    begin = tl.load(starts + b)
    count = tl.cast(tl.load(starts + b + 1) - begin, tl.int32)
    kept = tl.cast(tl.load(held + b), tl.int32)
    lane = share * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]  # [BLOCK_Q, 1]: heads, then queries
    queries = tl.maximum(count, 1)
    inside = lane < GROUP * count
    h = tl.minimum(kv * GROUP + lane // queries, Hq - 1)
    q = long(tl.cast(tl.load(first + b), tl.int32)) + lane % queries
    across = tl.arange(0, BLOCK_K)[None, :]
    down = tl.arange(0, BLOCK_K)[:, None]
    d = tl.cast(tl.arange(0, D), tl.int64)[None, :]
    if VALUES_APART:
        dv = tl.cast(tl.arange(0, DV), tl.int64)[None, :]
    rest = WIDTH_OF_VALUES + tl.cast(tl.arange(0, D_REST), tl.int64)[None, :]
    query_row = query + tl.cast(h, tl.int64) * query_h + (begin + lane % queries) * query_s
    query_tile = tl.load(query_row + d * query_d, mask=inside & IN_D, other=0.0)
    query_rest = tl.load(query_row + rest * query_d, mask=inside & IN_D_REST, other=0.0)
    room = columns * tokens_of_page()  # tokens; a ring, if a row has more
    if not PAGED:
        number = tl.load(table + b)
    if WINDOW:
        oldest = tl.maximum(tl.maximum(kept - room, 0), tl.cast(tl.load(first + b), tl.int32) - OLDER)
    else:
        oldest = tl.maximum(kept - room, 0)
    if IN_ORDER:
        length = kept + tl.where(news != 0, count, 0)
        since = tl.maximum(part * SPAN, oldest // BLOCK_K * BLOCK_K)
    else:
        length = tl.cdiv(tl.cdiv(kept - oldest, splits), BLOCK_K) * BLOCK_K
        since = oldest + part * length
    is_idle = share * BLOCK_Q >= GROUP * count  # a row with fewer new tokens than others
    if IN_ORDER:
        until = tl.where(is_idle, since, tl.minimum(part * SPAN + SPAN, length))
    else:
        until = tl.where(is_idle, since, tl.minimum(since + length, kept))
        fresh = tl.where((news != 0) & (part == splits - 1) & (not is_idle), count, 0)
    BEFORE
    begin_rows(True, tl.zeros([BLOCK_Q, 1], tl.float32))
    acc = tl.zeros([BLOCK_Q, DV], tl.float32)
    if IN_ORDER:
        for start in tl.range(since, until, BLOCK_K):  # in pages, and then new tokens
            k = long(start + across)
            there = (start + down >= oldest) & (start + down < tl.minimum(until, kept))
            is_new = (start + down >= kept) & (start + down < until)
            load_keys()
            new_key_rows = new_key + new_token(new_key_h, new_key_s)
            key_tile = tl.where(is_new, new_keys(is_new, d, IN_D), key_tile)
            key_rest = tl.where(is_new, new_keys(is_new, rest, IN_D_REST), key_rest)
            score(HELD, until)
            load_values()
            new_value_rows = new_value + new_token(new_value_h, new_value_s)
            value_tile = tl.where(is_new, new_values(is_new), value_tile)
            join(HELD, until)
    else:
        for start in tl.range(since, until, BLOCK_K):  # in pages
            k = long(start + across)
            there = start + down < until
            load_keys()
            score(HELD, until)
            load_values()
            join(HELD, until)
        for start in tl.range(kept, kept + fresh, BLOCK_K):  # new tokens
            k = long(start + across)
            there = start + down < kept + fresh
            new_key_rows = new_key + new_token(new_key_h, new_key_s)
            key_tile = new_keys(there, d, IN_D)
            key_rest = new_keys(there, rest, IN_D_REST)
            score(NEW, kept + fresh)
            new_value_rows = new_value + new_token(new_value_h, new_value_s)
            value_tile = new_values(there)
            join(NEW, kept + fresh)
    row = (tl.cast(place, tl.int64) * shares + share) * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
    tl.store(part_acc + row * WIDTH_OF_VALUES + dv, acc, mask=inside & IN_DV)
    tl.store(part_m + row, m)
    tl.store(part_l + row, l)


@triton.jit
def join_parts(part_acc, part_m, part_l, starts, out, lse, Hq, Hkv, splits, shares, lanes, tokens):
    """Parts weigh as much as their share of the normaliser; 0 / 0 (no key at all) is NaN."""
    item, lane = tl.program_id(0) // lanes, tl.program_id(0) % lanes
    kv, b = item % Hkv, item // Hkv
    begin = tl.load(starts + b)
    count = tl.cast(tl.load(starts + b + 1) - begin, tl.int32)
    queries = tl.maximum(count, 1)
    inside = lane < GROUP * count
    h = kv * GROUP + lane // queries
    parts = tl.where(inside, splits, 0)
    across = tl.arange(0, TOGETHER)[:, None]
    d = tl.program_id(1) * SHARE + tl.arange(0, SHARE)[None, :]
    first = (tl.cast(item * splits, tl.int64) * shares + lane // BLOCK_Q) * BLOCK_Q
    rows = first + lane % BLOCK_Q + tl.cast(across, tl.int64) * shares * BLOCK_Q
    step = tl.cast(shares, tl.int64) * BLOCK_Q
    m = tl.zeros([TOGETHER, 1], tl.float32) + float("-inf")
    for start in tl.range(0, parts, TOGETHER):
        there = start + across < parts
        own = tl.load(part_m + rows + start * step, mask=there, other=float("-inf"))
        m = tl.maximum(m, own, propagate_nan=tl.PropagateNan.ALL)
    top = tl.max(m, 0, keep_dims=True)
    base = tl.where(top == float("-inf"), 0.0, top)
    l = tl.zeros([TOGETHER, 1], tl.float32)
    acc = tl.zeros([TOGETHER, SHARE], tl.float32)
    for start in tl.range(0, parts, TOGETHER):
        there = start + across < parts
        row = rows + start * step
        own = tl.load(part_m + row, mask=there, other=float("-inf"))
        weight = tl.exp2(own - base if LINEAR else (own - base) * LOG2E)
        l += tl.load(part_l + row, mask=there, other=0.0) * weight
        tile = tl.load(
            part_acc + row * WIDTH_OF_VALUES + d,
            mask=there & (d < WIDTH_OF_VALUES) if UNEVEN else there,
            other=0.0,
        )
        acc += tile * weight
    l = tl.sum(l, 0, keep_dims=True)
    acc = tl.sum(acc, 0, keep_dims=True)
    place = out + ((begin + lane % queries) * Hq + h) * WIDTH_OF_VALUES + d
    there = d < tl.where(inside, WIDTH_OF_VALUES, 0)
    tl.store(place, divided(acc), mask=there)
    if lse is not None:
        one = tl.zeros([1, 1], tl.int64)
        place = lse + tl.cast(h, tl.int64) * tokens + begin + lane % queries + one
        is_first = inside & (tl.program_id(1) == 0)
        tl.store(place, log_sum(top), mask=one < tl.where(is_first, 1, 0))


# --- parts ---


@part
def load_keys():
    """A tile of keys in pages, and where its values lie."""
    slot = start % room + down
    slot = tl.where(slot < room, slot, slot - room)
    if PAGED:
        number = tl.load(table + b * columns + slot // PAGE, mask=there, other=0)
        slot = slot % PAGE
    key_rows = key + in_pages(key_p, key_h, key_s)
    key_by = tl.load(key_scale + in_pages(key_scale_p, key_scale_h, key_scale_s), mask=there, other=0.0)
    key_tile = widened(key_rows + d * key_d, IN_D, key_by)
    key_rest = widened(key_rows + rest * key_d, IN_D_REST, key_by)


@part
def load_values():
    value_rows = value + in_pages(value_p, value_h, value_s)
    value_by = tl.load(
        value_scale + in_pages(value_scale_p, value_scale_h, value_scale_s), mask=there, other=0.0
    )
    value_tile = widened(value_rows + dv * value_d, IN_DV, value_by)


@part
def score(TILE, end):
    """The scores of a tile of keys: of those before the end."""
    if TILE.uses_dot:
        dot = product()
    else:
        s = product()
    if TILE.uses_both:
        s = dot
    TILE.scores
    s = tl.where(k < end, s, float("-inf"))


@part
def join(TILE, end):
    """A tile's step of the online softmax. SHARED_OUT: a tile has fewer rows than warp groups multiply, so
    its columns must be shared out. Then weights are computed in a branch, which is taken always. Where Triton
    sees that a product is made of another's results, it gives every warp group all columns of the first, and
    two groups on the same 64 rows compute the same scores; it does not look into branches."""
    if SHARED_OUT:
        multiple = TILE.multiple
        if start < end:
            top = largest()
            w = tl.exp2(exponents_now())
            shrink = tl.exp2(fall())
            sum_weights(VALUE_TILE)
            m = top
        else:
            w = tl.zeros([BLOCK_Q, BLOCK_K], VALUE_TILE.dtype)
            shrink = tl.zeros([BLOCK_Q, 1], tl.float32)
        acc = weighted_sum(VALUE_TILE, acc)
    else:
        m, l, acc = absorb(m, l, acc, s, TILE.multiple, VALUE_TILE)


tokens_of_page = part(lambda: PAGE if PAGED else page)
new_token = part(
    lambda of_head, of_token: tl.cast(kv, tl.int64) * of_head + (begin + start - kept + down) * of_token
)
new_keys = part(
    lambda there, place, columns: tl.load(new_key_rows + place * new_key_d, mask=there & columns, other=0.0)
)
new_values = part(lambda there: tl.load(new_value_rows + dv * new_value_d, mask=there & IN_DV, other=0.0))
# Where rows of a tile lie.
in_pages = part(
    lambda of_page, of_head, of_token: (
        number * of_page + tl.cast(kv, tl.int64) * of_head + tl.cast(slot, tl.int64) * of_token
    )
)
# A tile of pages, in the dtype of queries.
widened = part(
    lambda place, columns, scale: (
        (numbers(place, columns) * scale).to(query_tile.dtype) if KEPT else loaded(place, columns, 0.0)
    )
)
numbers = part(
    lambda place, columns: (
        from_float8(loaded(place, columns, 0))
        if KEPT == "float"
        else loaded(place, columns, 0).to(tl.float32)
    )
)
loaded = part(lambda place, columns, nothing: tl.load(place, mask=there & columns, other=nothing))
product = part(lambda: dots() if not D_REST else smaller_first() if SHARED_OUT else smaller_last())
smaller_last = part(lambda: tl.dot(query_rest, tl.trans(key_rest), dots(), input_precision=EXACT))
# The smaller product feeds the other, where columns are shared out (`join`).
smaller_first = part(
    lambda: tl.dot(
        query_tile,
        tl.trans(key_tile),
        tl.dot(query_rest, tl.trans(key_rest), input_precision=EXACT),
        input_precision=EXACT,
    )
)
