"""A plain forward kernel as Triton's users write it: the yardstick for kernels that a compiler emits.

FlashAttention-2's forward pass for sizes that are multiples of the tiles, tiles fetched by descriptors (TMA
where the GPU has it), two loops for a causal mask. No lists of tiles, no widths that are padded, no programs
of scores.
"""

from __future__ import annotations

import math

from attngraph.codegen.triton.plan import Blocks

NAME = "plain_attention"
ARGUMENTS = (
    ("query", "*bf16"), ("key", "*bf16"), ("value", "*bf16"), ("out", "*bf16"), ("lse", "*fp32"),
    ("heads", "i32"), ("tokens", "i32"),
)  # fmt: skip
_SOURCE = """# A plain forward kernel, to compare emitted ones with.
import triton
import triton.language as tl

BLOCK_Q = tl.constexpr({q})
BLOCK_K = tl.constexpr({k})
WIDTH = tl.constexpr({width})
CAUSAL = tl.constexpr({causal})
RATE = tl.constexpr({rate})


@triton.jit
def attend(acc, m, l, query_tile, keys, values, row, first, begin, end, MASKED: tl.constexpr):
    for start in tl.range(begin, end, BLOCK_K):
        key_tile = keys.load([row + start, 0])
        s = tl.dot(query_tile, key_tile.T)
        if MASKED:
            seen = first + tl.arange(0, BLOCK_Q)[:, None] >= start + tl.arange(0, BLOCK_K)[None, :]
            s = tl.where(seen, s, -1.0e6)
        top = tl.maximum(m, tl.max(s, 1) * RATE)
        p = tl.exp2(s * RATE - top[:, None])
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.bfloat16), values.load([row + start, 0]), acc * shrink[:, None])
        m = top
    return acc, m, l


@triton.jit
def plain_attention(query, key, value, out, lse, heads, tokens):
    first = tl.program_id(0) * BLOCK_Q
    row = tl.program_id(1) * tokens
    rows = heads * tokens
    queries = tl.make_tensor_descriptor(query, [rows, WIDTH], [WIDTH, 1], [BLOCK_Q, WIDTH])
    keys = tl.make_tensor_descriptor(key, [rows, WIDTH], [WIDTH, 1], [BLOCK_K, WIDTH])
    values = tl.make_tensor_descriptor(value, [rows, WIDTH], [WIDTH, 1], [BLOCK_K, WIDTH])
    results = tl.make_tensor_descriptor(out, [rows, WIDTH], [WIDTH, 1], [BLOCK_Q, WIDTH])
    query_tile = queries.load([row + first, 0])
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    whole = first if CAUSAL else tokens
    acc, m, l = attend(acc, m, l, query_tile, keys, values, row, first, 0, whole, False)
    if CAUSAL:
        acc, m, l = attend(acc, m, l, query_tile, keys, values, row, first, first, first + BLOCK_Q, True)
    results.store([row + first, 0], (acc / l[:, None]).to(tl.bfloat16))
    tl.store(lse + row + first + tl.arange(0, BLOCK_Q), m + tl.log2(l))
"""


def source(width: int, causal: bool, blocks: Blocks) -> str:
    rate = math.log2(math.e) / math.sqrt(width)
    return _SOURCE.format(q=blocks.q, k=blocks.k, width=width, causal=causal, rate=rate)


def blocks_for(width: int, architecture: str) -> Blocks:
    """Tiles that are known to be good for such a kernel on an H100; smaller ones elsewhere."""
    if architecture == "sm_90":
        return Blocks(128, 128, 4, 3) if width <= 64 else Blocks(128, 64, 8, 3 if width <= 128 else 2)
    return Blocks(128, 64 if width <= 64 else 32, 4, 3 if architecture == "sm_80" else 1)
