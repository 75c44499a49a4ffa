"""No token sees a later one: the causal mask as a triangle, a comparison, a number, a logarithm."""

import math

import torch

from .registry import INF, D, causal, cross, near_miss, normals, qkv, size, spelling

with spelling(qkv):

    def causal_masked_fill(q, k, v):
        s = q @ k.mT / math.sqrt(D)
        return s.masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v

    def causal_equals_zero(q, k, v):
        t = q.shape[-2]
        s = (q @ k.mT).masked_fill(torch.tril(torch.ones(t, t)) == 0, -INF)
        return s.softmax(-1) @ v

    def causal_additive(q, k, v):
        t = q.shape[-2]
        return (q @ k.mT + torch.full((t, t), -INF, dtype=q.dtype).triu(1)).softmax(-1) @ v

    def causal_additive_commuted(q, k, v):
        t = q.shape[-2]
        return (torch.zeros(t, t).masked_fill(~causal(t), -INF) + q @ k.mT).softmax(-1) @ v

    def causal_by_positions(q, k, v):
        i = torch.arange(q.shape[2])
        return (q @ k.mT).masked_fill(i[:, None] < i[None, :], -INF).softmax(-1) @ v

    def causal_smallest_float(q, k, v):
        mask = torch.where(causal(q.shape[2]), 0.0, torch.finfo(torch.float32).min)
        return (q @ k.mT + mask).softmax(-1) @ v

    def gpt2_first_release(q, k, v):
        m = causal(q.shape[2]).to(q.dtype)
        return (q @ k.mT * m - 1e10 * (1 - m)).softmax(-1) @ v

    def causal_in_place(q, k, v):
        s = q @ k.mT
        s /= math.sqrt(D)
        s.masked_fill_(~causal(q.shape[2]), -INF)
        return s.softmax(-1) @ v

    def causal_generated_by_torch(q, k, v):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(q.shape[2], dtype=q.dtype)
        return (q @ k.mT + mask).softmax(-1) @ v

    def causal_flipped_twice(q, k, v):
        ones = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
        return (q @ k.mT).masked_fill(~ones.triu().T, -INF).softmax(-1) @ v

    def vmapped_mask(q, k, v):
        i = torch.arange(q.shape[2])
        keep = torch.vmap(torch.vmap(lambda a, b: b <= a, (None, 0)), (0, None))(i, i)
        return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v

    def mask_joined_of_two_pieces(q, k, v):
        t = q.shape[2]
        memory, own = torch.zeros(t, 2), torch.full((t, t), -INF).triu(1)
        mask = torch.hstack([memory, own])[:, 2:].to(q.dtype)
        return (q @ k.mT + mask).softmax(-1) @ v

    def minus_infinity_filled_into_zeros(q, k, v):
        t = q.shape[2]
        return (q @ k.mT + torch.zeros(t, t).fill_(-INF).triu(1).to(q.dtype)).softmax(-1) @ v

    def finite_entries_of_a_mask_are_kept(q, k, v):
        mask = torch.full((q.shape[-2], k.shape[-2]), -INF).triu(1)
        return torch.where(torch.isfinite(mask), q @ k.mT, -1e9).softmax(-1) @ v

    def raised_to_the_lowest_number_after_the_mask_is_added(q, k, v):
        low = torch.finfo(torch.float32).min
        mask = torch.zeros(q.shape[2], q.shape[2], dtype=q.dtype).masked_fill(~causal(q.shape[2]), low)
        return torch.maximum(q @ k.mT + mask, torch.tensor(low, dtype=q.dtype)).softmax(-1) @ v


spelling(
    qkv,
    causal_where=lambda q, k, v: (
        torch.where(causal(q.shape[2]), q @ k.mT, torch.tensor(-INF, dtype=q.dtype)).softmax(-1) @ v
    ),
    causal_big_number=lambda q, k, v: torch.where(causal(q.shape[2]), q @ k.mT, -1e9).softmax(-1) @ v,
    causal_one_minus_mask=lambda q, k, v: (
        (q @ k.mT + (1.0 - causal(q.shape[2]).to(q.dtype)) * -10000.0).softmax(-1) @ v
    ),
    causal_logarithm_of_the_mask=lambda q, k, v: (
        (q @ k.mT + causal(q.shape[2]).to(q.dtype).log()).softmax(-1) @ v
    ),
    causal_times_a_billion=lambda q, k, v: (
        (q @ k.mT - 1e9 * (~causal(q.shape[2])).to(q.dtype)).softmax(-1) @ v
    ),
    first_token_hidden_from_itself=lambda q, k, v: (
        (q @ k.mT).masked_fill(~torch.ones(q.shape[2], q.shape[2]).tril(-1).bool(), -INF).softmax(-1) @ v
    ),
)


@spelling(cross)
def causal_bottom_right(q, k, v):
    t, s = q.shape[2], k.shape[2]
    keep = torch.ones(t, s, dtype=torch.bool).tril(s - t)
    return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v


def written_to_the_indices_of_a_triangle(q, k, v):
    s = q @ k.mT
    rows, columns = torch.triu_indices(size.T, size.T, offset=1)
    s[:, :, rows, columns] = -INF
    return s.softmax(-1) @ v


@spelling(lambda: normals("BTD BTD BTD"))
def written_to_the_diagonal_and_to_a_triangle(q, k, v):
    s = q @ k.mT
    i = torch.arange(s.shape[1])
    s[:, i, i] = 0.5
    later = torch.triu_indices(size.T, size.T, 1)
    s[:, later[0], later[1]] = -1e9
    return s.softmax(-1) @ v


@near_miss(qkv)
def written_to_indices_without_a_pattern(q, k, v):
    s = q @ k.mT
    places = torch.arange(20) ** 2 % (size.T * size.T)
    s[:, :, places // size.T, places % size.T] = -1e9
    return s.softmax(-1) @ v
