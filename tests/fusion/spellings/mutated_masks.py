"""Mutants: a spelling whose mask, fill, bias or position has one thing changed."""

import torch

from .registry import INF, H, causal, cross, mutant, normal, qkv, size, with_padding

mutant(
    qkv,
    small_fill_leaks=lambda q, k, v: torch.where(causal(q.shape[2]), q @ k.mT, -5.0).softmax(-1) @ v,
    scaled_after_a_finite_fill=lambda q, k, v: (
        ((q @ k.mT).masked_fill(~causal(q.shape[2]), -1e4) * 1e-4).softmax(-1) @ v
    ),
    zeros_instead_of_minus_infinity=lambda q, k, v: (q @ k.mT * causal(q.shape[2])).softmax(-1) @ v,
    sees_only_the_future=lambda q, k, v: (q @ k.mT).masked_fill(causal(q.shape[2]), -INF).softmax(-1) @ v,
)


mutant(
    lambda: (*qkv(), torch.zeros(size.B, size.T, dtype=torch.bool)),
    no_key_is_kept_finite=lambda q, k, v, keep: (
        (q @ k.mT).masked_fill(~keep[:, None, None], -1e9).softmax(-1) @ v
    ),
    no_key_is_kept=lambda q, k, v, keep: (q @ k.mT).masked_fill(~keep[:, None, None], -INF).softmax(-1) @ v,
)


with mutant(qkv):

    def one_step_ahead(q, k, v):
        keep = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(1)
        return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v

    def mask_on_the_transposed_scores(q, k, v):
        s = (k @ q.mT).masked_fill(~causal(q.shape[2]), -INF)
        return s.mT.softmax(-1) @ v

    def masked_with_one_entry_changed(q, k, v):
        keep = causal(q.shape[2])
        keep[3, 5] = True
        return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v

    def mask_with_an_odd_entry_written(q, k, v):
        mask = torch.empty(size.T, size.T, dtype=torch.bool)
        for row in range(size.T):
            for column in range(size.T):
                mask[row, column] = column <= row
        mask[5, 2] = False
        return (q @ k.mT).masked_fill(~mask, -INF).softmax(-1) @ v

    def nan_to_num_of_the_scores(q, k, v):
        s = (q @ k.mT).masked_fill(~causal(q.shape[2]), -INF)
        return s.nan_to_num(neginf=-2.0).softmax(-1) @ v

    def window_wraps_around(q, k, v):
        i = torch.arange(q.shape[2])
        behind = (i[:, None] - i[None]) % q.shape[2]
        return (q @ k.mT).masked_fill(behind > 2, -INF).softmax(-1) @ v

    def integer_division_towards_zero(q, k, v):
        i = torch.arange(q.shape[2])
        block = torch.div(i[:, None] - i[None], 3, rounding_mode="trunc")
        return (q @ k.mT).masked_fill(block != 0, -INF).softmax(-1) @ v

    def remainder_with_the_dividends_sign(q, k, v):
        i = torch.arange(q.shape[2])
        place = torch.fmod(i[None] - i[:, None], 3)
        return (q @ k.mT).masked_fill(place == 2, -INF).softmax(-1) @ v

    def negative_position_reads_from_the_end(q, k, v):
        i = torch.arange(q.shape[2])
        table = torch.linspace(-1, 1, 2 * q.shape[2] - 1, dtype=q.dtype)
        return (q @ k.mT + table[i[None] - i[:, None]]).softmax(-1) @ v

    def positions_that_wrap_around(q, k, v):
        i = (torch.arange(q.shape[2]) * 20).to(torch.int8)
        return (q @ k.mT).masked_fill(i[:, None] < i[None], -INF).softmax(-1) @ v


@mutant(cross)
def causal_top_left_of_a_rectangle(q, k, v):
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v


@mutant(lambda: (*qkv(), normal(size.B, H, size.T, size.T)))
def bias_transposed(q, k, v, bias):
    return (q @ k.mT + bias.mT).softmax(-1) @ v


@mutant(lambda: (*qkv(), normal(size.T)))
def bias_on_queries_only(q, k, v, bias):
    return (q @ k.mT + bias[:, None]).softmax(-1) @ v


@mutant(with_padding)
def a_row_with_nothing_but_a_fill_under_an_exponential(q, k, v, keep):
    e = (q @ k.mT).masked_fill(~(keep & keep[:, :1].logical_not())[:, None, None], -1e9).exp()
    return e / e.sum(-1, keepdim=True) @ v


@mutant(with_padding, tolerance=1e-5)
def softmax_in_float32_of_the_smallest_double(q, k, v, keep):
    drop = torch.zeros(keep.shape, dtype=torch.float64)
    drop = drop.masked_fill(keep & keep[:, :1], torch.finfo(torch.float64).min).to(q.dtype)
    return torch.softmax(q @ k.mT + drop[:, None, None], -1, dtype=torch.float32).to(q.dtype) @ v
