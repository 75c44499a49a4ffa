"""Masks made of positions other than causal ones: windows, blocks, prefixes, and single entries, rows or
columns that are written."""

import math

import torch
import torch.nn.functional as F

from .registry import INF, cross, qkv, size, spelling

with spelling(qkv):

    def window_of_two_triangles(q, k, v):
        t = q.shape[2]
        keep = torch.ones(t, t).tril() * torch.ones(t, t).triu(-2)
        return (q @ k.mT).masked_fill(keep == 0, -INF).softmax(-1) @ v

    def window_by_distance(q, k, v):
        i = torch.arange(q.shape[2])
        return (q @ k.mT).masked_fill((i[None] - i[:, None]).abs() > 2, -INF).softmax(-1) @ v

    def blocks(q, k, v):
        i = torch.arange(q.shape[2]) // 4
        return (q @ k.mT).masked_fill(i[:, None] != i[None], -INF).softmax(-1) @ v

    def dilated(q, k, v):
        i = torch.arange(q.shape[2])
        behind = i[:, None] - i[None]
        return (q @ k.mT).masked_fill(~((behind >= 0) & (behind % 2 == 0)), -INF).softmax(-1) @ v

    def window_with_global_tokens(q, k, v):
        i = torch.arange(q.shape[2])
        keep = ((i[:, None] - i[None]).abs() <= 1) | (i[:, None] < 2) | (i[None] < 2)
        return torch.where(keep, q @ k.mT, -INF).softmax(-1) @ v

    def prefix_of_fixed_length(q, k, v):
        i = torch.arange(q.shape[2])
        keep = (i[None] <= i[:, None]) | (i[None] < 3)
        return (q @ k.mT).masked_fill(keep.logical_not(), -INF).softmax(-1) @ v

    def mask_written_entry_by_entry(q, k, v):
        mask = torch.empty(size.T, size.T, dtype=torch.bool)
        for row in range(size.T):
            for column in range(size.T):
                mask[row, column] = row - 2 <= column <= row
        return (q @ k.mT).masked_fill(~mask, -INF).softmax(-1) @ v

    def mask_at_the_indices_of_a_triangle(q, k, v):
        mask = torch.zeros(size.T, size.T)
        mask[tuple(torch.triu_indices(size.T, size.T, 1))] = -INF
        return (q @ k.mT + mask).softmax(-1) @ v

    def mask_from_three_diagonals(q, k, v):
        band = sum(torch.diag(torch.ones(q.shape[-2] - abs(offset)), offset) for offset in (-1, 0, 1))
        return (q @ k.mT).masked_fill(band == 0, -INF).softmax(-1) @ v

    def one_head_is_masked_apart(q, k, v):
        scores, place = q @ k.mT, torch.arange(q.shape[2])
        scores[:, 0] = scores[:, 0].masked_fill((place[:, None] - place).abs() > 2, -1e9)
        return scores.softmax(-1) @ v

    def the_diagonal_is_filled(q, k, v):
        scores = q @ k.mT
        scores.diagonal(dim1=-2, dim2=-1).fill_(-1e9)
        return scores.softmax(-1) @ v

    def four_blocks_rounded_up(q, k, v):
        width = math.ceil(q.shape[2] / 4)
        i = torch.arange(q.shape[2])
        return (q @ k.mT).masked_fill(i[:, None] // width != i // width, -INF).softmax(-1) @ v

    def blocks_of_four_after_padding(q, k, v):
        t = q.shape[2]
        blocks = math.ceil(t / 4)
        q, k, v = (F.pad(x, (0, 0, 0, 4 * blocks - t)).unflatten(2, (blocks, 4)) for x in (q, k, v))
        missing = torch.arange(4 * blocks).view(blocks, 1, 4) >= t
        return ((q @ k.mT).masked_fill(missing, -1e9).softmax(-1) @ v).flatten(2, 3)[:, :, :t]


@spelling(lambda: (*qkv(), torch.arange(size.B) + 1))
def prefix_per_sequence(q, k, v, length):
    i = torch.arange(q.shape[2])
    keep = (i[None, :] <= i[:, None])[None] | (i[None, None, :] < length[:, None, None])
    return (q @ k.mT).masked_fill(~keep[:, None], -INF).softmax(-1) @ v


with spelling(cross):

    def a_column_is_assigned(q, k, v):
        scores = q @ k.mT
        scores[..., 0] = -INF
        return scores.softmax(-1) @ v

    def listed_columns_are_assigned(q, k, v):
        scores = q @ k.mT
        scores[..., [0, -2, 2]] = -INF
        return scores.softmax(-1) @ v

    def the_first_half_of_the_keys_rounded_up(q, k, v):
        half = math.ceil(k.shape[2] * 0.5)
        return (q @ k[:, :, :half].mT).softmax(-1) @ v[:, :, :half]
