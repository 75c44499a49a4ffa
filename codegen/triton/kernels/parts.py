"""Parts of several kernels, which are written out where they are called."""

from attngraph.codegen.triton.fold import part


@part
def begin_rows(IN_PARTS, zeros):
    """The rows' maximum and sum before the first key. IN_PARTS: a sink counts in the first part alone.
    zeros: one for each row."""
    if SINK:
        sink = zeros + SINK
        if IN_PARTS:
            sink = tl.where(part == 0, sink, float("-inf"))
        m = tl.where(sink == float("-inf"), LOWEST, sink * RATE if LINEAR else sink)
        l = tl.where(sink == float("-inf"), 0.0, tl.exp2(tl.fma(sink, RATE, -m)) if LINEAR else 1.0)
    else:
        m = zeros + LOWEST  # no key yet
        l = zeros


@part
def sum_weights(like):
    """Join weights to the rows' sum, and round them to the dtype of the tile `like`."""
    l = l * shrink + tl.sum(w, 1, keep_dims=KEEPS)
    w = w * multiple
    w = w.to(like.dtype)


@part
def find_bounds(ROWS_AT_ONCE, KEYS_AT_ONCE):
    """How many tiles of keys are whole, how many are seen, and how many with those that only finite fills
    hide."""
    if LISTED:
        find_line(tiles, counts, row_b, row_h, Skv, ROWS_AT_ONCE, KEYS_AT_ONCE)
        every = last + 1
    elif not CAUSAL:
        whole = Skv // KEYS_AT_ONCE
        stop = tl.cdiv(Skv, KEYS_AT_ONCE)
    elif SHIFT:
        whole = tl.maximum(tl.minimum(first + 1 + long(SHIFT), Skv), 0) // KEYS_AT_ONCE
        stop = tl.cdiv(tl.maximum(tl.minimum(first + ROWS_AT_ONCE + long(SHIFT), Skv), 0), KEYS_AT_ONCE)
        every = tl.cdiv(Skv, KEYS_AT_ONCE)
    else:
        whole = tl.minimum(first + 1, Skv) // KEYS_AT_ONCE  # every query sees all keys of these tiles
        stop = tl.cdiv(
            tl.minimum(first + ROWS_AT_ONCE, Skv), KEYS_AT_ONCE
        )  # no query sees a key of later ones
        every = tl.cdiv(Skv, KEYS_AT_ONCE)


@part
def find_line(lists, lengths, of_b, of_h, extent, OWN_AT_ONCE, OTHERS_AT_ONCE):
    """The list of the tiles that a block visits, and how many of them are whole and seen."""
    block = tl.cast(b, tl.int64) * of_b + tl.cast(h, tl.int64) * of_h + first // OWN_AT_ONCE
    line = lists + block * tl.cdiv(extent, OTHERS_AT_ONCE)
    last = tl.load(lengths + 3 * block + 2) - 1
    whole = tl.load(lengths + 3 * block)
    stop = tl.load(lengths + 3 * block + 1)


@part
def load_numbers_of_rows(TILE):
    """The numbers for computing weights that the first kernel stored."""
    if TRUSTED:
        row_lse = tl.load(lse + row, mask=q < Sq if TILE.is_edge else True, other=0.0)
    else:
        row_top = tl.load(tops + row, mask=q < Sq if TILE.is_edge else True, other=0.0)
        row_total = tl.load(totals + row, mask=q < Sq if TILE.is_edge else True, other=0.0)


@part
def weights_again(TILE):
    """p: the weights of a tile of scores."""
    if TILE.within:
        p = tl.where(TILE.within, tl.exp2(exponents_of_weights()), 0.0)  # the weights again
    else:
        p = tl.exp2(exponents_of_weights())  # the weights again
    if not KEEPS_NAN:
        p = tl.where(p == p, p, 0.0)


@part
def gradients_of_dots(TILE):
    """ds and of_read<i>, of `weighed`, the products of gradients and values; and p, by which values are
    weighed."""
    if TILE.multiple:
        ds = p * (weighed * (TILE.multiple) - row_delta)  # of the scores, and back to the dots
    else:
        ds = p * (weighed - row_delta)  # of the scores, and back to the dots
    TILE.gradients
    if TILE.reaches_dot:
        ds = ds + of_dot
    # Outside of the tile, a row's delta or a formula may be NaN or infinite, and zero times that is NaN.
    for NAME in TILE.cut_off:
        NAME = tl.where(TILE.within, NAME, 0.0)
    if TILE.multiple:
        p = p * (TILE.multiple)


# Where a head of a tensor begins; rows of it at some positions, or from `start` on.
head_at = part(
    lambda tensor, of_b, of_h, head: tensor + tl.cast(b, tl.int64) * of_b + tl.cast(head, tl.int64) * of_h
)
rows_at = part(
    lambda head, at, of_row, columns, of_column, inside: tl.load(
        head + tl.cast(at, tl.int64) * of_row + columns * of_column, mask=inside, other=0.0
    )
)
next_rows = part(
    lambda rows, of_row, inside: tl.load(rows + tl.cast(start, tl.int64) * of_row, mask=inside, other=0.0)
)
long = part(lambda number: tl.cast(number, tl.int64) if WIDE else number)
head_of_keys = part(lambda: h // GROUP if GROUP > 1 else h)
dots = part(lambda: tl.dot(query_tile, tl.trans(key_tile), input_precision=EXACT))
# The rows' maximum with a tile's scores.
largest = part(
    lambda: tl.maximum(m, tl.max(s, 1, keep_dims=KEEPS) * RATE if LINEAR else tl.max(s, 1, keep_dims=KEEPS))
)
# Of 2, for a tile's weights. Rounded once where that can be, so that the rounding error of top affects all
# weights of the row alike.
exponents_now = part(lambda: tl.fma(s, RATE, -top) if LINEAR else (s - top) * LOG2E)
# The exponent of what sums weigh that were made with the maximum before.
fall = part(lambda: m - top if LINEAR else (m - top) * LOG2E)
# Values by the rows' sums of weights.
divided = part(
    lambda total: (total / l if KEEPS_NAN else tl.where(l > 0.0, total / l, 0.0)).to(out.dtype.element_ty)
)
log_sum = part(lambda top: (top + tl.log2(l)) * 0.6931471805599453 if LINEAR else top + tl.log(l))
weighted_sum = part(lambda values, total: tl.dot(w, values, total * shrink, input_precision=EXACT))
exponents_of_weights = part(lambda: (s - row_lse) * LOG2E if TRUSTED else (s - row_top) * TO_BITS - row_total)
# A sum of gradients of dots, with the scale that tiles of linear programs leave out.
scaled = part(
    lambda total, like: (
        (total * SCALE).to(like.dtype.element_ty) if LINEAR else total.to(like.dtype.element_ty)
    )
)
of_values = part(
    lambda head: (
        (sum_value + tl.load(unseen + head)).to(grad_value.dtype.element_ty)
        if KEEPS_NAN
        else sum_value.to(grad_value.dtype.element_ty)
    )
)
last_seen = part(lambda: first + OWN - 1 - long(SHIFT) if SHIFT else first + OWN - 1)
# Of groups of warps: the places of rows and of columns in a layout, shared memory for copies, barriers.
rows_in = part(lambda LAYOUT: tl.expand_dims(gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LAYOUT)), 1))
columns_in = part(lambda LAYOUT, COUNT: tl.expand_dims(gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT)), 0))
room_for = part(
    lambda described, count: gl.allocate_shared_memory(
        described.dtype, [count] + described.block_type.shape, described.layout
    )
)
barriers = part(lambda count: gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout()))
