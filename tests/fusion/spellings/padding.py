"""Masks that come with the data: padding, lengths, documents, and any mask that is an argument."""

import math

import torch
import torch.nn.functional as F

from .registry import INF, D, H, causal, normal, qkv, size, spelling, with_padding

spelling(
    with_padding,
    padding_kept=lambda q, k, v, keep: (q @ k.mT).masked_fill(~keep[:, None, None, :], -INF).softmax(-1) @ v,
    logarithm_of_the_padding_added=lambda q, k, v, keep: (
        (q @ k.mT / 3 + keep[:, None, None].to(q.dtype).log()).softmax(-1) @ v
    ),
)


with spelling(with_padding):

    def padding_dropped_and_causal(q, k, v, drop):
        s = (q @ k.mT).masked_fill(drop[:, None, None, :], -INF)
        return s.masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v

    def padding_multiplied_into_exponentials(q, k, v, keep):
        e = (q @ k.mT / 4).exp() * keep[:, None, None].to(q.dtype)
        return e / e.sum(-1, keepdim=True) @ v

    def padding_added(q, k, v, keep):
        bias = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, -INF)
        return (bias[:, None, None] + q @ k.mT / 3).softmax(-1) @ v

    def a_token_put_in_front_of_the_padding(q, k, v, keep):
        k, v = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0))
        keep = torch.cat([torch.ones(keep.shape[0], 1, dtype=torch.bool), keep], 1)
        return (q @ k.mT).masked_fill(~keep[:, None, None], -INF).softmax(-1) @ v

    def the_smaller_of_two_masks(q, k, v, keep):
        causal = torch.ones(q.shape[2], q.shape[2], dtype=q.dtype).tril()
        shown = torch.minimum(keep[:, None, None].to(q.dtype), causal)
        return (q @ k.mT + (shown - 1) * 1e9).softmax(-1) @ v

    def ops_by_their_other_names(q, k, v, keep):
        scores = torch.multiply(torch.linalg.matmul(q, k.swapdims(-1, -2)), 0.5)
        drop = torch.not_equal(keep[:, None, None].int(), 1)
        scores = torch.subtract(scores, torch.divide(drop.to(q.dtype), 1e-9))
        return torch.linalg.matmul(torch.special.softmax(scores, -1), v)


with spelling(lambda: (*qkv(), torch.ones(size.B, size.T, dtype=torch.int64))):

    def bert_extended_mask(q, k, v, mask):
        extended = (1.0 - mask[:, None, None, :].to(q.dtype)) * -10000.0
        return (q @ k.mT / math.sqrt(D) + extended).softmax(-1) @ v

    def padding_of_ones_and_zeros(q, k, v, mask):
        return (q @ k.mT).masked_fill(mask[:, None, None] == 0, -1e9).softmax(-1) @ v

    def padding_of_integers_times_the_smallest_float(q, k, v, mask):
        drop = (1.0 - mask[:, None, None].to(q.dtype)) * torch.finfo(q.dtype).min
        return (q @ k.mT + drop).softmax(-1) @ v


@spelling(lambda: (*qkv(), torch.rand(size.B, 1, size.T, size.T) > 0.3))
def any_boolean_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@spelling(
    lambda: (
        *qkv(),
        torch.zeros(size.T, size.T, dtype=torch.float64).masked_fill(
            torch.ones(size.T, size.T).triu(1) > 0, -INF
        ),
    )
)
def any_additive_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@spelling(lambda: (*qkv(), torch.arange(size.T).expand(size.B, size.T) // 3))
def documents(q, k, v, document):
    same = document[:, None, :] == document[:, :, None]
    return (q @ k.mT).masked_fill(~same[:, None], -INF).softmax(-1) @ v


@spelling(lambda: (*qkv(), size.T - torch.arange(size.B)))
def lengths(q, k, v, length):
    keep = torch.arange(k.shape[2])[None] < length[:, None]
    return (q @ k.mT).masked_fill(~keep[:, None, None], -INF).softmax(-1) @ v


@spelling(lambda: (*qkv(), torch.arange(size.T).expand(size.B, size.T) % 3))
def documents_by_separators(q, k, v, tokens):
    document = (tokens == 2).cumsum(-1)
    same = document[:, None, :] == document[:, :, None]
    s = (q @ k.mT).masked_fill(~same[:, None], -INF)
    return s.masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v


@spelling(lambda: (*qkv(), torch.rand(size.B, size.T) > 0.2))
def padding_on_both_sides(q, k, v, keep):
    pairs = keep[:, None, :, None] & keep[:, None, None, :]
    return (q @ k.mT).masked_fill(~pairs, torch.finfo(q.dtype).min).softmax(-1) @ v


@spelling(lambda: (*qkv(), (torch.rand(size.B, size.T) > 0.3).to(torch.float64)))
def padding_of_numbers_times_a_million(q, k, v, mask):
    return (q @ k.mT - 1e6 * (1 - mask[:, None, None])).softmax(-1) @ v


def flat_heads_and_integers():
    """Heads folded into the batch, and a mask of ones and zeros `[B, T]`."""
    flat = (t.flatten(0, 1) for t in qkv())
    return (*flat, (torch.rand(size.B, size.T) > 0.3).long())


with spelling(flat_heads_and_integers):

    def integers_times_a_billion_repeated_for_each_head(q, k, v, mask):
        drop = ((mask - 1) * 1000000000).repeat_interleave(H, 0).unsqueeze(1)
        return (q @ k.mT + drop).softmax(-1) @ v

    def integers_repeated_for_each_head_times_a_billion(q, k, v, mask):
        shown = torch.repeat_interleave(mask, H, dim=0)[:, None]
        return (q @ k.mT - 1e9 * (1 - shown)).softmax(-1) @ v

    def integers_that_multiply_and_add(q, k, v, mask):
        shown = mask.repeat_interleave(H, 0)[:, None]
        return (q @ k.mT * shown + (1 - shown) * -1e30).softmax(-1) @ v


@spelling(lambda: (*with_padding(), normal(size.T, size.T)))
def a_mask_is_added_before_a_bias(q, k, v, keep, bias):
    scores = q @ k.mT + 1e9 * (keep[:, None, None].to(q.dtype) - 1)
    return (scores + bias[: q.shape[2], : q.shape[2]]).softmax(-1) @ v
