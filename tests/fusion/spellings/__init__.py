"""Spellings of attention, each a function of tensors with the inputs to call it with.

`MUST_FUSE` are attention whichever way they are put, and fuse to `COUNT` attentions (one, unless it says
otherwise). `NOT_YET` are attention too, but are left alone so far. `MUST_NOT` are near misses: things that
look like attention, one change away from it, and have another meaning. `MUTANTS` are a spelling with one
thing changed, which may fuse only with the meaning that it then has. All are run against eager in float64.

Inputs are made from the sizes below, which the tests change to see whether a graph serves other sizes; a
spelling that writes `B`, `T` or `S` in its body is of one size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

B, H, T, S, D = 2, 4, 7, 9, 8
INF = float("inf")
Spelling = tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]
MUST_FUSE: dict[str, Spelling] = {}
MUST_NOT: dict[str, Spelling] = {}
NOT_YET: dict[str, Spelling] = {}
MUTANTS: dict[str, Spelling] = {}
COUNT: dict[str, int] = {}
TOLERANCE: dict[str, float] = {}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def qkv() -> tuple[Tensor, ...]:
    return normal(B, H, T, D), normal(B, H, T, D), normal(B, H, T, D)


def cross() -> tuple[Tensor, ...]:
    return normal(B, H, T, D), normal(B, H, S, D), normal(B, H, S, D + 2)


def grouped() -> tuple[Tensor, ...]:
    return normal(B, H, T, D), normal(B, 2, T, D), normal(B, 2, T, D)


def with_padding() -> tuple[Tensor, ...]:
    lengths = T - 2 * (torch.arange(B) % 2)
    return (*qkv(), torch.arange(T) < lengths[:, None])


def spelling(
    inputs: Callable[[], tuple[Tensor, ...]], table: dict[str, Spelling] = MUST_FUSE
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        table[function.__name__] = (function, inputs)
        return function

    return add


def near_miss(inputs: Callable[[], tuple[Tensor, ...]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return spelling(inputs, MUST_NOT)


def not_yet(inputs: Callable[[], tuple[Tensor, ...]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return spelling(inputs, NOT_YET)


def mutant(inputs: Callable[[], tuple[Tensor, ...]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return spelling(inputs, MUTANTS)


def causal(t: int) -> Tensor:
    return torch.ones(t, t, dtype=torch.bool).tril()


# --- the scale -------------------------------------------------------------------------------


@spelling(qkv)
def no_scale(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


@spelling(cross)
def scale_divides_scores(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(D), dim=-1) @ v


@spelling(cross)
def scale_from_the_tensor(q, k, v):
    return (q @ k.mT * q.size(-1) ** -0.5).softmax(-1) @ v


@spelling(cross)
def scale_in_q(q, k, v):
    return torch.softmax((q * D**-0.5) @ k.mT, -1) @ v


@spelling(cross)
def scale_in_k(q, k, v):
    return torch.softmax(q @ (k / math.sqrt(D)).mT, -1) @ v


@spelling(cross)
def scale_in_both(q, k, v):
    return torch.softmax((q * D**-0.25) @ (k * D**-0.25).mT, -1) @ v


@spelling(cross)
def scale_as_tensor(q, k, v):
    return torch.softmax(q @ k.mT / torch.tensor(math.sqrt(D), dtype=torch.float64), -1) @ v


@spelling(lambda: (*qkv(), normal(H, 1, 1)))
def scale_per_head(q, k, v, temperature):
    return torch.softmax(q @ k.mT * temperature, -1) @ v


# --- the products ----------------------------------------------------------------------------


@spelling(cross)
def einsum(q, k, v):
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


@spelling(lambda: (normal(B, T, H, D), normal(B, S, H, D), normal(B, S, H, D)))
def einsum_tokens_first(q, k, v):
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


@spelling(cross)
def einsum_ellipsis(q, k, v):
    weights = torch.einsum("...qd,...kd->...qk", q, k).softmax(-1)
    return torch.einsum("...qk,...kd->...qd", weights, v)


@spelling(cross)
def flattened_bmm(q, k, v):
    q, k, v = (x.reshape(B * H, x.shape[2], -1) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v).view(B, H, T, -1)


@spelling(cross)
def baddbmm(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    zero = torch.zeros(B * H, T, S, dtype=q.dtype)
    return torch.baddbmm(zero, q, k.transpose(1, 2), beta=0, alpha=D**-0.5).softmax(-1) @ v


@spelling(lambda: (normal(T, D), normal(S, D), normal(S, D)))
def linear_as_product(q, k, v):
    return F.linear(q, k).softmax(-1) @ v


@spelling(cross)
def multiply_and_sum(q, k, v):
    scores = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1)
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)


@spelling(lambda: (normal(B, T, D), normal(B, S, D), normal(B, S, D)))
def single_head(q, k, v):
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT), dim=2), v)


@spelling(lambda: (normal(D), normal(S, D), normal(S, D + 1)))
def one_vector_query(q, k, v):
    return torch.softmax(k @ q, 0) @ v


@spelling(lambda: (normal(B, 3 * H * D, 16),))
def channel_first(x):
    q, k, v = x.view(B, 3, H, D, 16).unbind(1)
    return (v @ torch.softmax(q.mT @ k, -1).mT).reshape(B, H * D, 16)


@spelling(cross)
def keys_in_rows(q, k, v):
    return torch.softmax(k @ q.mT, dim=-2).mT @ v


@spelling(cross)
def torchs_own(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@spelling(qkv)
def torchs_own_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


# --- the softmax -----------------------------------------------------------------------------


@spelling(cross)
def exp_over_sum(q, k, v):
    e = torch.exp(q @ k.mT)
    return (e / e.sum(-1, keepdim=True)) @ v


@spelling(cross)
def stable_exp_over_sum(q, k, v):
    s = q @ k.mT
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.sum(dim=-1, keepdim=True)) @ v


@spelling(cross)
def stable_with_max(q, k, v):
    s = q @ k.mT
    e = torch.exp(s - torch.max(s, dim=-1, keepdim=True)[0])
    return torch.matmul(e / torch.sum(e, -1, keepdim=True), v)


@spelling(cross)
def divided_after_values(q, k, v):
    e = torch.exp(q @ k.mT)
    return (e @ v) / e.sum(-1, keepdim=True)


@spelling(cross)
def minus_logsumexp(q, k, v):
    s = q @ k.mT
    return torch.exp(s - torch.logsumexp(s, -1, keepdim=True)) @ v


@spelling(cross)
def exp_of_log_softmax(q, k, v):
    return F.log_softmax(q @ k.mT, -1).exp() @ v


@spelling(cross)
def softmax_in_float32_and_back(q, k, v):
    return torch.softmax(q @ k.mT, -1, dtype=torch.float64).to(v.dtype) @ v


# --- masks -----------------------------------------------------------------------------------


@spelling(qkv)
def causal_masked_fill(q, k, v):
    s = q @ k.mT / math.sqrt(D)
    return s.masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v


@spelling(qkv)
def causal_equals_zero(q, k, v):
    t = q.shape[-2]
    s = (q @ k.mT).masked_fill(torch.tril(torch.ones(t, t)) == 0, -INF)
    return s.softmax(-1) @ v


@spelling(qkv)
def causal_additive(q, k, v):
    t = q.shape[-2]
    return (q @ k.mT + torch.full((t, t), -INF, dtype=q.dtype).triu(1)).softmax(-1) @ v


@spelling(qkv)
def causal_additive_commuted(q, k, v):
    t = q.shape[-2]
    return (torch.zeros(t, t).masked_fill(~causal(t), -INF) + q @ k.mT).softmax(-1) @ v


@spelling(qkv)
def causal_where(q, k, v):
    return torch.where(causal(q.shape[2]), q @ k.mT, torch.tensor(-INF, dtype=q.dtype)).softmax(-1) @ v


@spelling(qkv)
def causal_by_positions(q, k, v):
    i = torch.arange(q.shape[2])
    return (q @ k.mT).masked_fill(i[:, None] < i[None, :], -INF).softmax(-1) @ v


@spelling(qkv)
def causal_big_number(q, k, v):
    return torch.where(causal(q.shape[2]), q @ k.mT, -1e9).softmax(-1) @ v


@spelling(qkv)
def causal_smallest_float(q, k, v):
    mask = torch.where(causal(q.shape[2]), 0.0, torch.finfo(torch.float32).min)
    return (q @ k.mT + mask).softmax(-1) @ v


@spelling(qkv)
def causal_one_minus_mask(q, k, v):
    return (q @ k.mT + (1.0 - causal(q.shape[2]).to(q.dtype)) * -10000.0).softmax(-1) @ v


@spelling(qkv)
def gpt2_first_release(q, k, v):
    m = causal(q.shape[2]).to(q.dtype)
    return (q @ k.mT * m - 1e10 * (1 - m)).softmax(-1) @ v


@spelling(qkv)
def causal_in_place(q, k, v):
    s = q @ k.mT
    s /= math.sqrt(D)
    s.masked_fill_(~causal(q.shape[2]), -INF)
    return s.softmax(-1) @ v


@spelling(qkv)
def window_of_two_triangles(q, k, v):
    t = q.shape[2]
    keep = torch.ones(t, t).tril() * torch.ones(t, t).triu(-2)
    return (q @ k.mT).masked_fill(keep == 0, -INF).softmax(-1) @ v


@spelling(qkv)
def window_by_distance(q, k, v):
    i = torch.arange(q.shape[2])
    return (q @ k.mT).masked_fill((i[None] - i[:, None]).abs() > 2, -INF).softmax(-1) @ v


@spelling(with_padding)
def padding_kept(q, k, v, keep):
    return (q @ k.mT).masked_fill(~keep[:, None, None, :], -INF).softmax(-1) @ v


@spelling(with_padding)
def padding_dropped_and_causal(q, k, v, drop):
    s = (q @ k.mT).masked_fill(drop[:, None, None, :], -INF)
    return s.masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v


@spelling(lambda: (*qkv(), torch.ones(B, T, dtype=torch.int64)))
def bert_extended_mask(q, k, v, mask):
    extended = (1.0 - mask[:, None, None, :].to(q.dtype)) * -10000.0
    return (q @ k.mT / math.sqrt(D) + extended).softmax(-1) @ v


@spelling(lambda: (*qkv(), torch.rand(B, 1, T, T) > 0.3))
def any_boolean_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@spelling(lambda: (*qkv(), torch.arange(T).expand(B, T) // 3))
def documents(q, k, v, document):
    same = document[:, None, :] == document[:, :, None]
    return (q @ k.mT).masked_fill(~same[:, None], -INF).softmax(-1) @ v


# --- biases and caps -------------------------------------------------------------------------


@spelling(lambda: (*qkv(), normal(1, H, T, T)))
def dense_bias(q, k, v, bias):
    return (bias + q @ k.mT).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(H)))
def alibi(q, k, v, slopes):
    i = torch.arange(q.shape[2])
    return (q @ k.mT + slopes[:, None, None] * (i[None] - i[:, None])).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(H, 2 * T - 1)))
def relative_table(q, k, v, table):
    i = torch.arange(q.shape[2])
    return (q @ k.mT + table[:, i[None] - i[:, None] + T - 1]).softmax(-1) @ v


@spelling(qkv)
def softcap(q, k, v):
    s = 20.0 * torch.tanh(q @ k.mT / 20.0)
    return s.masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v


@spelling(qkv)
def cosine(q, k, v):
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10).softmax(-1) @ v


@spelling(qkv)
def softmax_plus_one(q, k, v):
    e = (q @ k.mT).exp()
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


@spelling(qkv)
def masked_after_softmax(q, k, v):
    return ((q @ k.mT).softmax(-1) * causal(q.shape[2])) @ v


@spelling(lambda: (*qkv(), normal(H)))
def head_mask(q, k, v, mask):
    return ((q @ k.mT).softmax(-1) * mask[:, None, None]) @ v


@spelling(with_padding)
def nan_to_num(q, k, v, keep):
    s = (q @ k.mT).masked_fill(~keep[:, None, None, :], -INF)
    return s.softmax(-1).nan_to_num(0.0) @ v


# --- heads -----------------------------------------------------------------------------------


@spelling(grouped)
def grouped_repeat_interleave(q, k, v):
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return (q @ k.mT).softmax(-1) @ v


@spelling(grouped)
def grouped_expand_reshape(q, k, v):
    k, v = (x[:, :, None].expand(B, 2, 2, x.shape[2], D).reshape(B, H, x.shape[2], D) for x in (k, v))
    return (q @ k.mT).softmax(-1) @ v


@spelling(grouped)
def grouped_queries(q, k, v):
    q = q.view(B, 2, 2, -1, D)
    return ((q @ k[:, :, None].mT).softmax(-1) @ v[:, :, None]).reshape(B, H, -1, D)


@spelling(grouped)
def grouped_tiled(q, k, v):
    k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    return (q @ k.mT).softmax(-1) @ v


@spelling(grouped)
def grouped_by_index(q, k, v):
    pick = torch.arange(H) // 2
    return (q @ k[:, pick].mT).softmax(-1) @ v[:, pick]


@spelling(lambda: (normal(B, H, T, D), normal(B, T, D), normal(B, T, D)))
def one_key_head(q, k, v):
    return torch.einsum("bhqk,bkd->bhqd", torch.einsum("bhqd,bkd->bhqk", q, k).softmax(-1), v)


@spelling(lambda: (normal(B, T, 3 * H * D),))
def packed_interleaved(x):
    q, k, v = x.view(B, -1, H, 3, D).permute(3, 0, 2, 1, 4)
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(B, -1, H * D)


@spelling(lambda: (normal(B, T, 3 * H * D),))
def packed_per_head(x):
    q, k, v = x.view(B, -1, H, 3 * D).transpose(1, 2).chunk(3, dim=-1)
    return (q @ k.mT).softmax(-1) @ v


@spelling(qkv)
def scale_divides_in_place(q, k, v):
    return torch.matmul(q, k.transpose(2, 3)).div_(D**0.5).softmax(-1).matmul(v)


@spelling(lambda: (*cross(), torch.rand((), dtype=torch.float64)))
def scale_learned(q, k, v, temperature):
    return ((q @ k.mT) * temperature.exp().clamp(max=100)).softmax(-1) @ v


@spelling(cross)
def softmin_of_the_negative(q, k, v):
    return F.softmin(-(q @ k.mT), dim=-1) @ v


@spelling(cross)
def powers_of_two(q, k, v):
    e = torch.exp2(q @ k.mT / math.log(2))
    return (e / e.sum(-1, keepdim=True)) @ v


@spelling(lambda: (normal(B, T, H, D), normal(B, S, H, D), normal(B, S, H, D)))
def einsum_heads_before_keys(q, k, v):
    return torch.einsum("bths,bshd->bthd", torch.einsum("bthd,bshd->bths", q, k).softmax(3), v)


@spelling(lambda: (*cross(), normal(H, D + 2, 16)))
def einsum_with_output_projection(q, k, v, w):
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqd,hdo->bqo", torch.einsum("bhqk,bhkd->bhqd", weights, v), w)


@spelling(cross)
def vmap_over_batch_and_heads(q, k, v):
    def one(q, k, v):
        return torch.softmax(q @ k.T, -1) @ v

    return torch.vmap(torch.vmap(one))(q, k, v)


@spelling(lambda: (*cross(), normal(B, H, 3, D), normal(B, H, 3, D + 2)))
def memory_before_the_keys(q, k, v, memory_k, memory_v):
    k, v = torch.cat([memory_k, k], 2), torch.cat([memory_v, v], 2)
    return (q @ k.mT).softmax(-1) @ v


@spelling(cross)
def max_of_all_scores_subtracted(q, k, v):
    s = q @ k.mT
    e = (s - s.max()).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@spelling(lambda: (normal(B, 5, T, D), normal(B, 5, T, D), normal(B, 5, T, D)))
def axial_rows(q, k, v):
    return torch.einsum("brcx,brxd->brcd", torch.einsum("brcd,brxd->brcx", q, k).softmax(-1), v)


@spelling(qkv)
def value_gated_after(q, k, v):
    return ((q @ k.mT).softmax(-1) @ v) * torch.sigmoid(q)


# --- more masks ------------------------------------------------------------------------------


@spelling(qkv)
def causal_generated_by_torch(q, k, v):
    mask = torch.nn.Transformer.generate_square_subsequent_mask(q.shape[2], dtype=q.dtype)
    return (q @ k.mT + mask).softmax(-1) @ v


@spelling(qkv)
def causal_logarithm_of_the_mask(q, k, v):
    return (q @ k.mT + causal(q.shape[2]).to(q.dtype).log()).softmax(-1) @ v


@spelling(qkv)
def causal_times_a_billion(q, k, v):
    return (q @ k.mT - 1e9 * (~causal(q.shape[2])).to(q.dtype)).softmax(-1) @ v


@spelling(qkv)
def causal_flipped_twice(q, k, v):
    ones = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
    return (q @ k.mT).masked_fill(~ones.triu().T, -INF).softmax(-1) @ v


@spelling(cross)
def causal_bottom_right(q, k, v):
    t, s = q.shape[2], k.shape[2]
    keep = torch.ones(t, s, dtype=torch.bool).tril(s - t)
    return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v


@spelling(qkv)
def blocks(q, k, v):
    i = torch.arange(q.shape[2]) // 4
    return (q @ k.mT).masked_fill(i[:, None] != i[None], -INF).softmax(-1) @ v


@spelling(qkv)
def dilated(q, k, v):
    i = torch.arange(q.shape[2])
    behind = i[:, None] - i[None]
    return (q @ k.mT).masked_fill(~((behind >= 0) & (behind % 2 == 0)), -INF).softmax(-1) @ v


@spelling(qkv)
def window_with_global_tokens(q, k, v):
    i = torch.arange(q.shape[2])
    keep = ((i[:, None] - i[None]).abs() <= 1) | (i[:, None] < 2) | (i[None] < 2)
    return torch.where(keep, q @ k.mT, -INF).softmax(-1) @ v


@spelling(qkv)
def prefix_of_fixed_length(q, k, v):
    i = torch.arange(q.shape[2])
    keep = (i[None] <= i[:, None]) | (i[None] < 3)
    return (q @ k.mT).masked_fill(keep.logical_not(), -INF).softmax(-1) @ v


@spelling(lambda: (*qkv(), torch.arange(B) + 1))
def prefix_per_sequence(q, k, v, length):
    i = torch.arange(q.shape[2])
    keep = (i[None, :] <= i[:, None])[None] | (i[None, None, :] < length[:, None, None])
    return (q @ k.mT).masked_fill(~keep[:, None], -INF).softmax(-1) @ v


@spelling(lambda: (*qkv(), T - torch.arange(B)))
def lengths(q, k, v, length):
    keep = torch.arange(k.shape[2])[None] < length[:, None]
    return (q @ k.mT).masked_fill(~keep[:, None, None], -INF).softmax(-1) @ v


@spelling(lambda: (*qkv(), torch.arange(T).expand(B, T) % 3))
def documents_by_separators(q, k, v, tokens):
    document = (tokens == 2).cumsum(-1)
    same = document[:, None, :] == document[:, :, None]
    s = (q @ k.mT).masked_fill(~same[:, None], -INF)
    return s.masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v


@spelling(lambda: (*qkv(), torch.ones(B, T, dtype=torch.int64)))
def padding_of_ones_and_zeros(q, k, v, mask):
    return (q @ k.mT).masked_fill(mask[:, None, None] == 0, -1e9).softmax(-1) @ v


@spelling(lambda: (*qkv(), torch.rand(B, T) > 0.2))
def padding_on_both_sides(q, k, v, keep):
    pairs = keep[:, None, :, None] & keep[:, None, None, :]
    return (q @ k.mT).masked_fill(~pairs, torch.finfo(q.dtype).min).softmax(-1) @ v


@spelling(
    lambda: (*qkv(), torch.zeros(T, T, dtype=torch.float64).masked_fill(torch.ones(T, T).triu(1) > 0, -INF))
)
def any_additive_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@spelling(qkv)
def first_token_hidden_from_itself(q, k, v):
    return (q @ k.mT).masked_fill(~torch.ones(q.shape[2], q.shape[2]).tril(-1).bool(), -INF).softmax(-1) @ v


# --- more biases -----------------------------------------------------------------------------


@spelling(lambda: (*qkv(), normal(H)))
def alibi_by_key(q, k, v, slopes):
    bias = slopes.view(1, H, 1, 1) * torch.arange(k.shape[2]).view(1, 1, 1, -1)
    return (q @ k.mT + bias).masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v


@spelling(qkv)
def alibi_with_computed_slopes(q, k, v):
    slopes = 2.0 ** (-8.0 * torch.arange(1, H + 1, dtype=q.dtype) / H)
    i = torch.arange(q.shape[2])
    return (q @ k.mT - slopes[:, None, None] * (i[:, None] - i[None]).abs()).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(8, H)))
def t5_buckets(q, k, v, table):
    i = torch.arange(q.shape[2])
    behind = -torch.clamp(i[None] - i[:, None], max=0)
    far = 4 + (torch.log(behind.float() / 4) / math.log(16 / 4) * 4).to(torch.int64)
    bucket = torch.where(behind < 4, behind, far.clamp(max=7))
    return (q @ k.mT + F.embedding(bucket, table).permute(2, 0, 1)[None]).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(9, H), torch.randint(0, 9, (T, T))))
def swin_index_table(q, k, v, table, index):
    bias = table[index.view(-1)].view(q.shape[2], q.shape[2], -1).permute(2, 0, 1).contiguous()
    return (q @ k.mT + bias.unsqueeze(0)).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(9, D)))
def relative_keys(q, k, v, table):
    i = torch.arange(q.shape[2])
    relative = table[(i[None] - i[:, None]).clamp(-4, 4) + 4]
    return (q @ k.mT + torch.einsum("bhqd,qkd->bhqk", q, relative)).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(B, H, T, 4), normal(B, 1, T, 4)))
def products_added_up(q, k, v, q_rotary, k_rotary):
    return ((q_rotary @ k_rotary.mT + q @ k.mT) / math.sqrt(D + 4)).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(B, H, T, 4), normal(B, 1, T, 4)))
def products_added_up_at_scales_of_their_own(q, k, v, q_more, k_more):
    scores = torch.einsum("bhqd,bhkd->bhqk", q * 0.3, k) - 0.7 * torch.einsum(
        "bhqd,bkd->bhqk", q_more, k_more[:, 0]
    )
    return (5 * torch.tanh(scores / 5)).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(T, D), normal(T, D), normal(B, H, T, 3), normal(B, H, T, 3)))
def products_of_contents_and_of_places(q, k, v, place_q, place_k, q_more, k_more):
    at = torch.einsum("qd,kd->qk", place_q, place_k)
    return ((q @ k.mT + at + q_more @ k_more.mT) / math.sqrt(2 * D)).softmax(-1) @ v


@spelling(lambda: (normal(B, H, T, D), normal(B, T, D), normal(B, H, T, 4), normal(B, T, 4)))
def latents_that_all_heads_share(q, latent, q_rotary, k_rotary):
    scores = torch.einsum("bhqc,bkc->bhqk", q, latent) + torch.einsum("bhqr,bkr->bhqk", q_rotary, k_rotary)
    return torch.einsum("bhqk,bkc->bhqc", (scores / 3).softmax(-1), latent)


@spelling(lambda: (*qkv(), normal(9, D), normal(9, D)))
def disentangled(q, k, v, key_table, query_table):
    i = torch.arange(q.shape[2])
    place = (i[:, None] - i[None]).clamp(-4, 4) + 4
    to_place = torch.gather(q @ key_table.mT, -1, place.expand(*q.shape[:2], -1, -1))
    from_place = torch.gather(k @ query_table.mT, -1, place.expand(*q.shape[:2], -1, -1)).mT
    return ((q @ k.mT + to_place + from_place) / math.sqrt(3 * D)).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(H, T, D), normal(H, 1, D), normal(H, 1, D)))
def transformer_xl(q, k, v, positions, u, w):
    t = q.shape[2]
    shifted = F.pad((q + w) @ positions.mT, (1, 0))
    shifted = shifted.view(*q.shape[:2], t + 1, t)[:, :, 1:].view(*q.shape[:2], t, t)
    s = ((q + u) @ k.mT + shifted) / math.sqrt(D)
    return s.masked_fill(~causal(t), -INF).softmax(-1) @ v


@spelling(lambda: (normal(B, 2 * T + 2, H * D), normal(H, 64, D)))
def relative_shift_over_every_second_token(x, positions):
    x = x[:, 1::2].unflatten(-1, (H, D)).transpose(1, 2)
    t = x.shape[2] - 1
    q, k, v = x[:, :, :t], x[:, :, 1:], x[:, :, 1:]
    shifted = F.pad(torch.einsum("bhqd,hpd->bhqp", q, positions[:, : 2 * t - 1]), (1, 0))
    shifted = shifted.view(*q.shape[:2], 2 * t, t)[:, :, 1:].view(*q.shape[:2], t, 2 * t - 1)[..., :t]
    return ((q @ k.mT + shifted) / math.sqrt(D)).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(1, H, 16, 16)))
def bias_cut_from_a_larger_one(q, k, v, bias):
    t = q.shape[2]
    return (q @ k.mT + bias[:, :, :t, :t]).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(H)))
def sink_as_an_extra_column(q, k, v, sink):
    s = q @ k.mT
    column = sink.view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)
    return torch.cat([s, column], -1).softmax(-1)[..., :-1] @ v


@spelling(qkv)
def zero_key_as_an_extra_column(q, k, v):
    s = F.pad(q @ k.mT, (1, 0))
    return s.softmax(-1)[..., 1:] @ v


@spelling(lambda: (*qkv(), normal(H, 1, 1)))
def learned_softmax_plus(q, k, v, extra):
    e = (q @ k.mT).exp()
    return e @ v / (extra.exp() + e.sum(-1, keepdim=True))


@spelling(lambda: (*qkv(), normal(D), normal(D)))
def normalised_queries_and_keys(q, k, v, a, b):
    return (F.layer_norm(q, (D,), a) @ F.layer_norm(k, (D,), b).mT).softmax(-1) @ v


@spelling(qkv)
def rotary(q, k, v):
    i = torch.arange(q.shape[2], dtype=q.dtype)
    angle = i[:, None] * 10000 ** (-torch.arange(0, D, 2, dtype=q.dtype) / D)

    def turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    return (turn(q) @ turn(k).mT).masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v


# --- more heads ------------------------------------------------------------------------------


@spelling(grouped)
def grouped_stacked(q, k, v):
    k, v = (torch.stack([x, x], 2).flatten(1, 2) for x in (k, v))
    return (q @ k.mT).softmax(-1) @ v


@spelling(grouped)
def grouped_einsum(q, k, v):
    q = q.unflatten(1, (2, 2))
    weights = torch.einsum("bgrqd,bgkd->bgrqk", q, k).softmax(-1)
    return torch.einsum("bgrqk,bgkd->bgrqd", weights, v).flatten(1, 2)


@spelling(grouped)
def grouped_by_torch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@spelling(lambda: (normal(B, H, T, D), normal(B, T, D), normal(B, T, D)))
def one_key_head_broadcast(q, k, v):
    return (q @ k[:, None].mT).softmax(-1) @ v[:, None]


@spelling(lambda: (normal(B, T, H * D), normal(B, T, H * D), normal(B, T, H * D)))
def loop_over_heads(q, k, v):
    heads = []
    for h in range(H):
        one = slice(h * D, (h + 1) * D)
        heads.append((q[..., one] @ k[..., one].mT).softmax(-1) @ v[..., one])
    return torch.cat(heads, -1)


@spelling(lambda: (normal(B, H, T, D), normal(B, 2, T, D), normal(B, 2, T, D)))
def loop_over_heads_of_two_groups(q, k, v):
    heads = []
    for h in range(H):
        s = q[:, h] @ k[:, h // 2].mT / math.sqrt(D)
        heads.append(s.softmax(-1) @ v[:, h // 2])
    return torch.stack(heads, 1)


@spelling(lambda: (normal(B, T, 16), normal(H, 3, D, 16), normal(H)))
def heads_of_their_own_weights(x, w, slopes):
    i = torch.arange(x.shape[1])
    heads = []
    for h in range(H):
        q, k, v = (F.linear(x, w[h, part]) for part in range(3))
        s = (q @ k.mT / math.sqrt(D) + slopes[h] * (i[None] - i[:, None])).tril()
        heads.append(s.masked_fill(i[None] > i[:, None], -INF).softmax(-1) @ v)
    return torch.cat(heads, -1)


@spelling(lambda: (normal(B, T, H * D), normal(B, T, H * D), normal(B, T, H * D)))
def heads_stacked_into_the_batch(q, k, v):
    b = q.shape[0]
    q, k, v = (torch.cat(x.split(D, -1), 0) for x in (q, k, v))
    return torch.cat(((q @ k.mT).softmax(-1) @ v).split(b, 0), -1)


@spelling(lambda: (normal(B, H, 8, D), normal(B, H, 8, D), normal(B, H, 8, D)))
def local_blocks_by_view(q, k, v):
    q, k, v = (x.unflatten(2, (-1, 4)) for x in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).flatten(2, 3)


@spelling(lambda: (normal(B, H, 3, 4, D), normal(B, H, 3, 5, D), normal(B, H, 3, 5, D)))
def pixels_in_two_dimensions(q, k, v):
    s = torch.einsum("bhxyd,bhuvd->bhxyuv", q, k)
    weights = s.flatten(-2).softmax(-1).view_as(s)
    return torch.einsum("bhxyuv,bhuvd->bhxyd", weights, v)


# --- softmaxes in parts ----------------------------------------------------------------------


@spelling(cross)
def squared_softmax_renormalised(q, k, v):
    w = (q @ k.mT).softmax(-1) ** 2
    return w / w.sum(-1, keepdim=True) @ v


@spelling(cross)
def softmax_of_log_softmax(q, k, v):
    return F.softmax(F.log_softmax(q @ k.mT, -1), -1) @ v


@spelling(cross)
def powers_of_e(q, k, v):
    w = torch.pow(math.e, q @ k.mT / 4)
    return w / w.sum(3, keepdim=True) @ v


@spelling(lambda: (*qkv(), normal(H, 2)))
def two_sinks_in_front(q, k, v, sink):
    s = q @ k.mT
    s = torch.cat([sink[None, :, None].expand(s.shape[0], -1, s.shape[2], 2), s], -1)
    return s.softmax(-1)[..., 2:] @ v


@spelling(lambda: (*qkv(), normal(H, 1, 1)))
def sink_by_logaddexp(q, k, v, sink):
    s = q @ k.mT
    return (s - torch.logaddexp(s.logsumexp(-1, keepdim=True), sink)).exp() @ v


@spelling(with_padding)
def padding_multiplied_into_exponentials(q, k, v, keep):
    e = (q @ k.mT / 4).exp() * keep[:, None, None].to(q.dtype)
    return e / e.sum(-1, keepdim=True) @ v


@spelling(with_padding)
def padding_added(q, k, v, keep):
    bias = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, -INF)
    return (bias[:, None, None] + q @ k.mT / 3).softmax(-1) @ v


@spelling(with_padding)
def logarithm_of_the_padding_added(q, k, v, keep):
    return (q @ k.mT / 3 + keep[:, None, None].to(q.dtype).log()).softmax(-1) @ v


@spelling(lambda: (*qkv(), torch.ones(B, T, dtype=torch.int64)))
def padding_of_integers_times_the_smallest_float(q, k, v, mask):
    drop = (1.0 - mask[:, None, None].to(q.dtype)) * torch.finfo(q.dtype).min
    return (q @ k.mT + drop).softmax(-1) @ v


@spelling(lambda: (*qkv(), (torch.rand(B, T) > 0.3).to(torch.float64)))
def padding_of_numbers_times_a_million(q, k, v, mask):
    return (q @ k.mT - 1e6 * (1 - mask[:, None, None])).softmax(-1) @ v


@spelling(with_padding)
def a_token_put_in_front_of_the_padding(q, k, v, keep):
    k, v = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0))
    keep = torch.cat([torch.ones(keep.shape[0], 1, dtype=torch.bool), keep], 1)
    return (q @ k.mT).masked_fill(~keep[:, None, None], -INF).softmax(-1) @ v


@spelling(lambda: (*cross(), normal(H)))
def einsum_of_three_operands(q, k, v, scale):
    return torch.einsum("bhij,bhje->bhie", torch.einsum("bhid,bhjd,h->bhij", q, k, scale).softmax(-1), v)


@spelling(lambda: (*cross(), normal(H, D + 2, 5)))
def einsum_with_values_and_projection(q, k, v, w):
    weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhje,hec->bic", weights, v, w)


@spelling(lambda: (normal(T, D), normal(S, D), normal(S, D)))
def tensordot(q, k, v):
    return torch.tensordot(torch.tensordot(q, k, dims=([1], [1])).softmax(-1), v, dims=1)


@spelling(lambda: (normal(T, D), normal(S, D), normal(S, D)))
def inner_products(q, k, v):
    return torch.inner(torch.inner(q, k).softmax(-1), v.T)


@spelling(lambda: (*cross(), normal(B, H, T, 1)))
def a_constant_added_to_each_row(q, k, v, shift):
    return (q @ k.mT + shift).softmax(-1) @ v


@spelling(lambda: (normal(B, D, 3, 5), normal(B, D, 3, 5), normal(B, D, 3, 5)))
def channel_first_images(q, k, v):
    weights = (q.flatten(2).mT @ k.flatten(2)).softmax(-1)
    return (v.flatten(2) @ weights.mT).view(v.shape)


@spelling(qkv)
def vmapped_mask(q, k, v):
    i = torch.arange(q.shape[2])
    keep = torch.vmap(torch.vmap(lambda a, b: b <= a, (None, 0)), (0, None))(i, i)
    return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v


# --- keys in parts that are multiplied separately ----------------------------------------------


def prefixed() -> tuple[Tensor, ...]:
    return (*qkv(), normal(B, H, S, D), normal(B, H, S, D))


@spelling(prefixed)
def keys_and_values_in_two_parts(q, k, v, more_k, more_v):
    p = torch.cat([q @ more_k.mT, q @ k.mT], -1).div(math.sqrt(D)).softmax(-1)
    return p[..., : more_k.shape[2]] @ more_v + p[..., more_k.shape[2] :] @ v


@spelling(lambda: (*prefixed(), normal(B, S + T)))
def parts_split_under_one_mask(q, k, v, more_k, more_v, mask):
    p = torch.softmax(torch.cat([q @ more_k.mT, q @ k.mT], -1) + mask[:, None, None], -1)
    first, second = p.split([more_k.shape[2], k.shape[2]], -1)
    return torch.einsum("bhqk,bhkd->bqhd", second, v) + (first @ more_v).transpose(1, 2)


@spelling(lambda: (*qkv(), normal(B, H, S, D), normal(B, H, S, D), normal(B, H, S, D), normal(B, H, S, D)))
def keys_in_three_parts(q, k, v, a, a_values, c, c_values):
    n, m = a.shape[2], a.shape[2] + k.shape[2]
    p = torch.cat([q @ a.mT, q @ k.mT, q @ c.mT], -1).softmax(-1)
    return p[..., :n] @ a_values + p[..., n:m] @ v + p[..., m:] @ c_values


def with_shared_keys() -> tuple[Tensor, ...]:
    blocks = tuple(normal(B, H, 3, T, D) for _ in "qkv")
    return *blocks, normal(B, H, S, D), normal(B, H, S, D), normal(B, 3, S + T)


@spelling(with_shared_keys)
def shared_keys_beside_those_of_each_block(q, k, v, shared_k, shared_v, mask):
    n = shared_k.shape[2]
    s = [torch.einsum("bhnqd,bhkd->bhnqk", q, shared_k), torch.einsum("bhnqd,bhnkd->bhnqk", q, k)]
    p = (torch.cat(s, -1) + mask[:, None, :, None]).softmax(-1)
    own = torch.einsum("bhnqk,bhnkd->bhnqd", p[..., n:], v)
    return own + torch.einsum("bhnqk,bhkd->bhnqd", p[..., :n], shared_v)


# --- weights that are a sum of softmaxes --------------------------------------------------------


def two_scores() -> tuple[Tensor, ...]:
    return (*qkv(), normal(B, H, T, D), normal(B, H, T, D))


@spelling(lambda: (*two_scores(), normal(H)))
def differential(q, k, v, q_less, k_less, less):
    keep = causal(q.shape[2])
    first, second = ((a @ b.mT).masked_fill(~keep, -INF).softmax(-1) for a, b in ((q, k), (q_less, k_less)))
    return (first - (less.exp() + 0.2)[:, None, None] * second) @ v


@spelling(lambda: (normal(B, T, 3 * H * D), normal(5)))
def differential_by_pairs_of_heads(x, less):
    q, k, v = x.unflatten(-1, (3, -1)).unbind(2)
    q, k = (a.unflatten(-1, (H, D)).transpose(1, 2) for a in (q, k))
    p = (q @ k.mT / math.sqrt(D)).softmax(-1).unflatten(1, (H // 2, 2))
    return (p[:, :, 0] - less.exp().mean() * p[:, :, 1]) @ v.unflatten(-1, (H // 2, 2 * D)).transpose(1, 2)


@spelling(lambda: (*two_scores(), normal(B, 1, T, 1)))
def mixed_by_a_gate_of_the_query_and_masked(q, k, v, q_more, k_more, gate):
    gate = gate.sigmoid()
    p = gate * (q @ k.mT).softmax(-1) + (1 - gate) * (q_more @ k_more.mT).softmax(-1)
    return p.tril() @ v


@spelling(two_scores)
def mean_of_a_stack(q, k, v, q_more, k_more):
    return torch.stack([(q @ k.mT).softmax(-1), (q_more @ k_more.mT).softmax(-1)]).mean(0) @ v


@spelling(lambda: (*qkv(), normal(T, T)))
def near_and_far_weights_and_fixed_ones(q, k, v, fixed):
    s, i = q @ k.mT, torch.arange(q.shape[2])
    near = s.masked_fill((i[:, None] - i).abs() > 1, -INF).softmax(-1)
    return (0.5 * near + 0.25 * (s.softmax(-1) + fixed)) @ v


COUNT["differential"] = COUNT["differential_by_pairs_of_heads"] = COUNT["mean_of_a_stack"] = 2
COUNT["mixed_by_a_gate_of_the_query_and_masked"] = COUNT["near_and_far_weights_and_fixed_ones"] = 2


@near_miss(two_scores)
def difference_divided_by_its_own_sum(q, k, v, q_less, k_less):
    p = ((q @ k.mT).softmax(-1) - 0.5 * (q_less @ k_less.mT).softmax(-1)).tril()
    return p / p.sum(-1, keepdim=True) @ v


@near_miss(two_scores)
def softmaxes_multiplied(q, k, v, q_more, k_more):
    return ((q @ k.mT).softmax(-1) * (q_more @ k_more.mT).softmax(-1)) @ v


@near_miss(two_scores)
def difference_cut_off_at_zero(q, k, v, q_less, k_less):
    return ((q @ k.mT).softmax(-1) - (q_less @ k_less.mT).softmax(-1)).relu() @ v


@near_miss(two_scores)
def one_of_two_over_queries(q, k, v, q_less, k_less):
    return ((q @ k.mT).softmax(-1) - (q_less @ k_less.mT).softmax(-2)) @ v


@mutant(two_scores)
def the_other_softmax_of_the_next_key(q, k, v, q_less, k_less):
    return ((q @ k.mT).softmax(-1) - (q_less @ k_less.mT).softmax(-1).roll(1, -1)) @ v


# --- sinks written as gates ----------------------------------------------------------------------


def with_sink() -> tuple[Tensor, ...]:
    return (*qkv(), normal(H))


@spelling(with_sink)
def gate_of_the_rows_total(q, k, v, sink):
    s = (q @ k.mT).masked_fill(~causal(q.shape[2]), -INF)
    gate = (torch.logsumexp(s, -1) - sink.view(1, -1, 1)).sigmoid()
    return ((s.softmax(-1) @ v) * gate.unsqueeze(-1)).transpose(1, 2)


@spelling(with_sink)
def divided_by_one_plus_a_ratio_of_totals(q, k, v, sink):
    s = q @ k.mT
    top = s.amax(-1, keepdim=True)
    e = (s - top).exp()
    total = e.sum(-1, keepdim=True)
    out = (e / total @ v).transpose(1, 2)
    return out / (1 + torch.exp(sink[:, None, None] - top - total.log())).transpose(1, 2)


@spelling(lambda: (*with_sink(), normal(H, D)))
def weights_gated_by_one_minus_the_sink(q, k, v, sink, key):
    s = q @ k.mT
    empty = torch.einsum("bhqd,hd->bhq", q, key) + sink[:, None]
    gate = 1 - torch.sigmoid(empty - s.logsumexp(-1))
    return (s.softmax(-1) * gate.unsqueeze(-1)) @ v


@near_miss(with_sink)
def gate_of_twice_the_total(q, k, v, sink):
    s = q @ k.mT
    return (s.softmax(-1) @ v) * (2 * s.logsumexp(-1, keepdim=True) - sink[:, None, None]).sigmoid()


@near_miss(with_sink)
def gate_that_closes_with_the_total(q, k, v, sink):
    s = q @ k.mT
    return (s.softmax(-1) @ v) * (sink[:, None, None] - s.logsumexp(-1, keepdim=True)).sigmoid()


@near_miss(qkv)
def gate_of_the_columns_total(q, k, v):
    s = q @ k.mT
    return (s.softmax(-1) @ v) * s.logsumexp(-2).unsqueeze(-1).sigmoid()


@near_miss(with_sink)
def gated_and_the_total_returned(q, k, v, sink):
    s = q @ k.mT
    total = s.logsumexp(-1, keepdim=True)
    return (s.softmax(-1) @ v) * (total - sink[:, None, None]).sigmoid(), total


# --- near misses -----------------------------------------------------------------------------


@near_miss(qkv)
def softmax_over_queries(q, k, v):
    return (q @ k.mT).softmax(-2) @ v


@near_miss(qkv)
def softmax_over_heads(q, k, v):
    return (q @ k.mT).softmax(1) @ v


@near_miss(prefixed)
def parts_of_which_a_key_is_left_out(q, k, v, more_k, more_v):
    n = more_k.shape[2]
    p = torch.cat([q @ more_k.mT, q @ k.mT], -1).softmax(-1)
    return p[..., : n - 1] @ more_v[:, :, : n - 1] + p[..., n:] @ v


@near_miss(prefixed)
def parts_of_which_a_key_counts_twice(q, k, v, more_k, more_v):
    n = more_k.shape[2]
    p = torch.cat([q @ more_k.mT, q @ k.mT], -1).softmax(-1)
    return p[..., :n] @ more_v + p[..., n - 1 :] @ F.pad(v, (0, 0, 1, 0))


@near_miss(prefixed)
def parts_with_queries_of_their_own(q, k, v, more_k, more_v):
    p = torch.cat([q @ more_k.mT, (q + 1).tanh() @ k.mT], -1).softmax(-1)
    return p[..., : more_k.shape[2]] @ more_v + p[..., more_k.shape[2] :] @ v


@near_miss(lambda: (*qkv(), normal(H, H)))
def talking_heads(q, k, v, mix):
    return torch.einsum("bhqk,hg->bgqk", (q @ k.mT).softmax(-1), mix) @ v


@near_miss(qkv)
def sigmoid_attention(q, k, v):
    return (q @ k.mT).sigmoid() @ v


@near_miss(qkv)
def double_softmax(q, k, v):
    return (q @ k.mT).softmax(-1).softmax(-1) @ v


@near_miss(qkv)
def renormalised_after_masking(q, k, v):
    p = (q @ k.mT).softmax(-1) * causal(q.shape[2])
    return (p / p.sum(-1, keepdim=True)) @ v


@near_miss(qkv)
def weights_returned(q, k, v):
    p = (q @ k.mT).softmax(-1)
    return p @ v, p


@near_miss(lambda: (normal(B, H, T, T), normal(B, H, T, T), normal(B, H, T, T)))
def keys_permuted_not_transposed(q, k, v):
    return ((q * k).softmax(-1)) @ v


@near_miss(qkv)
def top_k(q, k, v):
    s = q @ k.mT
    kept = s >= s.topk(3, dim=-1).values[..., -1:]
    return s.masked_fill(~kept, -INF).softmax(-1) @ v


@near_miss(qkv)
def normalised_by_another_sum(q, k, v):
    e = (q @ k.mT).exp()
    return (e / (2 * q @ k.mT).exp().sum(-1, keepdim=True)) @ v


@near_miss(qkv)
def linear_attention(q, k, v):
    return (q @ k.mT) @ v


@near_miss(qkv)
def linear_attention_normalised(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT)


@near_miss(qkv)
def mean_of_the_values(q, k, v):
    return torch.zeros(*q.shape[:3], k.shape[2], dtype=q.dtype).softmax(-1) @ v


@near_miss(qkv)
def softmax_over_features(q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


@near_miss(qkv)
def scores_returned(q, k, v):
    s = q @ k.mT
    return s.softmax(-1) @ v, s


@near_miss(qkv)
def scores_changed_after_use(q, k, v):
    s = q @ k.mT
    out = s.softmax(-1) @ v
    s.add_(1)
    return out, s


@near_miss(qkv)
def gumbel_like_straight_through(q, k, v):
    p = (q @ k.mT).softmax(-1)
    hard = F.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype)
    return (hard - p.detach() + p) @ v


@mutant(lambda: (*qkv(), normal(H, H)))
def talking_heads_before_softmax(q, k, v, mix):
    return torch.einsum("bhqk,hg->bgqk", q @ k.mT, mix).softmax(-1) @ v


@spelling(qkv)
def squared_weights(q, k, v):
    p = (q @ k.mT).softmax(-1)
    p = p * p
    return (p / p.sum(-1, keepdim=True)) @ v


@near_miss(qkv)
def additive_scores(q, k, v):
    return torch.tanh(q.unsqueeze(3) + k.unsqueeze(2)).sum(-1).softmax(-1) @ v


@near_miss(qkv)
def distance_scores(q, k, v):
    return (-torch.cdist(q, k)).softmax(-1) @ v


@near_miss(qkv)
def softmax_over_distances_in_a_band(q, k, v):
    i = torch.arange(q.shape[2])
    behind = i[:, None] - i
    in_band = (behind >= 0) & (behind < 3)
    s = torch.gather(F.pad(q @ k.mT, (2, 0)), -1, (i[:, None] + torch.arange(3)).expand(*q.shape[:2], -1, -1))
    p = F.pad(s.softmax(-1), (0, 1))
    return p.gather(-1, torch.where(in_band, 2 - behind, 3).expand(*q.shape[:2], -1, -1)) @ v


@near_miss(qkv)
def small_number_beside_exponentials_that_were_shifted(q, k, v):
    s = q @ k.mT
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


# --- mutants: one thing changed ------------------------------------------------------------------


@mutant(qkv)
def small_fill_leaks(q, k, v):
    return torch.where(causal(q.shape[2]), q @ k.mT, -5.0).softmax(-1) @ v


@mutant(qkv)
def scaled_after_a_finite_fill(q, k, v):
    return ((q @ k.mT).masked_fill(~causal(q.shape[2]), -1e4) * 1e-4).softmax(-1) @ v


@mutant(qkv)
def zeros_instead_of_minus_infinity(q, k, v):
    return (q @ k.mT * causal(q.shape[2])).softmax(-1) @ v


@mutant(lambda: (*qkv(), torch.zeros(B, T, dtype=torch.bool)))
def no_key_is_kept_finite(q, k, v, keep):
    return (q @ k.mT).masked_fill(~keep[:, None, None], -1e9).softmax(-1) @ v


@mutant(lambda: (*qkv(), torch.zeros(B, T, dtype=torch.bool)))
def no_key_is_kept(q, k, v, keep):
    return (q @ k.mT).masked_fill(~keep[:, None, None], -INF).softmax(-1) @ v


@mutant(qkv)
def sees_only_the_future(q, k, v):
    return (q @ k.mT).masked_fill(causal(q.shape[2]), -INF).softmax(-1) @ v


@mutant(qkv)
def one_step_ahead(q, k, v):
    keep = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(1)
    return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v


@mutant(cross)
def causal_top_left_of_a_rectangle(q, k, v):
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v


@mutant(qkv)
def mask_on_the_transposed_scores(q, k, v):
    s = (k @ q.mT).masked_fill(~causal(q.shape[2]), -INF)
    return s.mT.softmax(-1) @ v


@mutant(qkv)
def masked_with_one_entry_changed(q, k, v):
    keep = causal(q.shape[2])
    keep[3, 5] = True
    return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v


@mutant(qkv)
def keys_reversed(q, k, v):
    return (q @ k.flip(2).mT).softmax(-1) @ v


@mutant(qkv)
def values_reversed(q, k, v):
    return (q @ k.mT).masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v.flip(2)


@mutant(qkv)
def keys_rolled(q, k, v):
    return (q @ k.roll(1, 2).mT).softmax(-1) @ v


@mutant(qkv)
def keys_reshaped_not_transposed(q, k, v):
    return (q @ k.reshape(*k.shape[:2], k.shape[3], k.shape[2])).softmax(-1) @ v


@mutant(qkv)
def heads_swapped(q, k, v):
    return (q @ k[:, [1, 0, 3, 2]].mT).softmax(-1) @ v


@mutant(qkv)
def batches_swapped(q, k, v):
    return (q @ k.flip(0).mT).softmax(-1) @ v


@mutant(grouped)
def groups_interleaved_the_other_way(q, k, v):
    return (q @ k.repeat(1, 2, 1, 1).mT).softmax(-1) @ v.repeat_interleave(2, 1)


@mutant(qkv)
def weights_used_twice(q, k, v):
    p = (q @ k.mT).softmax(-1)
    return p @ v + p @ k


@mutant(qkv)
def weights_transposed(q, k, v):
    return (q @ k.mT).softmax(-1).mT @ v


@mutant(qkv)
def weights_changed_in_place(q, k, v):
    p = (q @ k.mT).softmax(-1) * 1
    p.mul_(2).masked_fill_(~causal(q.shape[2]), 0.5)
    return p @ v


@mutant(qkv)
def scores_changed_in_place_between(q, k, v):
    s = q @ k.mT
    top = s.detach().amax(-1, keepdim=True)
    s += torch.arange(s.shape[-1])
    return (s - top).softmax(-1) @ v


@mutant(qkv)
def normaliser_before_the_mask(q, k, v):
    e = (q @ k.mT).exp()
    return (e * causal(q.shape[2]) / e.sum(-1, keepdim=True)) @ v


@mutant(qkv)
def normaliser_of_another_mask(q, k, v):
    s = q @ k.mT
    e = s.masked_fill(~causal(q.shape[2]), -INF).exp()
    other = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(1), -INF).exp()
    return (e / other.sum(-1, keepdim=True)) @ v


@mutant(qkv)
def normalised_over_queries(q, k, v):
    e = (q @ k.mT).exp()
    return (e / e.sum(-2, keepdim=True)) @ v


@mutant(qkv)
def small_number_in_the_normaliser(q, k, v):
    e = (q @ k.mT - 3).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


@mutant(qkv)
def max_over_queries_subtracted(q, k, v):
    s = q @ k.mT
    return (s - s.amax(-2, keepdim=True)).softmax(-1) @ v


@mutant(qkv)
def gradient_stopped_at_the_weights(q, k, v):
    return (q @ k.mT).softmax(-1).detach() @ v


@mutant(qkv)
def gradient_stopped_at_the_keys(q, k, v):
    return (q @ k.detach().mT).softmax(-1) @ v


@mutant(qkv)
def gradient_stopped_at_the_scores(q, k, v):
    with torch.no_grad():
        s = q @ k.mT
    return s.softmax(-1) @ v


@mutant(qkv)
def scores_through_float32(q, k, v):
    return (q @ k.mT).float().softmax(-1).double() @ v


TOLERANCE["scores_through_float32"] = 1e-5  # eager's own rounding, which the fused node does not do


@mutant(qkv)
def scores_rounded(q, k, v):
    return (q @ k.mT).round().softmax(-1) @ v


@mutant(qkv)
def scores_clamped(q, k, v):
    return (q @ k.mT).clamp(-1, 1).softmax(-1) @ v


@mutant(qkv)
def nan_to_num_of_the_scores(q, k, v):
    s = (q @ k.mT).masked_fill(~causal(q.shape[2]), -INF)
    return s.nan_to_num(neginf=-2.0).softmax(-1) @ v


@mutant(lambda: (*qkv(), normal(B, H, T, T)))
def bias_transposed(q, k, v, bias):
    return (q @ k.mT + bias.mT).softmax(-1) @ v


@mutant(lambda: (*qkv(), normal(T)))
def bias_on_queries_only(q, k, v, bias):
    return (q @ k.mT + bias[:, None]).softmax(-1) @ v


@mutant(qkv)
def window_wraps_around(q, k, v):
    i = torch.arange(q.shape[2])
    behind = (i[:, None] - i[None]) % q.shape[2]
    return (q @ k.mT).masked_fill(behind > 2, -INF).softmax(-1) @ v


@mutant(qkv)
def integer_division_towards_zero(q, k, v):
    i = torch.arange(q.shape[2])
    block = torch.div(i[:, None] - i[None], 3, rounding_mode="trunc")
    return (q @ k.mT).masked_fill(block != 0, -INF).softmax(-1) @ v


@mutant(qkv)
def remainder_with_the_dividends_sign(q, k, v):
    i = torch.arange(q.shape[2])
    place = torch.fmod(i[None] - i[:, None], 3)
    return (q @ k.mT).masked_fill(place == 2, -INF).softmax(-1) @ v


@mutant(qkv)
def negative_position_reads_from_the_end(q, k, v):
    i = torch.arange(q.shape[2])
    table = torch.linspace(-1, 1, 2 * q.shape[2] - 1, dtype=q.dtype)
    return (q @ k.mT + table[i[None] - i[:, None]]).softmax(-1) @ v


@mutant(qkv)
def dropped_keys_in_the_values(q, k, v):
    return (q @ k.mT).softmax(-1)[..., :-1] @ v[:, :, :-1]


@mutant(qkv)
def every_second_key(q, k, v):
    return (q @ k[:, :, ::2].mT).softmax(-1) @ v[:, :, ::2]


@mutant(lambda: (*cross(), normal(B, H, T, 5), normal(B, H, 5, D + 2)))
def two_sets_of_keys_in_one_softmax(q, k, v, other_scores, other_v):
    p = torch.cat([q @ k.mT, other_scores], -1).softmax(-1)
    own, other = p.split([k.shape[2], 5], -1)
    return own @ v + other @ other_v


@mutant(qkv)
def positions_that_wrap_around(q, k, v):
    i = (torch.arange(q.shape[2]) * 20).to(torch.int8)
    return (q @ k.mT).masked_fill(i[:, None] < i[None], -INF).softmax(-1) @ v


@mutant(with_padding)
def a_row_with_nothing_but_a_fill_under_an_exponential(q, k, v, keep):
    e = (q @ k.mT).masked_fill(~(keep & keep[:, :1].logical_not())[:, None, None], -1e9).exp()
    return e / e.sum(-1, keepdim=True) @ v


@mutant(with_padding)
def softmax_in_float32_of_the_smallest_double(q, k, v, keep):
    drop = torch.zeros(keep.shape, dtype=torch.float64)
    drop = drop.masked_fill(keep & keep[:, :1], torch.finfo(torch.float64).min).to(q.dtype)
    return torch.softmax(q @ k.mT + drop[:, None, None], -1, dtype=torch.float32).to(q.dtype) @ v


TOLERANCE["softmax_in_float32_of_the_smallest_double"] = 1e-5


@mutant(lambda: (*qkv(), normal(B, H, T, 4), normal(B, H, T, 4)))
def products_multiplied(q, k, v, q_more, k_more):
    return ((q @ k.mT) * (q_more @ k_more.mT)).softmax(-1) @ v


@mutant(lambda: (*qkv(), normal(B, H, T, 4), normal(B, H, T, 4)))
def products_of_which_one_is_capped(q, k, v, q_more, k_more):
    return (q @ k.mT + torch.tanh(q_more @ k_more.mT)).softmax(-1) @ v


@mutant(lambda: (*qkv(), normal(B, H, T, 4), normal(B, H, T, 4), normal(H, 1, 1)))
def products_of_which_one_is_gated_by_head(q, k, v, q_more, k_more, gate):
    return (q @ k.mT + gate * (q_more @ k_more.mT)).softmax(-1) @ v


# --- ops by their other names, and ops that torch writes with others ----------------------------


@spelling(with_padding)
def ops_by_their_other_names(q, k, v, keep):
    scores = torch.multiply(torch.linalg.matmul(q, k.swapdims(-1, -2)), 0.5)
    drop = torch.not_equal(keep[:, None, None].int(), 1)
    scores = torch.subtract(scores, torch.divide(drop.to(q.dtype), 1e-9))
    return torch.linalg.matmul(torch.special.softmax(scores, -1), v)


@spelling(qkv)
def mask_joined_of_two_pieces(q, k, v):
    t = q.shape[2]
    memory, own = torch.zeros(t, 2), torch.full((t, t), -INF).triu(1)
    mask = torch.hstack([memory, own])[:, 2:].to(q.dtype)
    return (q @ k.mT + mask).softmax(-1) @ v


@spelling(cross)
def a_column_is_assigned(q, k, v):
    scores = q @ k.mT
    scores[..., 0] = -INF
    return scores.softmax(-1) @ v


@spelling(qkv)
def the_diagonal_is_filled(q, k, v):
    scores = q @ k.mT
    scores.diagonal(dim1=-2, dim2=-1).fill_(-1e9)
    return scores.softmax(-1) @ v


@spelling(qkv)
def minus_infinity_filled_into_zeros(q, k, v):
    t = q.shape[2]
    return (q @ k.mT + torch.zeros(t, t).fill_(-INF).triu(1).to(q.dtype)).softmax(-1) @ v


@spelling(qkv)
def written_into_an_empty_tensor(q, k, v):
    out = torch.empty_like(q)
    for h in range(H):
        out[:, h] = (q[:, h] @ k[:, h].mT).softmax(-1) @ v[:, h]
    return out


COUNT["written_into_an_empty_tensor"] = H


@spelling(qkv)
def leaky_scores(q, k, v):
    return F.leaky_relu(q @ k.mT, 0.2).softmax(-1) @ v


@spelling(lambda: (*with_padding(), normal(T, T)))
def a_mask_is_added_before_a_bias(q, k, v, keep, bias):
    scores = q @ k.mT + 1e9 * (keep[:, None, None].to(q.dtype) - 1)
    return (scores + bias[: q.shape[2], : q.shape[2]]).softmax(-1) @ v


@spelling(with_padding)
def the_smaller_of_two_masks(q, k, v, keep):
    causal = torch.ones(q.shape[2], q.shape[2], dtype=q.dtype).tril()
    shown = torch.minimum(keep[:, None, None].to(q.dtype), causal)
    return (q @ k.mT + (shown - 1) * 1e9).softmax(-1) @ v


@spelling(lambda: (normal(D), normal(S, D), normal(S, D + 2)))
def one_query_multiplied_and_summed(q, k, v):
    weights = ((k * q).sum(1) / D**0.5).softmax(0)
    return (weights[:, None] * v).sum(0)


@spelling(lambda: (normal(B, T, H), normal(B, T, H), normal(B, T, H, D), torch.rand(B, T, T) < 0.6))
def graph_attention(of_query, of_key, v, edges):
    scores = F.leaky_relu(of_query[:, :, None] + of_key[:, None], 0.2)
    scores = scores.masked_fill(~edges[..., None], -9e15)
    return torch.einsum("bqkh,bkhd->bqhd", scores.softmax(2), v)


@spelling(lambda: (normal(B, T), normal(B, S), normal(B, S, D)))
def scores_are_an_outer_product(a, b, v):
    return (0.5 * a[:, :, None] * b[:, None]).softmax(-1) @ v


@spelling(qkv)
def mask_written_entry_by_entry(q, k, v):
    mask = torch.empty(T, T, dtype=torch.bool)
    for row in range(T):
        for column in range(T):
            mask[row, column] = row - 2 <= column <= row
    return (q @ k.mT).masked_fill(~mask, -INF).softmax(-1) @ v


@mutant(qkv)
def mask_with_an_odd_entry_written(q, k, v):
    mask = torch.empty(T, T, dtype=torch.bool)
    for row in range(T):
        for column in range(T):
            mask[row, column] = column <= row
    mask[5, 2] = False
    return (q @ k.mT).masked_fill(~mask, -INF).softmax(-1) @ v


@spelling(qkv)
def mask_at_the_indices_of_a_triangle(q, k, v):
    mask = torch.zeros(T, T)
    mask[tuple(torch.triu_indices(T, T, 1))] = -INF
    return (q @ k.mT + mask).softmax(-1) @ v


@spelling(qkv)
def mask_from_three_diagonals(q, k, v):
    band = sum(torch.diag(torch.ones(q.shape[-2] - abs(offset)), offset) for offset in (-1, 0, 1))
    return (q @ k.mT).masked_fill(band == 0, -INF).softmax(-1) @ v


@spelling(qkv)
def finite_entries_of_a_mask_are_kept(q, k, v):
    mask = torch.full((q.shape[-2], k.shape[-2]), -INF).triu(1)
    return torch.where(torch.isfinite(mask), q @ k.mT, -1e9).softmax(-1) @ v


@spelling(qkv)
def clipped_to_six(q, k, v):
    return F.relu6(q @ k.mT).softmax(-1) @ v


@spelling(qkv)
def one_head_is_masked_apart(q, k, v):
    scores, place = q @ k.mT, torch.arange(q.shape[2])
    scores[:, 0] = scores[:, 0].masked_fill((place[:, None] - place).abs() > 2, -1e9)
    return scores.softmax(-1) @ v


@near_miss(qkv)
def a_head_with_the_scores_of_another(q, k, v):
    scores = q @ k.mT
    scores[:, 1] = scores[:, 0]
    return scores.softmax(-1) @ v


@spelling(cross)
def the_first_query_has_another_scale(q, k, v):
    scores = q @ k.mT
    return torch.cat([scores[:, :, :1] * 2, scores[:, :, 1:]], 2).softmax(-1) @ v


@spelling(cross)
def listed_columns_are_assigned(q, k, v):
    scores = q @ k.mT
    scores[..., [0, -2, 2]] = -INF
    return scores.softmax(-1) @ v


@spelling(grouped)
def groups_of_queries_in_one_product(q, k, v):
    b, heads, t, width = q.shape
    groups = k.shape[1]
    scores = (q.reshape(b, groups, heads // groups * t, width) @ k.mT).view(b, heads, t, -1)
    weights = scores.masked_fill(~causal(t), -INF).softmax(-1)
    return (weights.view(b, groups, heads // groups * t, -1) @ v).view(b, heads, t, width)


@spelling(lambda: (*[normal(T, B, H, D) for _ in range(3)], normal(D, D)))
def relative_shift_of_distances_counted_down(q, k, v, weight):
    tokens = k.shape[0]
    far = torch.arange(tokens - 1, -1, -1.0, dtype=q.dtype)[:, None] / 10 ** torch.arange(
        0, D, 2, dtype=q.dtype
    )
    table = torch.cat([far.sin(), far.cos()], -1) @ weight
    by_distance = torch.einsum("ibhd,jd->ijbh", q, table)
    padded = torch.cat([by_distance.new_zeros(tokens, 1, *by_distance.shape[2:]), by_distance], 1)
    shifted = padded.view(tokens + 1, tokens, *by_distance.shape[2:])[1:].view_as(by_distance)
    scores = torch.einsum("ibhd,jbhd->ijbh", q, k) + shifted
    scores = scores.masked_fill(~causal(tokens)[:, :, None, None], -INF)
    return torch.einsum("ijbh,jbhd->ibhd", scores.softmax(1), v)


@spelling(lambda: (*[normal(4 * (B - 1), H, 9, D) for _ in range(3)], normal(4, 9, 9)))
def windows_of_one_image(q, k, v, mask):
    images = q.shape[0] // 4
    assert images == B - 1
    scores = (q @ k.mT).view(images, 4, q.shape[1], 9, 9) + mask[:, None]
    return scores.view(-1, q.shape[1], 9, 9).softmax(-1) @ v


@spelling(qkv, NOT_YET)
def blocks_of_keys_one_after_another(q, k, v):
    most, total, out = torch.full(q.shape[:3], -INF, dtype=q.dtype)[..., None], 0.0, 0.0
    for keys, values in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True):
        scores = q @ keys.mT
        now = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights, kept = (scores - now).exp(), (most - now).exp()
        total, out, most = kept * total + weights.sum(-1, keepdim=True), kept * out + weights @ values, now
    return out / total


@spelling(cross, NOT_YET)
def cosine_by_its_function(q, k, v):
    return (10 * F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)).softmax(-1) @ v
