"""Several products in one softmax: chosen by a mask, or computed tile by tile."""

import torch

from .registry import INF, causal, near_miss, normals, qkv, size, spelling

FIVE = "BHTD BHTD BHTD BHTD BHTD"


def near(t):
    i = torch.arange(t)
    return (i[:, None] - i).abs() < 3


spelling(
    lambda: normals(FIVE),
    near_keys_of_one_set_far_ones_of_another=lambda q, k, g, h, v: (
        torch.where(near(q.shape[2]), q @ k.mT, g @ h.mT).softmax(-1) @ v
    ),
    two_sets_and_a_number_added_to_each_weight=lambda q, k, g, h, v: (
        (torch.where(near(q.shape[2]), q @ k.mT, g @ h.mT).softmax(-1) + 0.01) @ v
    ),
)


with spelling(lambda: normals(FIVE)):

    def two_sets_under_a_causal_mask(q, k, g, h, v):
        t = q.shape[2]
        s = torch.where(near(t), q @ k.mT, g @ h.mT) / 8**0.5
        return s.masked_fill(~causal(t), -INF).softmax(-1) @ v

    def two_sets_whose_weights_have_the_sign_of_their_score(q, k, g, h, v):
        s = torch.where(near(q.shape[2]), q @ k.mT, g @ h.mT)
        return (s.sign() * s.abs().softmax(-1)) @ v

    def two_sets_each_times_its_mask(q, k, g, h, v):
        mask = near(q.shape[2]).to(q.dtype)
        return (mask * (q @ k.mT) + (1 - mask) * (g @ h.mT)).softmax(-1) @ v


spelling(
    lambda: normals("BHTD BHTD BHTD BHTD"),
    two_sets_of_queries=lambda q, g, k, v: torch.where(near(q.shape[2]), q @ k.mT, g @ k.mT).softmax(-1) @ v,
    two_sets_of_keys=lambda q, k, h, v: torch.where(near(q.shape[2]), q @ k.mT, q @ h.mT).softmax(-1) @ v,
)


@spelling(qkv)
def tiles_of_scores_whose_sign_the_weights_have(q, k, v):
    s = torch.cat([q[:, :, :3] @ k.mT, q[:, :, 3:] @ k.mT], 2)
    return (s.sign() * s.abs().softmax(-1)) @ v


@spelling(lambda: (*normals(FIVE), torch.rand(size.B, size.T, size.T) > 0.5))
def two_sets_chosen_by_a_tensor(q, k, g, h, v, choice):
    return torch.where(choice[:, None], q @ k.mT, g @ h.mT).softmax(-1) @ v


@spelling(lambda: normals("BHTD BHTD BHTD BHTD BHTD BHTD BHTD"))
def three_sets(q, k, g, h, e, f, v):
    i = torch.arange(q.shape[2])
    s = torch.where(near(q.shape[2]), q @ k.mT, torch.where(i[:, None] < i, g @ h.mT, e @ f.mT))
    return s.softmax(-1) @ v


with spelling(lambda: normals("BH8D BH8D BH8D")):

    def tiles_joined_over_both_axes(q, k, v):
        rows = [torch.cat([a @ b.mT for b in k.split(4, 2)], -1) for a in q.split(4, 2)]
        return torch.cat(rows, 2).softmax(-1) @ v

    def tiles_written_over_both_axes(q, k, v):
        s = torch.empty(*q.shape[:2], 8, 8, dtype=q.dtype)
        for i in (0, 4):
            for j in (0, 4):
                s[:, :, i : i + 4, j : j + 4] = q[:, :, i : i + 4] @ k[:, :, j : j + 4].mT
        return s.softmax(-1) @ v

    def tiles_below_the_diagonal_alone(q, k, v):
        s = torch.full((*q.shape[:2], 8, 8), -INF, dtype=q.dtype)
        for i in (0, 4):
            for j in range(0, i + 4, 4):
                s[:, :, i : i + 4, j : j + 4] = q[:, :, i : i + 4] @ k[:, :, j : j + 4].mT
        return s.masked_fill(~causal(8), -INF).softmax(-1) @ v

    def tiles_of_different_tensors(q, k, v):
        keys, queries = (k[:, :, :4], k[:, :, 4:].tanh()), (q[:, :, :4], q[:, :, 4:].sin())
        return torch.cat([torch.cat([a @ b.mT for b in keys], -1) for a in queries], 2).softmax(-1) @ v


@spelling(lambda: normals("BH8D BH8D BH8D"))
def tiles_of_different_scale(q, k, v):
    rows = [torch.cat([(n + 1) * a @ b.mT for n, b in enumerate(k.split(4, 2))], -1) for a in q.split(4, 2)]
    return torch.cat(rows, 2).softmax(-1) @ v


with near_miss(lambda: normals(FIVE)):

    def two_sets_of_which_one_is_returned(q, k, g, h, v):
        s = g @ h.mT
        return torch.where(near(q.shape[2]), q @ k.mT, s).softmax(-1) @ v, s

    def two_softmaxes_chosen_by_a_mask_and_normalised_each_by_itself(q, k, g, h, v):
        return torch.where(near(q.shape[2]), (q @ k.mT).softmax(-1), (g @ h.mT).softmax(-1)).relu() @ v
