"""A product of tokens with a weight, in one order of sums (`tokens.py`).

Each program computes ROWS tokens times COLUMNS outputs, and adds up DEPTH elements at a time from the first
one on. The sizes are always these, so a token has the same bits whatever tokens it is computed with. Elements
are float32; those of a weight of 16 bits, and what it is multiplied by, then rounded to its dtype, are
numbers of TF32, whose products are exact.
"""

import triton
import triton.language as tl

ROWS, COLUMNS, AT_ONCE = 16, 64, 64


@triton.jit(do_not_specialize=["tokens", "depth", "width", "group"])
def multiply(
    left, weight, scales, zeros, out, tokens, depth, width, group,
    TURNED: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr, SHORT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """out[t, c] = sum over d of left[t, d] * (weight[c, d] - zeros[c, d // group]) * scales[c, d // group].
    TURNED: the weight is [depth, width]."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, depth, AT_ONCE):
        across = start + tl.arange(0, AT_ONCE)[None, :]
        d = start + tl.arange(0, AT_ONCE)[:, None]
        x = tl.load(left + t * depth + across, mask=(t < tokens) & (across < depth), other=0.0)
        inside = (d < depth) & (c < width)
        w = tl.load(weight + (d * width + c if TURNED else c * depth + d), mask=inside, other=0)
        if SHORT:
            x = x.to(w.dtype).to(tl.float32)
        w = w.to(tl.float32)
        of = c * (depth // group) + d // group
        if ZEROS:
            w -= tl.load(zeros + of, mask=inside, other=0).to(tl.float32)
        if SCALED:
            w *= tl.load(scales + of, mask=inside, other=0.0)
        total = tl.dot(x, w, total, input_precision="tf32" if SHORT else "ieee")
    tl.store(out + t * width + c, total, mask=(t < tokens) & (c < width))
