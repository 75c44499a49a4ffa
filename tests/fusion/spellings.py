"""Spellings of attention, each a function of tensors with the inputs to call it with.

`MUST_FUSE` are attention whichever way they are put; `MUST_NOT` are near misses: things that look like
attention, one change away from it, and have another meaning. Both are run against eager in float64.
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


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def qkv() -> tuple[Tensor, ...]:
    return normal(B, H, T, D), normal(B, H, T, D), normal(B, H, T, D)


def cross() -> tuple[Tensor, ...]:
    return normal(B, H, T, D), normal(B, H, S, D), normal(B, H, S, D + 2)


def grouped() -> tuple[Tensor, ...]:
    return normal(B, H, T, D), normal(B, 2, T, D), normal(B, 2, T, D)


def with_padding() -> tuple[Tensor, ...]:
    return (*qkv(), torch.tensor([[True] * T, [True] * (T - 2) + [False] * 2]))


def spelling(
    inputs: Callable[[], tuple[Tensor, ...]], table: dict[str, Spelling] = MUST_FUSE
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        table[function.__name__] = (function, inputs)
        return function

    return add


def near_miss(inputs: Callable[[], tuple[Tensor, ...]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return spelling(inputs, MUST_NOT)


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


@spelling(lambda: (*qkv(), torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0] * 7])))
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


# --- near misses -----------------------------------------------------------------------------


@near_miss(qkv)
def softmax_over_queries(q, k, v):
    return (q @ k.mT).softmax(-2) @ v


@near_miss(qkv)
def softmax_over_heads(q, k, v):
    return (q @ k.mT).softmax(1) @ v


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
